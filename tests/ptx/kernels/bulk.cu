// ptx/bulk.cuh: contiguous copies in and out, and the fp32 reduction.
#include "common/types.cuh"
#include "ptx/bulk.cuh"
#include "ptx/fence.cuh"
#include "ptx/mbarrier.cuh"

using namespace cki;

// Loads 64 floats a block, adds 1, stores them to `out` and adds them to `sum` (64 floats, shared by all blocks).
extern "C" __global__ void __launch_bounds__(64) bulk_copies(const float* in, float* out, float* sum) {
  constexpr u32 kBytes = 256;
  __shared__ __align__(128) float tile[64];
  __shared__ u64 full;
  const int t = threadIdx.x;
  if (t == 0) {
    ptx::bulk_prefetch_l2(in + blockIdx.x * 64, kBytes);
    ptx::mbarrier_init(&full, 1);
    ptx::fence_mbarrier_init();
  }
  __syncthreads();
  if (t == 0) {
    ptx::mbarrier_arrive_expect_tx(&full, kBytes);
    ptx::bulk_load(tile, in + blockIdx.x * 64, kBytes, &full);
  }
  ptx::mbarrier_wait_parity(&full, 0);
  tile[t] += 1.0f;
  ptx::fence_proxy_async_shared();
  __syncthreads();
  if (t == 0) {
    ptx::bulk_store(out + blockIdx.x * 64, tile, kBytes);
    ptx::bulk_commit_group();
    ptx::bulk_reduce_add_f32(sum, tile, kBytes);
    ptx::bulk_commit_group();
    ptx::bulk_wait_group_read<1>();
    ptx::bulk_wait_group<0>();
  }
}
