// ptx/mbarrier.cuh inside one block: phases, counts, invalidation, and a ring of values between two warps.
#include "common/types.cuh"
#include "ptx/mbarrier.cuh"

using namespace cki;

// out: [0..8) tests by one thread, [8..8+rounds) what the consumer warp received (sums of 32 values).
extern "C" __global__ void __launch_bounds__(64) phases(u32* out, int rounds) {
  constexpr int kStages = 2;
  __shared__ u64 probe;
  __shared__ u64 full[kStages], empty[kStages];
  __shared__ u32 values[kStages][32];
  const int t = threadIdx.x, lane = t % 32;
  if (t == 0) {
    ptx::mbarrier_init(&probe, 2);
    out[0] = ptx::mbarrier_test_wait_parity(&probe, 1);   // the phase before the first counts as complete
    out[1] = ptx::mbarrier_test_wait_parity(&probe, 0);
    ptx::mbarrier_arrive(&probe);
    out[2] = ptx::mbarrier_test_wait_parity(&probe, 0);
    ptx::mbarrier_arrive_expect_tx(&probe, 0);
    out[3] = ptx::mbarrier_test_wait_parity(&probe, 0);
    out[4] = ptx::mbarrier_test_wait_parity(&probe, 1);   // the second phase is open
    ptx::mbarrier_expect_tx(&probe, 0);
    ptx::mbarrier_arrive_cluster(&probe, 0);              // the own block, by its rank
    ptx::mbarrier_arrive_cluster_unordered(&probe, 0);
    out[5] = ptx::mbarrier_test_wait_parity(&probe, 1);
    ptx::mbarrier_invalidate(&probe);
    ptx::mbarrier_init(&probe, 1);
    ptx::mbarrier_arrive(&probe);
    out[6] = ptx::mbarrier_try_wait_parity(&probe, 0);
    out[7] = ptx::mbarrier_try_wait_parity_cluster(&probe, 0);
    for (int i = 0; i < kStages; ++i) {
      ptx::mbarrier_init(full + i, 32);
      ptx::mbarrier_init(empty + i, 32);
    }
    ptx::fence_mbarrier_init();
  }
  __syncthreads();
  for (int round = 0; round < rounds; ++round) {
    const int stage = round % kStages;
    const u32 parity = round / kStages % 2;
    if (t < 32) {
      ptx::mbarrier_wait_parity(empty + stage, parity ^ 1);
      values[stage][lane] = round * 100 + lane;
      ptx::mbarrier_arrive(full + stage);
    } else {
      ptx::mbarrier_wait_parity(full + stage, parity);
      u32 sum = 0;
      for (int i = 0; i < 32; ++i) sum += values[stage][i];
      ptx::mbarrier_arrive(empty + stage);
      if (lane == 31) out[8 + round] = sum;
    }
  }
}
