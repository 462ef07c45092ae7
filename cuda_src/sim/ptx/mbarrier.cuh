// Simulated ptx/mbarrier.cuh: runtime/mbarrier.cpp.
#pragma once

#include "common/types.cuh"
#include "runtime_api.h"

extern "C" {
void cki_sim_mbarrier_init(void* barrier, unsigned count);
void cki_sim_mbarrier_invalidate(void* barrier);
void cki_sim_mbarrier_arrive(void* barrier, unsigned expected_bytes);
void cki_sim_mbarrier_arrive_cluster(void* local, unsigned rank);
void cki_sim_mbarrier_expect_tx(void* barrier, unsigned bytes);
int cki_sim_mbarrier_try_wait_parity(void* barrier, unsigned parity);
int cki_sim_mbarrier_test_wait_parity(void* barrier, unsigned parity);
}

namespace cki::ptx {

__device__ __forceinline__ void mbarrier_init(u64* barrier, u32 count) { cki_sim_mbarrier_init(barrier, count); }
__device__ __forceinline__ void mbarrier_invalidate(u64* barrier) { cki_sim_mbarrier_invalidate(barrier); }
__device__ __forceinline__ void fence_mbarrier_init() {}
__device__ __forceinline__ void mbarrier_arrive(u64* barrier) { cki_sim_mbarrier_arrive(barrier, 0); }

__device__ __forceinline__ void mbarrier_arrive_expect_tx(u64* barrier, u32 bytes) {
  cki_sim_mbarrier_arrive(barrier, bytes);
}

__device__ __forceinline__ void mbarrier_expect_tx(u64* barrier, u32 bytes) {
  cki_sim_mbarrier_expect_tx(barrier, bytes);
}

__device__ __forceinline__ void mbarrier_arrive_cluster(u64* local, u32 cta_rank) {
  cki_sim_mbarrier_arrive_cluster(local, cta_rank);
}

// Here it orders as much as the other.
__device__ __forceinline__ void mbarrier_arrive_cluster_unordered(u64* local, u32 cta_rank) {
  cki_sim_mbarrier_arrive_cluster(local, cta_rank);
}

__device__ __forceinline__ bool mbarrier_try_wait_parity(u64* barrier, u32 parity) {
  return cki_sim_mbarrier_try_wait_parity(barrier, parity) != 0;
}

__device__ __forceinline__ bool mbarrier_test_wait_parity(u64* barrier, u32 parity) {
  return cki_sim_mbarrier_test_wait_parity(barrier, parity) != 0;
}

__device__ __forceinline__ bool mbarrier_try_wait_parity_cluster(u64* barrier, u32 parity) {
  return cki_sim_mbarrier_try_wait_parity(barrier, parity) != 0;
}

__device__ __forceinline__ void mbarrier_wait_parity(u64* barrier, u32 parity) {
  while (!mbarrier_try_wait_parity(barrier, parity)) {
  }
}

}  // namespace cki::ptx
