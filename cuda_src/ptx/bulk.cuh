// Bulk asynchronous copies of contiguous bytes between global and shared memory (PTX cp.async.bulk, sm_90).
//
// Addresses are 16-byte aligned and sizes multiples of 16. Loads complete on an mbarrier, which has been told the
// number of bytes (mbarrier_arrive_expect_tx). Stores are counted in bulk groups of the issuing thread. One thread
// issues a copy.
#pragma once

#include "common/types.cuh"
#include "ptx/address.cuh"
#include "ptx/target.cuh"

namespace cki::ptx {

template <int Sm = kTargetSm>
__device__ __forceinline__ void bulk_load(void* shared, const void* global, u32 bytes, u64* barrier) {
  static_assert(Sm >= 90, "cp.async.bulk needs sm_90");
  asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];"
               :
               : "r"(shared_address(shared)), "l"(global), "r"(bytes), "r"(shared_address(barrier))
               : "memory");
}

// The bytes arrive at the same offset in each block of `cta_mask` (bit = rank), and count on the barrier at the same
// offset.
template <int Sm = kTargetSm>
__device__ __forceinline__ void bulk_load_multicast(void* shared, const void* global, u32 bytes, u64* barrier,
                                                    u16 cta_mask) {
  static_assert(Sm >= 90, "cp.async.bulk needs sm_90");
  asm volatile(
      "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.multicast::cluster [%0], [%1], %2, [%3], %4;"
      :
      : "r"(shared_address(shared)), "l"(global), "r"(bytes), "r"(shared_address(barrier)), "h"(cta_mask)
      : "memory");
}

template <int Sm = kTargetSm>
__device__ __forceinline__ void bulk_store(void* global, const void* shared, u32 bytes) {
  static_assert(Sm >= 90, "cp.async.bulk needs sm_90");
  asm volatile("cp.async.bulk.global.shared::cta.bulk_group [%0], [%1], %2;"
               :
               : "l"(global), "r"(shared_address(shared)), "r"(bytes)
               : "memory");
}

// Adds fp32 elements to global memory, in no stated order between copies.
template <int Sm = kTargetSm>
__device__ __forceinline__ void bulk_reduce_add_f32(void* global, const void* shared, u32 bytes) {
  static_assert(Sm >= 90, "cp.reduce.async.bulk needs sm_90");
  asm volatile("cp.reduce.async.bulk.global.shared::cta.bulk_group.add.f32 [%0], [%1], %2;"
               :
               : "l"(global), "r"(shared_address(shared)), "r"(bytes)
               : "memory");
}

// Brings the bytes towards L2. A hint: nothing waits for it, and it completes on nothing.
template <int Sm = kTargetSm>
__device__ __forceinline__ void bulk_prefetch_l2(const void* global, u32 bytes) {
  static_assert(Sm >= 90, "cp.async.bulk needs sm_90");
  asm volatile("cp.async.bulk.prefetch.L2.global [%0], %1;" : : "l"(global), "r"(bytes) : "memory");
}

// Closes the group of the bulk stores that this thread has issued since its last commit.
template <int Sm = kTargetSm>
__device__ __forceinline__ void bulk_commit_group() {
  static_assert(Sm >= 90, "bulk groups need sm_90");
  asm volatile("cp.async.bulk.commit_group;" : : : "memory");
}

// Waits until at most the N most recent bulk groups of this thread are incomplete: their writes are then visible to it.
template <int N, int Sm = kTargetSm>
__device__ __forceinline__ void bulk_wait_group() {
  static_assert(Sm >= 90, "bulk groups need sm_90");
  asm volatile("cp.async.bulk.wait_group %0;" : : "n"(N) : "memory");
}

// Waits only until the groups have read their sources: the shared memory may then be written again.
template <int N, int Sm = kTargetSm>
__device__ __forceinline__ void bulk_wait_group_read() {
  static_assert(Sm >= 90, "bulk groups need sm_90");
  asm volatile("cp.async.bulk.wait_group.read %0;" : : "n"(N) : "memory");
}

}  // namespace cki::ptx
