// Simulated ptx/bulk.cuh: runtime/bulk.cpp.
#pragma once

#include "common/types.cuh"

extern "C" {
void cki_sim_bulk_load(void* shared, const void* global, unsigned bytes, void* barrier, unsigned cta_mask);
void cki_sim_bulk_store(void* global, const void* shared, unsigned bytes);
void cki_sim_bulk_reduce_add_f32(void* global, const void* shared, unsigned bytes);
void cki_sim_bulk_commit_group();
void cki_sim_bulk_wait_group(int newest_allowed);
void cki_sim_bulk_wait_group_read(int newest_allowed);
}

namespace cki::ptx {

__device__ __forceinline__ void bulk_load(void* shared, const void* global, u32 bytes, u64* barrier) {
  cki_sim_bulk_load(shared, global, bytes, barrier, 0);
}

__device__ __forceinline__ void bulk_load_multicast(void* shared, const void* global, u32 bytes, u64* barrier,
                                                    u16 cta_mask) {
  cki_sim_bulk_load(shared, global, bytes, barrier, cta_mask);
}

__device__ __forceinline__ void bulk_store(void* global, const void* shared, u32 bytes) {
  cki_sim_bulk_store(global, shared, bytes);
}

__device__ __forceinline__ void bulk_reduce_add_f32(void* global, const void* shared, u32 bytes) {
  cki_sim_bulk_reduce_add_f32(global, shared, bytes);
}

// Reads the two ends, so that a range outside its tensor is noticed.
__device__ __forceinline__ void bulk_prefetch_l2(const void* global, u32 bytes) {
  const volatile u8* first = static_cast<const u8*>(global);
  static_cast<void>(first[0]);
  static_cast<void>(first[bytes - 1]);
}

__device__ __forceinline__ void bulk_commit_group() { cki_sim_bulk_commit_group(); }

template <int N>
__device__ __forceinline__ void bulk_wait_group() {
  cki_sim_bulk_wait_group(N);
}

template <int N>
__device__ __forceinline__ void bulk_wait_group_read() {
  cki_sim_bulk_wait_group_read(N);
}

}  // namespace cki::ptx
