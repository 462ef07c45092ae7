// Asynchronous copies from global to shared memory (PTX cp.async, sm_80), counted in groups of the issuing thread.
//
// A copy is visible to the issuing thread after the wait on its group, and to other threads after a barrier behind that
// wait. The writes go through the generic proxy: before wgmma or TMA reads them, each copying thread needs
// fence_proxy_async_shared().
#pragma once

#include "common/types.cuh"
#include "ptx/address.cuh"

namespace cki::ptx {

// Copies `source_bytes` (0..Bytes) and fills the rest of the Bytes (4, 8 or 16) with zeros; both addresses are
// aligned to Bytes. With source_bytes 0 nothing is read, but `global` must still be a valid pointer. 16 bytes bypass
// L1 (.cg). Prefetch: L2 may fetch the whole aligned 128 or 256 bytes around them; 0 says nothing.
template <int Bytes, int Prefetch = 0>
__device__ __forceinline__ void cp_async(void* shared, const void* global, int source_bytes = Bytes) {
  static_assert(Bytes == 4 || Bytes == 8 || Bytes == 16, "cp.async copies 4, 8 or 16 bytes");
  static_assert(Prefetch == 0 || (Bytes == 16 && (Prefetch == 128 || Prefetch == 256)), "no such hint here");
  if constexpr (Prefetch == 256) {
    asm volatile("cp.async.cg.shared.global.L2::256B [%0], [%1], 16, %2;"
                 :
                 : "r"(shared_address(shared)), "l"(global), "r"(source_bytes)
                 : "memory");
  } else if constexpr (Prefetch == 128) {
    asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16, %2;"
                 :
                 : "r"(shared_address(shared)), "l"(global), "r"(source_bytes)
                 : "memory");
  } else if constexpr (Bytes == 16) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;"
                 :
                 : "r"(shared_address(shared)), "l"(global), "r"(source_bytes)
                 : "memory");
  } else {
    asm volatile("cp.async.ca.shared.global [%0], [%1], %2, %3;"
                 :
                 : "r"(shared_address(shared)), "l"(global), "n"(Bytes), "r"(source_bytes)
                 : "memory");
  }
}

// Closes the group of all copies that this thread has issued since its last commit (possibly none).
__device__ __forceinline__ void cp_async_commit_group() { asm volatile("cp.async.commit_group;" : : : "memory"); }

// Waits until at most the N most recent groups of this thread are incomplete.
template <int N>
__device__ __forceinline__ void cp_async_wait_group() {
  static_assert(N >= 0);
  asm volatile("cp.async.wait_group %0;" : : "n"(N) : "memory");
}

// Waits for all copies of this thread, committed or not.
__device__ __forceinline__ void cp_async_wait_all() { asm volatile("cp.async.wait_all;" : : : "memory"); }

// The barrier receives one arrival of this thread when all its earlier copies are complete; the arrival counts
// against the barrier's expected count as initialised.
__device__ __forceinline__ void cp_async_mbarrier_arrive_noinc(u64* barrier) {
  asm volatile("cp.async.mbarrier.arrive.noinc.shared.b64 [%0];" : : "r"(shared_address(barrier)) : "memory");
}

}  // namespace cki::ptx
