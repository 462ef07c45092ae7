// Barriers in shared memory with phases and transaction counts (PTX mbarrier, 8 bytes, 8-byte aligned).
//
// A phase completes when as many arrivals as initialised have come and the count of outstanding bytes (tx) is zero;
// the next phase then starts with the full count. A waiter names the parity of the phase that it waits for: 0 for the
// first. Waiting for parity 1 on a fresh barrier returns at once, which is how a producer finds its ring of stages
// empty. init, arrive and waits need sm_80, transaction counts and clusters sm_90.
#pragma once

#include "common/types.cuh"
#include "ptx/address.cuh"
#include "ptx/target.cuh"

namespace cki::ptx {

// One thread initialises; fence_mbarrier_init() (for TMA and clusters) and a barrier publish it to the others.
__device__ __forceinline__ void mbarrier_init(u64* barrier, u32 count) {
  asm volatile("mbarrier.init.shared.b64 [%0], %1;" : : "r"(shared_address(barrier)), "r"(count) : "memory");
}

// Ends the barrier's life: needed before its memory is used for anything else.
__device__ __forceinline__ void mbarrier_invalidate(u64* barrier) {
  asm volatile("mbarrier.inval.shared.b64 [%0];" : : "r"(shared_address(barrier)) : "memory");
}

// Makes initialised barriers visible to the asynchronous proxy and to the cluster.
template <int Sm = kTargetSm>
__device__ __forceinline__ void fence_mbarrier_init() {
  static_assert(Sm >= 90, "fence.mbarrier_init needs sm_90");
  asm volatile("fence.mbarrier_init.release.cluster;" : : : "memory");
}

// One arrival, with release semantics for this thread's earlier accesses.
__device__ __forceinline__ void mbarrier_arrive(u64* barrier) {
  asm volatile(
      "{\n"
      "  .reg .b64 state;\n"
      "  mbarrier.arrive.shared.b64 state, [%0];\n"
      "}"
      :
      : "r"(shared_address(barrier))
      : "memory");
}

// Raises the outstanding bytes of the current phase, then arrives once.
template <int Sm = kTargetSm>
__device__ __forceinline__ void mbarrier_arrive_expect_tx(u64* barrier, u32 bytes) {
  static_assert(Sm >= 90, "mbarrier transaction counts need sm_90");
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;"
               :
               : "r"(shared_address(barrier)), "r"(bytes)
               : "memory");
}

// Raises the outstanding bytes of the current phase without arriving.
template <int Sm = kTargetSm>
__device__ __forceinline__ void mbarrier_expect_tx(u64* barrier, u32 bytes) {
  static_assert(Sm >= 90, "mbarrier transaction counts need sm_90");
  asm volatile("mbarrier.expect_tx.relaxed.cta.shared::cta.b64 [%0], %1;"
               :
               : "r"(shared_address(barrier)), "r"(bytes)
               : "memory");
}

// One arrival at the barrier at the same offset in block `cta_rank` of the cluster (possibly the own block).
template <int Sm = kTargetSm>
__device__ __forceinline__ void mbarrier_arrive_cluster(u64* local, u32 cta_rank) {
  static_assert(Sm >= 90, "clusters need sm_90");
  asm volatile(
      "{\n"
      "  .reg .b32 remote;\n"
      "  mapa.shared::cluster.u32 remote, %0, %1;\n"
      "  mbarrier.arrive.release.cluster.shared::cluster.b64 _, [remote];\n"
      "}"
      :
      : "r"(shared_address(local)), "r"(cta_rank)
      : "memory");
}

// The same, ordering this thread's memory accesses within its block only. mbarrier_arrive_cluster orders them for the
// cluster, by a fence that waits for all of them: half a microsecond and more. Enough for a stage that wgmma has read.
template <int Sm = kTargetSm>
__device__ __forceinline__ void mbarrier_arrive_cluster_unordered(u64* local, u32 cta_rank) {
  static_assert(Sm >= 90, "clusters need sm_90");
  asm volatile(
      "{\n"
      "  .reg .b32 remote;\n"
      "  mapa.shared::cluster.u32 remote, %0, %1;\n"
      "  mbarrier.arrive.shared::cluster.b64 _, [remote];\n"
      "}"
      :
      : "r"(shared_address(local)), "r"(cta_rank)
      : "memory");
}

// True once the phase of the given parity is complete, with acquire semantics. May suspend the thread for a
// system-dependent time before it answers false.
template <int Sm = kTargetSm>
__device__ __forceinline__ bool mbarrier_try_wait_parity(u64* barrier, u32 parity) {
  static_assert(Sm >= 90, "mbarrier.try_wait needs sm_90; sm_80 has mbarrier_test_wait_parity");
  u32 complete;
  asm volatile(
      "{\n"
      "  .reg .pred p;\n"
      "  mbarrier.try_wait.parity.shared::cta.b64 p, [%1], %2;\n"
      "  selp.u32 %0, 1, 0, p;\n"
      "}"
      : "=r"(complete)
      : "r"(shared_address(barrier)), "r"(parity)
      : "memory");
  return complete != 0;
}

// The same without suspending.
__device__ __forceinline__ bool mbarrier_test_wait_parity(u64* barrier, u32 parity) {
  u32 complete;
  asm volatile(
      "{\n"
      "  .reg .pred p;\n"
      "  mbarrier.test_wait.parity.shared.b64 p, [%1], %2;\n"
      "  selp.u32 %0, 1, 0, p;\n"
      "}"
      : "=r"(complete)
      : "r"(shared_address(barrier)), "r"(parity)
      : "memory");
  return complete != 0;
}

// As mbarrier_try_wait_parity, with acquire semantics towards the whole cluster: for barriers on which other blocks
// arrive.
template <int Sm = kTargetSm>
__device__ __forceinline__ bool mbarrier_try_wait_parity_cluster(u64* barrier, u32 parity) {
  static_assert(Sm >= 90, "clusters need sm_90");
  u32 complete;
  asm volatile(
      "{\n"
      "  .reg .pred p;\n"
      "  mbarrier.try_wait.parity.acquire.cluster.shared::cta.b64 p, [%1], %2;\n"
      "  selp.u32 %0, 1, 0, p;\n"
      "}"
      : "=r"(complete)
      : "r"(shared_address(barrier)), "r"(parity)
      : "memory");
  return complete != 0;
}

// Blocks until the phase of the given parity is complete.
__device__ __forceinline__ void mbarrier_wait_parity(u64* barrier, u32 parity) {
  if constexpr (kTargetSm >= 90) {
    while (!mbarrier_try_wait_parity<kTargetSm >= 90 ? kTargetSm : 90>(barrier, parity)) {
    }
  } else {
    while (!mbarrier_test_wait_parity(barrier, parity)) {
    }
  }
}

}  // namespace cki::ptx
