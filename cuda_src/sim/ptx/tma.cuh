// Simulated ptx/tma.cuh: runtime/tma.cpp. Cache policies have no effect.
#pragma once

#include "common/types.cuh"
#include "ptx/bulk.cuh"
#include "ptx/cache_policy.cuh"

extern "C" {
void cki_sim_tma_load(void* shared, const void* map, void* barrier, int rank, const int* coordinates,
                      unsigned cta_mask);
void cki_sim_tma_store(const void* map, const void* shared, int rank, const int* coordinates, int add);
void cki_sim_prefetch_tensormap(const void* map);
}

namespace cki::ptx {

__device__ __forceinline__ void prefetch_tensormap(const TensorMap* map) { cki_sim_prefetch_tensormap(map); }

// The simulated device has no L2; the map must be one.
__device__ __forceinline__ void tma_prefetch_2d(const TensorMap* map, int, int) { cki_sim_prefetch_tensormap(map); }

__device__ __forceinline__ void tma_load_1d(void* shared, const TensorMap* map, u64* barrier, int c0) {
  const int coordinates[] = {c0};
  cki_sim_tma_load(shared, map, barrier, 1, coordinates, 0);
}

__device__ __forceinline__ void tma_load_1d(void* shared, const TensorMap* map, u64* barrier, int c0, u64) {
  tma_load_1d(shared, map, barrier, c0);
}

__device__ __forceinline__ void tma_load_2d(void* shared, const TensorMap* map, u64* barrier, int c0, int c1) {
  const int coordinates[] = {c0, c1};
  cki_sim_tma_load(shared, map, barrier, 2, coordinates, 0);
}

__device__ __forceinline__ void tma_load_2d(void* shared, const TensorMap* map, u64* barrier, int c0, int c1, u64) {
  tma_load_2d(shared, map, barrier, c0, c1);
}

__device__ __forceinline__ void tma_load_multicast_2d(void* shared, const TensorMap* map, u64* barrier, int c0, int c1,
                                                      u16 cta_mask) {
  const int coordinates[] = {c0, c1};
  cki_sim_tma_load(shared, map, barrier, 2, coordinates, cta_mask);
}

__device__ __forceinline__ void tma_load_multicast_2d(void* shared, const TensorMap* map, u64* barrier, int c0, int c1,
                                                      u16 cta_mask, u64) {
  tma_load_multicast_2d(shared, map, barrier, c0, c1, cta_mask);
}

__device__ __forceinline__ void tma_load_3d(void* shared, const TensorMap* map, u64* barrier, int c0, int c1, int c2) {
  const int coordinates[] = {c0, c1, c2};
  cki_sim_tma_load(shared, map, barrier, 3, coordinates, 0);
}

__device__ __forceinline__ void tma_load_3d(void* shared, const TensorMap* map, u64* barrier, int c0, int c1, int c2,
                                            u64) {
  tma_load_3d(shared, map, barrier, c0, c1, c2);
}

__device__ __forceinline__ void tma_load_multicast_3d(void* shared, const TensorMap* map, u64* barrier, int c0, int c1,
                                                      int c2, u16 cta_mask) {
  const int coordinates[] = {c0, c1, c2};
  cki_sim_tma_load(shared, map, barrier, 3, coordinates, cta_mask);
}

__device__ __forceinline__ void tma_load_multicast_3d(void* shared, const TensorMap* map, u64* barrier, int c0, int c1,
                                                      int c2, u16 cta_mask, u64) {
  tma_load_multicast_3d(shared, map, barrier, c0, c1, c2, cta_mask);
}

__device__ __forceinline__ void tma_load_4d(void* shared, const TensorMap* map, u64* barrier, int c0, int c1, int c2,
                                            int c3) {
  const int coordinates[] = {c0, c1, c2, c3};
  cki_sim_tma_load(shared, map, barrier, 4, coordinates, 0);
}

__device__ __forceinline__ void tma_load_4d(void* shared, const TensorMap* map, u64* barrier, int c0, int c1, int c2,
                                            int c3, u64) {
  tma_load_4d(shared, map, barrier, c0, c1, c2, c3);
}

__device__ __forceinline__ void tma_load_multicast_4d(void* shared, const TensorMap* map, u64* barrier, int c0, int c1,
                                                      int c2, int c3, u16 cta_mask) {
  const int coordinates[] = {c0, c1, c2, c3};
  cki_sim_tma_load(shared, map, barrier, 4, coordinates, cta_mask);
}

__device__ __forceinline__ void tma_load_multicast_4d(void* shared, const TensorMap* map, u64* barrier, int c0, int c1,
                                                      int c2, int c3, u16 cta_mask, u64) {
  tma_load_multicast_4d(shared, map, barrier, c0, c1, c2, c3, cta_mask);
}

__device__ __forceinline__ void tma_load_5d(void* shared, const TensorMap* map, u64* barrier, int c0, int c1, int c2,
                                            int c3, int c4) {
  const int coordinates[] = {c0, c1, c2, c3, c4};
  cki_sim_tma_load(shared, map, barrier, 5, coordinates, 0);
}

__device__ __forceinline__ void tma_load_5d(void* shared, const TensorMap* map, u64* barrier, int c0, int c1, int c2,
                                            int c3, int c4, u64) {
  tma_load_5d(shared, map, barrier, c0, c1, c2, c3, c4);
}

__device__ __forceinline__ void tma_load_multicast_5d(void* shared, const TensorMap* map, u64* barrier, int c0, int c1,
                                                      int c2, int c3, int c4, u16 cta_mask) {
  const int coordinates[] = {c0, c1, c2, c3, c4};
  cki_sim_tma_load(shared, map, barrier, 5, coordinates, cta_mask);
}

__device__ __forceinline__ void tma_load_multicast_5d(void* shared, const TensorMap* map, u64* barrier, int c0, int c1,
                                                      int c2, int c3, int c4, u16 cta_mask, u64) {
  tma_load_multicast_5d(shared, map, barrier, c0, c1, c2, c3, c4, cta_mask);
}

__device__ __forceinline__ void tma_store_1d(const TensorMap* map, const void* shared, int c0) {
  const int coordinates[] = {c0};
  cki_sim_tma_store(map, shared, 1, coordinates, 0);
}

__device__ __forceinline__ void tma_reduce_add_1d(const TensorMap* map, const void* shared, int c0) {
  const int coordinates[] = {c0};
  cki_sim_tma_store(map, shared, 1, coordinates, 1);
}

__device__ __forceinline__ void tma_store_2d(const TensorMap* map, const void* shared, int c0, int c1) {
  const int coordinates[] = {c0, c1};
  cki_sim_tma_store(map, shared, 2, coordinates, 0);
}

__device__ __forceinline__ void tma_reduce_add_2d(const TensorMap* map, const void* shared, int c0, int c1) {
  const int coordinates[] = {c0, c1};
  cki_sim_tma_store(map, shared, 2, coordinates, 1);
}

__device__ __forceinline__ void tma_store_3d(const TensorMap* map, const void* shared, int c0, int c1, int c2) {
  const int coordinates[] = {c0, c1, c2};
  cki_sim_tma_store(map, shared, 3, coordinates, 0);
}

__device__ __forceinline__ void tma_reduce_add_3d(const TensorMap* map, const void* shared, int c0, int c1, int c2) {
  const int coordinates[] = {c0, c1, c2};
  cki_sim_tma_store(map, shared, 3, coordinates, 1);
}

__device__ __forceinline__ void tma_store_4d(const TensorMap* map, const void* shared, int c0, int c1, int c2, int c3) {
  const int coordinates[] = {c0, c1, c2, c3};
  cki_sim_tma_store(map, shared, 4, coordinates, 0);
}

__device__ __forceinline__ void tma_reduce_add_4d(const TensorMap* map, const void* shared, int c0, int c1, int c2,
                                                  int c3) {
  const int coordinates[] = {c0, c1, c2, c3};
  cki_sim_tma_store(map, shared, 4, coordinates, 1);
}

__device__ __forceinline__ void tma_store_5d(const TensorMap* map, const void* shared, int c0, int c1, int c2, int c3,
                                             int c4) {
  const int coordinates[] = {c0, c1, c2, c3, c4};
  cki_sim_tma_store(map, shared, 5, coordinates, 0);
}

__device__ __forceinline__ void tma_reduce_add_5d(const TensorMap* map, const void* shared, int c0, int c1, int c2,
                                                  int c3, int c4) {
  const int coordinates[] = {c0, c1, c2, c3, c4};
  cki_sim_tma_store(map, shared, 5, coordinates, 1);
}

}  // namespace cki::ptx
