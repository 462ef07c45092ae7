// Thread block clusters and distributed shared memory (PTX, sm_90).
//
// A block's shared memory stays valid for its peers only while the block runs: the last access to a peer is followed
// by a cluster barrier in both blocks.
#pragma once

#include "common/types.cuh"
#include "ptx/address.cuh"
#include "ptx/target.cuh"

namespace cki::ptx {

// Rank of this block in its cluster, x fastest.
template <int Sm = kTargetSm>
__device__ __forceinline__ u32 cluster_cta_rank() {
  static_assert(Sm >= 90, "clusters need sm_90");
  u32 rank;
  asm volatile("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
  return rank;
}

// Number of blocks in this cluster: 1 in a launch without clusters.
template <int Sm = kTargetSm>
__device__ __forceinline__ u32 cluster_cta_count() {
  static_assert(Sm >= 90, "clusters need sm_90");
  u32 count;
  asm volatile("mov.u32 %0, %%cluster_nctarank;" : "=r"(count));
  return count;
}

// Arrival of this thread at the cluster's barrier, releasing its earlier accesses. All threads of all blocks arrive.
template <int Sm = kTargetSm>
__device__ __forceinline__ void cluster_arrive() {
  static_assert(Sm >= 90, "clusters need sm_90");
  asm volatile("barrier.cluster.arrive.release.aligned;" : : : "memory");
}

// Arrival that orders no memory: for "I am alive" and "I am done reading what a fence already covers".
template <int Sm = kTargetSm>
__device__ __forceinline__ void cluster_arrive_relaxed() {
  static_assert(Sm >= 90, "clusters need sm_90");
  asm volatile("barrier.cluster.arrive.relaxed.aligned;" : : : "memory");
}

// Waits for the arrivals of all threads of the cluster, acquiring what they released.
template <int Sm = kTargetSm>
__device__ __forceinline__ void cluster_wait() {
  static_assert(Sm >= 90, "clusters need sm_90");
  asm volatile("barrier.cluster.wait.acquire.aligned;" : : : "memory");
}

template <int Sm = kTargetSm>
__device__ __forceinline__ void cluster_sync() {
  cluster_arrive<Sm>();
  cluster_wait<Sm>();
}

// Address, in the cluster's shared window, of what lies in block `cta_rank` where `local` lies in this block.
template <int Sm = kTargetSm>
__device__ __forceinline__ u32 map_shared_rank(const void* local, u32 cta_rank) {
  static_assert(Sm >= 90, "clusters need sm_90");
  u32 address;
  asm volatile("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(address) : "r"(shared_address(local)), "r"(cta_rank));
  return address;
}

template <int Sm = kTargetSm>
__device__ __forceinline__ u32 load_shared_cluster_u32(u32 address) {
  static_assert(Sm >= 90, "clusters need sm_90");
  u32 value;
  asm volatile("ld.shared::cluster.u32 %0, [%1];" : "=r"(value) : "r"(address) : "memory");
  return value;
}

template <int Sm = kTargetSm>
__device__ __forceinline__ float load_shared_cluster_f32(u32 address) {
  static_assert(Sm >= 90, "clusters need sm_90");
  float value;
  asm volatile("ld.shared::cluster.f32 %0, [%1];" : "=f"(value) : "r"(address) : "memory");
  return value;
}

template <int Sm = kTargetSm>
__device__ __forceinline__ float4 load_shared_cluster_f32x4(u32 address) {
  static_assert(Sm >= 90, "clusters need sm_90");
  float4 v;
  asm volatile("ld.shared::cluster.v4.f32 {%0, %1, %2, %3}, [%4];"
               : "=f"(v.x), "=f"(v.y), "=f"(v.z), "=f"(v.w)
               : "r"(address)
               : "memory");
  return v;
}

template <int Sm = kTargetSm>
__device__ __forceinline__ void store_shared_cluster_u32(u32 address, u32 value) {
  static_assert(Sm >= 90, "clusters need sm_90");
  asm volatile("st.shared::cluster.u32 [%0], %1;" : : "r"(address), "r"(value) : "memory");
}

template <int Sm = kTargetSm>
__device__ __forceinline__ void store_shared_cluster_f32(u32 address, float value) {
  static_assert(Sm >= 90, "clusters need sm_90");
  asm volatile("st.shared::cluster.f32 [%0], %1;" : : "r"(address), "f"(value) : "memory");
}

template <int Sm = kTargetSm>
__device__ __forceinline__ void store_shared_cluster_f32x4(u32 address, float4 v) {
  static_assert(Sm >= 90, "clusters need sm_90");
  asm volatile("st.shared::cluster.v4.f32 [%0], {%1, %2, %3, %4};"
               :
               : "r"(address), "f"(v.x), "f"(v.y), "f"(v.z), "f"(v.w)
               : "memory");
}

// A store that completes, with its 16 bytes, on an mbarrier of the same block: who waits for the bytes sees them. Nothing
// else is ordered, and so nothing is waited for, where a cluster barrier's release waits for all of a thread's accesses.
template <int Sm = kTargetSm>
__device__ __forceinline__ void store_async_cluster_f32x4(u32 address, float4 v, u32 barrier) {
  static_assert(Sm >= 90, "st.async needs sm_90");
  asm volatile("st.async.shared::cluster.mbarrier::complete_tx::bytes.v4.f32 [%0], {%1, %2, %3, %4}, [%5];"
               :
               : "r"(address), "f"(v.x), "f"(v.y), "f"(v.z), "f"(v.w), "r"(barrier)
               : "memory");
}

}  // namespace cki::ptx
