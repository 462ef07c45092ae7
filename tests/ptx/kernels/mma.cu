// Each mma.sync of ptx/mma.cuh, one warp a problem: the fragments are gathered from row-major A, column-major B and C.
#include "common/types.cuh"
#include "ptx/mma.cuh"

using namespace cki;

// Four neighbours, two or one along K make a register of 32 bits: words_k is K counted in registers.
template <int WordsK>
__device__ void load_fragments(const u32* a_matrix, const u32* b_matrix, u32 (&a)[4], u32 (&b)[2]) {
  const int g = threadIdx.x / 4, t = threadIdx.x % 4;
  a[0] = a_matrix[g * WordsK + t];
  a[1] = a_matrix[(g + 8) * WordsK + t];
  a[2] = a_matrix[g * WordsK + t + WordsK / 2];
  a[3] = a_matrix[(g + 8) * WordsK + t + WordsK / 2];
  b[0] = b_matrix[g * WordsK + t];
  b[1] = b_matrix[g * WordsK + t + WordsK / 2];
}

__device__ void load_c(const float* matrix, float (&c)[4]) {
  const int g = threadIdx.x / 4, t = threadIdx.x % 4;
  for (int i = 0; i < 4; ++i) c[i] = matrix[(g + i / 2 * 8) * 8 + 2 * t + i % 2];
}

__device__ void store_d(float* matrix, const float (&d)[4]) {
  const int g = threadIdx.x / 4, t = threadIdx.x % 4;
  for (int i = 0; i < 4; ++i) matrix[(g + i / 2 * 8) * 8 + 2 * t + i % 2] = d[i];
}

// Each A: [blocks][16][K], B: [blocks][8][K] (that is, columns of K), C and D: [blocks][16][8]; all K are 32 bytes.
extern "C" __global__ void __launch_bounds__(32)
    products(const u32* a_f16, const u32* b_f16, const u32* a_bf16, const u32* b_bf16, const u32* a_tf32,
             const u32* b_tf32, const u32* a_e4m3, const u32* b_e4m3, const float* c_matrix, float* d_f16,
             float* d_bf16, float* d_tf32, float* d_e4m3) {
  constexpr int kWords = 8;
  const int block = blockIdx.x, a_at = block * 16 * kWords, b_at = block * 8 * kWords, c_at = block * 128;
  u32 a[4], b[2];
  float c[4], d[4];
  load_c(c_matrix + c_at, c);
  load_fragments<kWords>(a_f16 + a_at, b_f16 + b_at, a, b);
  ptx::mma_m16n8k16_f16(d, a, b, c);
  store_d(d_f16 + c_at, d);
  load_fragments<kWords>(a_bf16 + a_at, b_bf16 + b_at, a, b);
  ptx::mma_m16n8k16_bf16(d, a, b, c);
  store_d(d_bf16 + c_at, d);
  load_fragments<kWords>(a_tf32 + a_at, b_tf32 + b_at, a, b);
  ptx::mma_m16n8k8_tf32(d, a, b, c);
  store_d(d_tf32 + c_at, d);
  load_fragments<kWords>(a_e4m3 + a_at, b_e4m3 + b_at, a, b);
  ptx::mma_m16n8k32_e4m3(d, a, b, c);
  store_d(d_e4m3 + c_at, d);
}
