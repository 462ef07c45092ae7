// C[M,N] = A[M,K] B[N,K]^T on Hopper: a producer warp fills a ring of stages by TMA, a warpgroup multiplies by wgmma.
//
// A and B are bf16, K-major, C is fp32; M and N are multiples of 64, K of 64. One block computes a 64x64 tile of C.
// Stage s is handed over by the barriers full[s] (TMA's bytes) and empty[s] (one arrival of each consumer warp).
// kFault plants one mistake (0: none), to show that the simulated device reports it; see test_fault_gemm.py.
#include "common/wgmma_descriptor.cuh"
#include "ptx/mbarrier.cuh"
#include "ptx/setmaxnreg.cuh"
#include "ptx/tma.cuh"
#include "ptx/wgmma.cuh"

using namespace cki;

constexpr int kTile = 64, kTileBytes = kTile * kTile * 2, kConsumerWarps = 4;

enum Fault {
  kNoWaitForFull = 1,
  kNoWaitGroup,
  kNoWaitForEmpty,
  kStageReleasedEarly,
  kNoBarrierAfterInit,
  kTooFewBytesExpected,
  kNoFence,
  kOneWarpWaitsForFull,
  kWaitGroupOne,
};

struct Ring {
  u8* a;
  u8* b;
  u64* full;
  u64* empty;
};

__device__ void produce(const TensorMap& map_a, const TensorMap& map_b, const Ring& ring, int k_tiles) {
  for (int i = 0; i < k_tiles; ++i) {
    const int stage = i % kStages;
    if constexpr (kFault != kNoWaitForEmpty) ptx::mbarrier_wait_parity(ring.empty + stage, i / kStages % 2 ^ 1);
    ptx::mbarrier_arrive_expect_tx(ring.full + stage, kFault == kTooFewBytesExpected ? kTileBytes : 2 * kTileBytes);
    ptx::tma_load_2d(ring.a + stage * kTileBytes, &map_a, ring.full + stage, i * kTile, blockIdx.y * kTile);
    ptx::tma_load_2d(ring.b + stage * kTileBytes, &map_b, ring.full + stage, i * kTile, blockIdx.x * kTile);
  }
}

__device__ void consume(const Ring& ring, int k_tiles, int thread, float (&sum)[kTile / 2]) {
  for (int i = 0; i < k_tiles; ++i) {
    const int stage = i % kStages;
    const u32 parity = i / kStages % 2;
    if constexpr (kFault == kOneWarpWaitsForFull) {
      if (thread < 32) ptx::mbarrier_wait_parity(ring.full + stage, parity);
    } else if constexpr (kFault != kNoWaitForFull) {
      ptx::mbarrier_wait_parity(ring.full + stage, parity);
    }
    const u64 a = wgmma_descriptor_k_major<128>(ring.a + stage * kTileBytes);
    const u64 b = wgmma_descriptor_k_major<128>(ring.b + stage * kTileBytes);
    if constexpr (kFault != kNoFence) ptx::wgmma_fence();
#pragma unroll
    for (int k = 0; k < kTile / 16; ++k) {
      ptx::wgmma<kTile, bf16>(sum, wgmma_descriptor_advance(a, k * 32), wgmma_descriptor_advance(b, k * 32), true);
    }
    ptx::wgmma_commit_group();
    if constexpr (kFault == kStageReleasedEarly) {
      if (thread % 32 == 0) ptx::mbarrier_arrive(ring.empty + stage);
    }
    if constexpr (kFault == kWaitGroupOne) {
      ptx::wgmma_wait_group<1>();
    } else if constexpr (kFault != kNoWaitGroup) {
      ptx::wgmma_wait_group<0>();
    }
    if constexpr (kFault != kStageReleasedEarly) {
      if (thread % 32 == 0) ptx::mbarrier_arrive(ring.empty + stage);
    }
  }
}

extern "C" __global__ void __launch_bounds__(256, 1)
    wgmma_gemm(const __grid_constant__ TensorMap map_a, const __grid_constant__ TensorMap map_b, float* c, int n,
               int k) {
  extern __shared__ __align__(1024) u8 smem[];
  u64* barriers = reinterpret_cast<u64*>(smem + 2 * kStages * kTileBytes);
  const Ring ring{smem, smem + kStages * kTileBytes, barriers, barriers + kStages};
  const int thread = threadIdx.x % 128, k_tiles = k / kTile;
  if (threadIdx.x == 0) {
    for (int i = 0; i < kStages; ++i) {
      ptx::mbarrier_init(ring.full + i, 1);
      ptx::mbarrier_init(ring.empty + i, kConsumerWarps);
    }
    ptx::fence_mbarrier_init();
  }
  if constexpr (kFault != kNoBarrierAfterInit) __syncthreads();
  if (threadIdx.x < 128) {
    ptx::setmaxnreg_dec<40>();
    if (thread == 0) produce(map_a, map_b, ring, k_tiles);
    return;
  }
  ptx::setmaxnreg_inc<232>();
  float sum[kTile / 2] = {};
  consume(ring, k_tiles, thread, sum);
#pragma unroll
  for (int i = 0; i < kTile / 2; ++i) {
    const int row = blockIdx.y * kTile + thread / 32 * 16 + thread % 32 / 4 + i / 2 % 2 * 8;
    const int column = blockIdx.x * kTile + i / 4 * 8 + thread % 4 * 2 + i % 2;
    c[static_cast<i64>(row) * n + column] = sum[i];
  }
}
