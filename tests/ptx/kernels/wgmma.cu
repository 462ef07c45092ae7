// One wgmma of N = kN columns and element type Element by one warpgroup, with operands in every arrangement.
#include "common/types.cuh"
#include "common/swizzle.cuh"
#include "common/wgmma_descriptor.cuh"
#include "ptx/fence.cuh"
#include "ptx/wgmma.cuh"

using namespace cki;

constexpr int kK = 32 / static_cast<int>(sizeof(Element)), kRowBytes = 32, kThreads = 128;

// Writes 16-byte chunk `chunk` of row `row` of a K-major operand.
template <int Span>
__device__ u32 k_major_offset(int row, int chunk, int rows) {
  if constexpr (Span == 0)
    return chunk * rows * 16 + row * 16;   // core matrices along rows first: stride 128, leading rows * 16
  if constexpr (Span != 0) return swizzle<Span>(row * Span + chunk * 16);
}

// MN-major: chunk of 8 columns at K index k.
template <int Span>
__device__ u32 mn_major_offset(int k, int chunk, int columns) {
  if constexpr (Span == 0) {
    return chunk * 128 + k % 8 * 16 + k / 8 * columns * 16;   // stride 128, leading columns * 16
  } else {
    constexpr int kChunks = Span / 16;   // of a row
    return swizzle<Span>(chunk / kChunks * (kK * Span) + k * Span + chunk % kChunks * 16);
  }
}

template <int Span>
__device__ void place_k_major(u8* tile, const u8* matrix, int rows) {
  for (int i = threadIdx.x; i < rows * 2; i += kThreads) {
    *reinterpret_cast<uint4*>(tile + k_major_offset<Span>(i / 2, i % 2, rows)) =
        *reinterpret_cast<const uint4*>(matrix + i / 2 * kRowBytes + i % 2 * 16);
  }
}

template <int Span>
__device__ void place_mn_major(u8* tile, const u8* matrix, int columns) {
  const int chunks = columns / 8;
  for (int i = threadIdx.x; i < kK * chunks; i += kThreads) {
    *reinterpret_cast<uint4*>(tile + mn_major_offset<Span>(i / chunks, i % chunks, columns)) =
        *reinterpret_cast<const uint4*>(matrix + i / chunks * columns * 2 + i % chunks * 16);
  }
}

template <int Span>
__device__ u64 k_major(const u8* tile, int rows) {
  if constexpr (Span == 0) return wgmma_descriptor<0>(tile, rows * 16, 128);
  if constexpr (Span != 0) return wgmma_descriptor_k_major<Span>(tile);
}

template <int Span>
__device__ u64 mn_major(const u8* tile, int columns) {
  if constexpr (Span == 0) return wgmma_descriptor<0>(tile, columns * 16, 128);
  if constexpr (Span != 0) return wgmma_descriptor_mn_major<Span>(tile, kK * Span);
}

// The whole life of one product, so that the compiler moves no accumulator between its steps.
template <Major MajorA, Major MajorB>
__device__ void multiply(float (&sum)[kN / 2], u64 a, u64 b, bool accumulate) {
  ptx::wgmma_fence_registers(sum);
  ptx::wgmma_fence();
  ptx::wgmma<kN, Element, MajorA, MajorB>(sum, a, b, accumulate);
  ptx::wgmma_commit_group();
  ptx::wgmma_wait_group<0>();
  ptx::wgmma_fence_registers(sum);
}

template <Major, Major MajorB>
__device__ void multiply(float (&sum)[kN / 2], u32 (&a)[4], u64 b, bool accumulate) {
  ptx::wgmma_fence_registers(sum);
  ptx::wgmma_fence_registers(a);
  ptx::wgmma_fence();
  ptx::wgmma<kN, Element, MajorB>(sum, a, b, accumulate);
  ptx::wgmma_commit_group();
  ptx::wgmma_wait_group<0>();
  ptx::wgmma_fence_registers(sum);
}

// a: [64][K], a_transposed: [K][64], b: [N][K], b_transposed: [K][N], c: [64][N]; d: [64][N].
// form: 0 A shared, 1 A registers, 2 A MN-major; plus 4 for B MN-major.
template <int Span>
__device__ void product(const u8* a, const u8* a_transposed, const u8* b, const u8* b_transposed, const float* c,
                        float* d, int form, int accumulate, u8* tile_a, u8* tile_b) {
  const int warp = threadIdx.x / 32, g = threadIdx.x % 32 / 4, t = threadIdx.x % 4;
  if (form % 4 == 2) place_mn_major<Span>(tile_a, a_transposed, 64);
  else place_k_major<Span>(tile_a, a, 64);
  if (form / 4 == 1) place_mn_major<Span>(tile_b, b_transposed, kN);
  else place_k_major<Span>(tile_b, b, kN);
  ptx::fence_proxy_async_shared();
  __syncthreads();
  float sum[kN / 2];
  for (int i = 0; i < kN / 2; ++i) {
    const int row = warp * 16 + g + i / 2 % 2 * 8, column = i / 4 * 8 + t * 2 + i % 2;
    sum[i] = c[row * kN + column];
  }
  u32 fragment[4];
  for (int i = 0; i < 4; ++i) {
    const int row = warp * 16 + g + i % 2 * 8;
    fragment[i] = *reinterpret_cast<const u32*>(a + row * kRowBytes + t * 4 + i / 2 * 16);
  }
  const u64 descriptor_a = k_major<Span>(tile_a, 64), descriptor_b = k_major<Span>(tile_b, kN);
  if constexpr (sizeof(Element) == 2) {
    const u64 descriptor_a_mn = mn_major<Span>(tile_a, 64), descriptor_b_mn = mn_major<Span>(tile_b, kN);
    switch (form) {
      case 0: multiply<Major::k, Major::k>(sum, descriptor_a, descriptor_b, accumulate); break;
      case 1: multiply<Major::k, Major::k>(sum, fragment, descriptor_b, accumulate); break;
      case 2: multiply<Major::mn, Major::k>(sum, descriptor_a_mn, descriptor_b, accumulate); break;
      case 4: multiply<Major::k, Major::mn>(sum, descriptor_a, descriptor_b_mn, accumulate); break;
      case 5: multiply<Major::k, Major::mn>(sum, fragment, descriptor_b_mn, accumulate); break;
      default: multiply<Major::mn, Major::mn>(sum, descriptor_a_mn, descriptor_b_mn, accumulate); break;
    }
  } else {
    if (form == 0) {
      multiply<Major::k, Major::k>(sum, descriptor_a, descriptor_b, accumulate);
    } else {
      multiply<Major::k, Major::k>(sum, fragment, descriptor_b, accumulate);
    }
  }
  for (int i = 0; i < kN / 2; ++i) {
    const int row = warp * 16 + g + i / 2 % 2 * 8, column = i / 4 * 8 + t * 2 + i % 2;
    d[row * kN + column] = sum[i];
  }
}

extern "C" __global__ void __launch_bounds__(kThreads, 1)
    products(const u8* a, const u8* a_transposed, const u8* b, const u8* b_transposed, const float* c, float* d,
             int form, int accumulate, int span) {
  extern __shared__ __align__(1024) u8 tiles[];
  u8 *tile_a = tiles, *tile_b = tiles + 8192;   // 64 rows of at most 128 bytes, then B
  switch (span) {
    case 128: product<128>(a, a_transposed, b, b_transposed, c, d, form, accumulate, tile_a, tile_b); break;
    case 64: product<64>(a, a_transposed, b, b_transposed, c, d, form, accumulate, tile_a, tile_b); break;
    case 32: product<32>(a, a_transposed, b, b_transposed, c, d, form, accumulate, tile_a, tile_b); break;
    default: product<0>(a, a_transposed, b, b_transposed, c, d, form, accumulate, tile_a, tile_b); break;
  }
}
