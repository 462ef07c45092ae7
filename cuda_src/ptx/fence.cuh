// Fences between the generic and the asynchronous proxy, and memory fences by scope (PTX fence).
//
// Plain loads, stores, ldmatrix, stmatrix and cp.async are generic; TMA and wgmma's reads of shared memory are
// asynchronous. Generic writes that the other proxy reads need: writes, fence_proxy_async_*() by each writing thread, a
// barrier, then the asynchronous operation.
#pragma once

#include "ptx/target.cuh"

namespace cki::ptx {

template <int Sm = kTargetSm>
__device__ __forceinline__ void fence_proxy_async_shared() {
  static_assert(Sm >= 90, "fence.proxy.async needs sm_90");
  asm volatile("fence.proxy.async.shared::cta;" : : : "memory");
}

template <int Sm = kTargetSm>
__device__ __forceinline__ void fence_proxy_async_global() {
  static_assert(Sm >= 90, "fence.proxy.async needs sm_90");
  asm volatile("fence.proxy.async.global;" : : : "memory");
}

// Both of the above, and shared memory of the other blocks of the cluster.
template <int Sm = kTargetSm>
__device__ __forceinline__ void fence_proxy_async() {
  static_assert(Sm >= 90, "fence.proxy.async needs sm_90");
  asm volatile("fence.proxy.async;" : : : "memory");
}

__device__ __forceinline__ void fence_acq_rel_gpu() { asm volatile("fence.acq_rel.gpu;" : : : "memory"); }

__device__ __forceinline__ void fence_acq_rel_system() { asm volatile("fence.acq_rel.sys;" : : : "memory"); }

template <int Sm = kTargetSm>
__device__ __forceinline__ void fence_acq_rel_cluster() {
  static_assert(Sm >= 90, "fences of cluster scope need sm_90");
  asm volatile("fence.acq_rel.cluster;" : : : "memory");
}

}  // namespace cki::ptx
