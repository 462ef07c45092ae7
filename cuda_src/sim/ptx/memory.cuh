// Simulated ptx/memory.cuh: plain accesses, with the alignment that the hardware demands; flags and counters are
// atomics of the host. Each load of a flag lets the other threads run first, so that polling loops end.
#pragma once

#include <cstdint>

#include "common/types.cuh"
#include "runtime_api.h"

extern "C" [[noreturn]] void cki_sim_misaligned(const void* pointer, int bytes);

namespace cki::ptx {

namespace detail {

template <typename T>
__device__ __forceinline__ T load(const void* p) {
  if (reinterpret_cast<std::uintptr_t>(p) % sizeof(T) != 0) cki_sim_misaligned(p, sizeof(T));
  return *static_cast<const T*>(p);
}

template <typename T>
__device__ __forceinline__ void store(void* p, T v) {
  if (reinterpret_cast<std::uintptr_t>(p) % sizeof(T) != 0) cki_sim_misaligned(p, sizeof(T));
  *static_cast<T*>(p) = v;
}

}  // namespace detail

__device__ __forceinline__ uint4 load_global_nc_16(const void* p) { return detail::load<uint4>(p); }
__device__ __forceinline__ uint2 load_global_nc_8(const void* p) { return detail::load<uint2>(p); }
__device__ __forceinline__ u32 load_global_nc_4(const void* p) { return detail::load<u32>(p); }
__device__ __forceinline__ u16 load_global_nc_2(const void* p) { return detail::load<u16>(p); }

__device__ __forceinline__ uint4 load_global_nc_no_allocate_16(const void* p) { return detail::load<uint4>(p); }
__device__ __forceinline__ uint2 load_global_nc_no_allocate_8(const void* p) { return detail::load<uint2>(p); }
__device__ __forceinline__ u32 load_global_nc_no_allocate_4(const void* p) { return detail::load<u32>(p); }

__device__ __forceinline__ uint4 load_global_16(const void* p) { return detail::load<uint4>(p); }
__device__ __forceinline__ uint2 load_global_8(const void* p) { return detail::load<uint2>(p); }
__device__ __forceinline__ u32 load_global_4(const void* p) { return detail::load<u32>(p); }

__device__ __forceinline__ void store_global_16(void* p, uint4 v) { detail::store(p, v); }
__device__ __forceinline__ void store_global_8(void* p, uint2 v) { detail::store(p, v); }
__device__ __forceinline__ void store_global_4(void* p, u32 v) { detail::store(p, v); }
__device__ __forceinline__ void store_global_2(void* p, u16 v) { detail::store(p, v); }
__device__ __forceinline__ void store_global_streaming_16(void* p, uint4 v) { detail::store(p, v); }
__device__ __forceinline__ void store_global_no_allocate_16(void* p, uint4 v) { detail::store(p, v); }

__device__ __forceinline__ void prefetch_global_l2(const void*) {}

__device__ __forceinline__ u32 load_acquire_gpu(const u32* p) {
  cki_sim_yield_poll();
  return __atomic_load_n(p, __ATOMIC_ACQUIRE);
}

__device__ __forceinline__ u32 load_relaxed_gpu(const u32* p) {
  cki_sim_yield_poll();
  return __atomic_load_n(p, __ATOMIC_RELAXED);
}

__device__ __forceinline__ void store_release_gpu(u32* p, u32 v) {
  __atomic_store_n(p, v, __ATOMIC_RELEASE);
  ++*cki_sim_thread->progress;
}

__device__ __forceinline__ void store_relaxed_gpu(u32* p, u32 v) {
  __atomic_store_n(p, v, __ATOMIC_RELAXED);
  ++*cki_sim_thread->progress;
}

__device__ __forceinline__ void red_add_release_gpu(u32* p, u32 v) {
  __atomic_fetch_add(p, v, __ATOMIC_RELEASE);
  ++*cki_sim_thread->progress;
}

__device__ __forceinline__ void red_add_relaxed_gpu(u32* p, u32 v) {
  __atomic_fetch_add(p, v, __ATOMIC_RELAXED);
  ++*cki_sim_thread->progress;
}

__device__ __forceinline__ u32 atom_add_acq_rel_gpu(u32* p, u32 v) {
  const u32 old = __atomic_fetch_add(p, v, __ATOMIC_ACQ_REL);
  ++*cki_sim_thread->progress;
  return old;
}

}  // namespace cki::ptx
