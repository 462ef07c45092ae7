// softmax(scale Q K^T) V for one head of 64 columns: 128 query rows a block, keys and values in tiles of 128 through
// a TMA ring.
//
// bf16 in, fp32 out. Warpgroup 0 produces; 1 and 2 own 64 query rows each. S = Q K^T stays in registers, its
// probabilities are packed to bf16 as the A operand of P V, and V is read MN-major as it lies. Not a tuned kernel: it
// shows that the simulated device carries the instructions of one, and how fast.
#include "common/wgmma_descriptor.cuh"
#include "ptx/convert.cuh"
#include "ptx/elect.cuh"
#include "ptx/math.cuh"
#include "ptx/mbarrier.cuh"
#include "ptx/setmaxnreg.cuh"
#include "ptx/tma.cuh"
#include "ptx/wgmma.cuh"

using namespace cki;

constexpr int kHeadDim = 64, kKeys = 128, kStages = 2, kTileBytes = kKeys * kHeadDim * 2;

__device__ float row_reduce(float x, bool maximum) {
  for (int step = 1; step < 4; step *= 2) {
    const float other = __shfl_xor_sync(0xffffffffu, x, step);
    x = maximum ? fmaxf(x, other) : x + other;
  }
  return x;
}

extern "C" __global__ void __launch_bounds__(384, 1)
    wgmma_attention(const __grid_constant__ TensorMap map_q, const __grid_constant__ TensorMap map_k,
                    const __grid_constant__ TensorMap map_v, float* out, int key_tiles, float scale_log2) {
  extern __shared__ __align__(1024) u8 smem[];
  u8 *tile_q = smem, *tiles_k = smem + kTileBytes, *tiles_v = tiles_k + kStages * kTileBytes;
  u64* full = reinterpret_cast<u64*>(tiles_v + kStages * kTileBytes);
  u64 *empty = full + kStages, *full_q = empty + kStages;
  const int warpgroup = threadIdx.x / 128, warp = threadIdx.x % 128 / 32, lane = threadIdx.x % 32;
  if (threadIdx.x == 0) {
    for (int i = 0; i < kStages; ++i) {
      ptx::mbarrier_init(full + i, 1);
      ptx::mbarrier_init(empty + i, 8);
    }
    ptx::mbarrier_init(full_q, 1);
    ptx::fence_mbarrier_init();
  }
  __syncthreads();
  if (warpgroup == 0) {
    ptx::setmaxnreg_dec<24>();
    if (warp == 0 && ptx::elect_one()) {
      ptx::mbarrier_arrive_expect_tx(full_q, kTileBytes);
      ptx::tma_load_2d(tile_q, &map_q, full_q, 0, blockIdx.x * 128);
      for (int j = 0; j < key_tiles; ++j) {
        const int stage = j % kStages;
        ptx::mbarrier_wait_parity(empty + stage, j / kStages % 2 ^ 1);
        ptx::mbarrier_arrive_expect_tx(full + stage, 2 * kTileBytes);
        ptx::tma_load_2d(tiles_k + stage * kTileBytes, &map_k, full + stage, 0, j * kKeys);
        ptx::tma_load_2d(tiles_v + stage * kTileBytes, &map_v, full + stage, 0, j * kKeys);
      }
    }
    return;
  }
  ptx::setmaxnreg_inc<240>();
  float o[kHeadDim / 2] = {}, row_max[2] = {-1e30f, -1e30f}, row_sum[2] = {};
  const u64 q = wgmma_descriptor_k_major<128>(tile_q + (warpgroup - 1) * 64 * 128);
  ptx::mbarrier_wait_parity(full_q, 0);
  for (int j = 0; j < key_tiles; ++j) {
    const int stage = j % kStages;
    const u64 k = wgmma_descriptor_k_major<128>(tiles_k + stage * kTileBytes);
    const u64 v = wgmma_descriptor_mn_major<128>(tiles_v + stage * kTileBytes, kTileBytes);
    float s[kKeys / 2];
    ptx::mbarrier_wait_parity(full + stage, j / kStages % 2);
    ptx::wgmma_fence();
#pragma unroll
    for (int i = 0; i < kHeadDim / 16; ++i) {
      ptx::wgmma<kKeys, bf16>(s, wgmma_descriptor_advance(q, i * 32), wgmma_descriptor_advance(k, i * 32), i != 0);
    }
    ptx::wgmma_commit_group();
    ptx::wgmma_wait_group<0>();
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      float largest = row_max[half];
#pragma unroll
      for (int i = 0; i < kKeys / 2; ++i) {
        if (i / 2 % 2 == half) largest = fmaxf(largest, s[i]);
      }
      largest = row_reduce(largest, true);
      const float correction = ptx::ex2_approx((row_max[half] - largest) * scale_log2);
      row_max[half] = largest;
      float sum = 0.0f;
#pragma unroll
      for (int i = 0; i < kKeys / 2; ++i) {
        if (i / 2 % 2 == half) sum += s[i] = ptx::ex2_approx((s[i] - largest) * scale_log2);
      }
      row_sum[half] = row_sum[half] * correction + sum;
#pragma unroll
      for (int i = 0; i < kHeadDim / 2; ++i) {
        if (i / 2 % 2 == half) o[i] *= correction;
      }
    }
    u32 p[kKeys / 16][4];
#pragma unroll
    for (int i = 0; i < kKeys / 4; ++i) p[i / 4][i % 4] = ptx::f32x2_to_bf16x2(s[2 * i], s[2 * i + 1]);
    ptx::wgmma_fence();
#pragma unroll
    for (int i = 0; i < kKeys / 16; ++i) {
      ptx::wgmma<kHeadDim, bf16, Major::mn>(o, p[i], wgmma_descriptor_advance(v, i * 16 * 128), true);
    }
    ptx::wgmma_commit_group();
    ptx::wgmma_wait_group<0>();
    if (lane == 0) ptx::mbarrier_arrive(empty + stage);
  }
  for (int half = 0; half < 2; ++half) {
    const float total = row_reduce(row_sum[half], false);
    const i64 row = blockIdx.x * 128 + (warpgroup - 1) * 64 + warp * 16 + lane / 4 + half * 8;
    for (int i = 0; i < kHeadDim / 2; ++i) {
      if (i / 2 % 2 == half) out[row * kHeadDim + i / 4 * 8 + lane % 4 * 2 + i % 2] = o[i] / total;
    }
  }
}
