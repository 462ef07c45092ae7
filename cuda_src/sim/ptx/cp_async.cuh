// Simulated ptx/cp_async.cuh: runtime/cp_async.cpp.
#pragma once

#include "common/types.cuh"

extern "C" {
void cki_sim_cp_async(void* shared, const void* global, int bytes, int source_bytes);
void cki_sim_cp_async_commit_group();
void cki_sim_cp_async_wait_group(int newest_allowed);
void cki_sim_cp_async_wait_all();
void cki_sim_cp_async_mbarrier_arrive_noinc(void* barrier);
}

namespace cki::ptx {

template <int Bytes, int Prefetch = 0>
__device__ __forceinline__ void cp_async(void* shared, const void* global, int source_bytes = Bytes) {
  static_assert(Bytes == 4 || Bytes == 8 || Bytes == 16, "cp.async copies 4, 8 or 16 bytes");
  static_assert(Prefetch == 0 || (Bytes == 16 && (Prefetch == 128 || Prefetch == 256)), "no such hint here");
  cki_sim_cp_async(shared, global, Bytes, source_bytes);
}

__device__ __forceinline__ void cp_async_commit_group() { cki_sim_cp_async_commit_group(); }

template <int N>
__device__ __forceinline__ void cp_async_wait_group() {
  static_assert(N >= 0);
  cki_sim_cp_async_wait_group(N);
}

__device__ __forceinline__ void cp_async_wait_all() { cki_sim_cp_async_wait_all(); }

__device__ __forceinline__ void cp_async_mbarrier_arrive_noinc(u64* barrier) {
  cki_sim_cp_async_mbarrier_arrive_noinc(barrier);
}

}  // namespace cki::ptx
