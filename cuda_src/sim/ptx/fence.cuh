// Simulated ptx/fence.cuh. Memory is sequentially consistent here; what the fences order is for the race detector.
#pragma once

#include "runtime_api.h"

extern "C" void cki_sim_fence_proxy_async();

namespace cki::ptx {

__device__ __forceinline__ void fence_proxy_async_shared() { cki_sim_fence_proxy_async(); }
__device__ __forceinline__ void fence_proxy_async_global() {}
__device__ __forceinline__ void fence_proxy_async() { cki_sim_fence_proxy_async(); }
__device__ __forceinline__ void fence_acq_rel_gpu() { __atomic_thread_fence(__ATOMIC_ACQ_REL); }
__device__ __forceinline__ void fence_acq_rel_system() { __atomic_thread_fence(__ATOMIC_ACQ_REL); }
__device__ __forceinline__ void fence_acq_rel_cluster() { __atomic_thread_fence(__ATOMIC_ACQ_REL); }

}  // namespace cki::ptx
