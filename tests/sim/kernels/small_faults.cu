// Small kernels with one planted mistake each; kFault 0 is the sound version. See test_fault_copies.py.
#include "common/swizzle.cuh"
#include "common/wgmma_descriptor.cuh"
#include "ptx/barrier.cuh"
#include "ptx/cp_async.cuh"
#include "ptx/fence.cuh"
#include "ptx/ldmatrix.cuh"
#include "ptx/mbarrier.cuh"
#include "ptx/mma.cuh"
#include "ptx/tma.cuh"
#include "ptx/wgmma.cuh"

using namespace cki;

enum Fault {
  kNoCopyWait = 1,
  kNoBarrier,
  kNoProxyFence,
  kAccumulatorsTouched,
  kSourceOverwritten,
  kMissingThread,
  kUninitialised,
  kOverArrival,
};

constexpr int kTile = 64;

__device__ void store_fragment(float* c, int warp, int column, const float (&d)[4]) {
  const int lane = threadIdx.x % 32;
  for (int i = 0; i < 4; ++i) c[(warp * 16 + lane / 4 + i / 2 * 8) * kTile + column + lane % 4 * 2 + i % 2] = d[i];
}

// C[64,64] = A B^T by cp.async, ldmatrix and mma.sync; 128 threads.
extern "C" __global__ void __launch_bounds__(128) sync_gemm(const bf16* a, const bf16* b, float* c) {
  __shared__ __align__(1024) u8 tile_a[kTile * 128];
  __shared__ __align__(1024) u8 tile_b[kTile * 128];
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  for (int i = threadIdx.x; i < kTile * 8; i += 128) {
    const u32 place = swizzle<128>(i * 16);
    ptx::cp_async<16>(tile_a + place, a + i * 8);
    ptx::cp_async<16>(tile_b + place, b + i * 8);
  }
  ptx::cp_async_commit_group();
  if constexpr (kFault != kNoCopyWait) ptx::cp_async_wait_group<0>();
  if constexpr (kFault != kNoBarrier) __syncthreads();
  float sum[8][4] = {};
  for (int k = 0; k < 4; ++k) {
    u32 fragment_a[4], fragment_b[4];
    ptx::ldmatrix_x4(fragment_a, tile_a + swizzle<128>((warp * 16 + lane % 16) * 128 + k * 32 + lane / 16 * 16));
    for (int n = 0; n < 4; ++n) {
      ptx::ldmatrix_x4(fragment_b,
                       tile_b + swizzle<128>((n * 16 + lane % 8 + lane / 16 * 8) * 128 + k * 32 + lane / 8 % 2 * 16));
      const u32 low[2] = {fragment_b[0], fragment_b[1]}, high[2] = {fragment_b[2], fragment_b[3]};
      ptx::mma_m16n8k16_bf16(sum[2 * n], fragment_a, low, sum[2 * n]);
      ptx::mma_m16n8k16_bf16(sum[2 * n + 1], fragment_a, high, sum[2 * n + 1]);
    }
  }
  for (int n = 0; n < 8; ++n) store_fragment(c, warp, n * 8, sum[n]);
}

// The same product: ordinary stores into swizzled tiles, then wgmma; 128 threads.
extern "C" __global__ void __launch_bounds__(128, 1) stored_gemm(const bf16* a, const bf16* b, float* c) {
  __shared__ __align__(1024) u8 tile_a[kTile * 128];
  __shared__ __align__(1024) u8 tile_b[kTile * 128];
  for (int i = threadIdx.x; i < kTile * 8; i += 128) {
    const u32 place = swizzle<128>(i * 16);
    *reinterpret_cast<uint4*>(tile_a + place) = reinterpret_cast<const uint4*>(a)[i];
    *reinterpret_cast<uint4*>(tile_b + place) = reinterpret_cast<const uint4*>(b)[i];
  }
  if constexpr (kFault != kNoProxyFence) ptx::fence_proxy_async_shared();
  if (kFault != kMissingThread || threadIdx.x != 77) ptx::bar_sync(1, 128);
  float sum[kTile / 2] = {};
  const u64 first_a = wgmma_descriptor_k_major<128>(tile_a), first_b = wgmma_descriptor_k_major<128>(tile_b);
  ptx::wgmma_fence();
  for (int k = 0; k < 4; ++k) {
    ptx::wgmma<kTile, bf16>(sum, wgmma_descriptor_advance(first_a, k * 32), wgmma_descriptor_advance(first_b, k * 32),
                            true);
    if constexpr (kFault == kAccumulatorsTouched) {
      if (k == 1) sum[3] += 1.0f;
    }
  }
  ptx::wgmma_commit_group();
  ptx::wgmma_wait_group<0>();
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  for (int i = 0; i < kTile / 2; ++i) {
    c[(warp * 16 + lane / 4 + i / 2 % 2 * 8) * kTile + i / 4 * 8 + lane % 4 * 2 + i % 2] = sum[i];
  }
}

// Doubles 4 tiles of 32x32 floats: TMA in, arithmetic in shared memory, TMA out through one buffer; 128 threads.
extern "C" __global__ void __launch_bounds__(128)
    doubled(const __grid_constant__ TensorMap in, const __grid_constant__ TensorMap out) {
  constexpr int kElements = 32 * 32;
  __shared__ __align__(1024) float loaded[kElements];
  __shared__ __align__(1024) float result[kElements];
  __shared__ u64 full;
  const int t = threadIdx.x;
  if (t == 0) {
    if constexpr (kFault != kUninitialised) ptx::mbarrier_init(&full, 1);
    ptx::fence_mbarrier_init();
  }
  __syncthreads();
  for (int tile = 0; tile < 4; ++tile) {
    if (t == 0) {
      ptx::mbarrier_arrive_expect_tx(&full, kElements * 4);
      if constexpr (kFault == kOverArrival) ptx::mbarrier_arrive(&full);
      ptx::tma_load_2d(loaded, &in, &full, 0, tile * 32);
      if constexpr (kFault != kSourceOverwritten) ptx::bulk_wait_group_read<0>();
    }
    __syncthreads();   // the earlier store has read `result`
    ptx::mbarrier_wait_parity(&full, tile % 2);
    for (int i = t; i < kElements; i += 128) result[i] = 2.0f * loaded[i];
    if constexpr (kFault != kNoProxyFence) ptx::fence_proxy_async_shared();
    __syncthreads();
    if (t == 0) {
      ptx::tma_store_2d(&out, result, 0, tile * 32);
      ptx::bulk_commit_group();
    }
  }
  if (t == 0) ptx::bulk_wait_group<0>();
}
