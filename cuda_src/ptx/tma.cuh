// Tiled copies through a tensor map (PTX cp.async.bulk.tensor, sm_90): TMA.
//
// The map (encoded on the host, passed as `const __grid_constant__ TensorMap`) holds base, extents, strides, box and
// swizzle. Coordinates count elements, c0 is the innermost dimension, and may be negative or beyond the extent: a
// load fills what lies outside with zeros, a store skips it. The whole box counts towards the barrier's bytes either
// way. The shared tile is 128-byte aligned (1024 where a 128-byte swizzle shall match common/swizzle.cuh). One thread
// issues a copy. Loads complete on an mbarrier; stores and reductions belong to bulk groups (ptx/bulk.cuh).
#pragma once

#include "common/types.cuh"
#include "ptx/address.cuh"
#include "ptx/bulk.cuh"
#include "ptx/cache_policy.cuh"
#include "ptx/target.cuh"

namespace cki::ptx {

// Fetches the descriptor into its cache ahead of the first copy.
template <int Sm = kTargetSm>
__device__ __forceinline__ void prefetch_tensormap(const TensorMap* map) {
  static_assert(Sm >= 90, "tensor maps need sm_90");
  asm volatile("prefetch.tensormap [%0];" : : "l"(map) : "memory");
}

// Asks for a box in L2: no read, nothing waits for it.
template <int Sm = kTargetSm>
__device__ __forceinline__ void tma_prefetch_2d(const TensorMap* map, int c0, int c1) {
  static_assert(Sm >= 90, "tensor copies need sm_90");
  asm volatile("cp.async.bulk.prefetch.tensor.2d.L2.global.tile [%0, {%1, %2}];"
               :
               : "l"(map), "r"(c0), "r"(c1)
               : "memory");
}

template <int Sm = kTargetSm>
__device__ __forceinline__ void tma_load_1d(void* shared, const TensorMap* map, u64* barrier, int c0) {
  static_assert(Sm >= 90, "tensor copies need sm_90");
  asm volatile("cp.async.bulk.tensor.1d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%3}], [%2];"
               :
               : "r"(shared_address(shared)), "l"(map), "r"(shared_address(barrier)), "r"(c0)
               : "memory");
}

template <int Sm = kTargetSm>
__device__ __forceinline__ void tma_load_1d(void* shared, const TensorMap* map, u64* barrier, int c0,
                                            u64 cache_policy) {
  static_assert(Sm >= 90, "tensor copies need sm_90");
  asm volatile(
      "cp.async.bulk.tensor.1d.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint "
      "[%0], [%1, {%3}], [%2], %4;"
      :
      : "r"(shared_address(shared)), "l"(map), "r"(shared_address(barrier)), "r"(c0), "l"(cache_policy)
      : "memory");
}

template <int Sm = kTargetSm>
__device__ __forceinline__ void tma_load_2d(void* shared, const TensorMap* map, u64* barrier, int c0, int c1) {
  static_assert(Sm >= 90, "tensor copies need sm_90");
  asm volatile("cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%3, %4}], [%2];"
               :
               : "r"(shared_address(shared)), "l"(map), "r"(shared_address(barrier)), "r"(c0), "r"(c1)
               : "memory");
}

template <int Sm = kTargetSm>
__device__ __forceinline__ void tma_load_2d(void* shared, const TensorMap* map, u64* barrier, int c0, int c1,
                                            u64 cache_policy) {
  static_assert(Sm >= 90, "tensor copies need sm_90");
  asm volatile(
      "cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint "
      "[%0], [%1, {%3, %4}], [%2], %5;"
      :
      : "r"(shared_address(shared)), "l"(map), "r"(shared_address(barrier)), "r"(c0), "r"(c1), "l"(cache_policy)
      : "memory");
}

// The tile arrives at the same offset in each block of `cta_mask` (bit = rank), and counts on each block's own barrier.
template <int Sm = kTargetSm>
__device__ __forceinline__ void tma_load_multicast_2d(void* shared, const TensorMap* map, u64* barrier, int c0, int c1,
                                                      u16 cta_mask) {
  static_assert(Sm >= 90, "tensor copies need sm_90");
  asm volatile(
      "cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes.multicast::cluster "
      "[%0], [%1, {%3, %4}], [%2], %5;"
      :
      : "r"(shared_address(shared)), "l"(map), "r"(shared_address(barrier)), "r"(c0), "r"(c1), "h"(cta_mask)
      : "memory");
}

template <int Sm = kTargetSm>
__device__ __forceinline__ void tma_load_multicast_2d(void* shared, const TensorMap* map, u64* barrier, int c0, int c1,
                                                      u16 cta_mask, u64 cache_policy) {
  static_assert(Sm >= 90, "tensor copies need sm_90");
  asm volatile(
      "cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes.multicast::cluster.L2::cache_hint "
      "[%0], [%1, {%3, %4}], [%2], %5, %6;"
      :
      : "r"(shared_address(shared)), "l"(map), "r"(shared_address(barrier)), "r"(c0), "r"(c1), "h"(cta_mask),
        "l"(cache_policy)
      : "memory");
}

template <int Sm = kTargetSm>
__device__ __forceinline__ void tma_load_3d(void* shared, const TensorMap* map, u64* barrier, int c0, int c1, int c2) {
  static_assert(Sm >= 90, "tensor copies need sm_90");
  asm volatile(
      "cp.async.bulk.tensor.3d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%3, %4, %5}], [%2];"
      :
      : "r"(shared_address(shared)), "l"(map), "r"(shared_address(barrier)), "r"(c0), "r"(c1), "r"(c2)
      : "memory");
}

template <int Sm = kTargetSm>
__device__ __forceinline__ void tma_load_3d(void* shared, const TensorMap* map, u64* barrier, int c0, int c1, int c2,
                                            u64 cache_policy) {
  static_assert(Sm >= 90, "tensor copies need sm_90");
  asm volatile(
      "cp.async.bulk.tensor.3d.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint "
      "[%0], [%1, {%3, %4, %5}], [%2], %6;"
      :
      : "r"(shared_address(shared)), "l"(map), "r"(shared_address(barrier)), "r"(c0), "r"(c1), "r"(c2),
        "l"(cache_policy)
      : "memory");
}

template <int Sm = kTargetSm>
__device__ __forceinline__ void tma_load_multicast_3d(void* shared, const TensorMap* map, u64* barrier, int c0, int c1,
                                                      int c2, u16 cta_mask) {
  static_assert(Sm >= 90, "tensor copies need sm_90");
  asm volatile(
      "cp.async.bulk.tensor.3d.shared::cluster.global.mbarrier::complete_tx::bytes.multicast::cluster "
      "[%0], [%1, {%3, %4, %5}], [%2], %6;"
      :
      : "r"(shared_address(shared)), "l"(map), "r"(shared_address(barrier)), "r"(c0), "r"(c1), "r"(c2), "h"(cta_mask)
      : "memory");
}

template <int Sm = kTargetSm>
__device__ __forceinline__ void tma_load_multicast_3d(void* shared, const TensorMap* map, u64* barrier, int c0, int c1,
                                                      int c2, u16 cta_mask, u64 cache_policy) {
  static_assert(Sm >= 90, "tensor copies need sm_90");
  asm volatile(
      "cp.async.bulk.tensor.3d.shared::cluster.global.mbarrier::complete_tx::bytes.multicast::cluster.L2::cache_hint "
      "[%0], [%1, {%3, %4, %5}], [%2], %6, %7;"
      :
      : "r"(shared_address(shared)), "l"(map), "r"(shared_address(barrier)), "r"(c0), "r"(c1), "r"(c2), "h"(cta_mask),
        "l"(cache_policy)
      : "memory");
}

template <int Sm = kTargetSm>
__device__ __forceinline__ void tma_load_4d(void* shared, const TensorMap* map, u64* barrier, int c0, int c1, int c2,
                                            int c3) {
  static_assert(Sm >= 90, "tensor copies need sm_90");
  asm volatile(
      "cp.async.bulk.tensor.4d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%3, %4, %5, %6}], [%2];"
      :
      : "r"(shared_address(shared)), "l"(map), "r"(shared_address(barrier)), "r"(c0), "r"(c1), "r"(c2), "r"(c3)
      : "memory");
}

template <int Sm = kTargetSm>
__device__ __forceinline__ void tma_load_4d(void* shared, const TensorMap* map, u64* barrier, int c0, int c1, int c2,
                                            int c3, u64 cache_policy) {
  static_assert(Sm >= 90, "tensor copies need sm_90");
  asm volatile(
      "cp.async.bulk.tensor.4d.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint "
      "[%0], [%1, {%3, %4, %5, %6}], [%2], %7;"
      :
      : "r"(shared_address(shared)), "l"(map), "r"(shared_address(barrier)), "r"(c0), "r"(c1), "r"(c2), "r"(c3),
        "l"(cache_policy)
      : "memory");
}

template <int Sm = kTargetSm>
__device__ __forceinline__ void tma_load_multicast_4d(void* shared, const TensorMap* map, u64* barrier, int c0, int c1,
                                                      int c2, int c3, u16 cta_mask) {
  static_assert(Sm >= 90, "tensor copies need sm_90");
  asm volatile(
      "cp.async.bulk.tensor.4d.shared::cluster.global.mbarrier::complete_tx::bytes.multicast::cluster "
      "[%0], [%1, {%3, %4, %5, %6}], [%2], %7;"
      :
      : "r"(shared_address(shared)), "l"(map), "r"(shared_address(barrier)), "r"(c0), "r"(c1), "r"(c2), "r"(c3),
        "h"(cta_mask)
      : "memory");
}

template <int Sm = kTargetSm>
__device__ __forceinline__ void tma_load_multicast_4d(void* shared, const TensorMap* map, u64* barrier, int c0, int c1,
                                                      int c2, int c3, u16 cta_mask, u64 cache_policy) {
  static_assert(Sm >= 90, "tensor copies need sm_90");
  asm volatile(
      "cp.async.bulk.tensor.4d.shared::cluster.global.mbarrier::complete_tx::bytes.multicast::cluster.L2::cache_hint "
      "[%0], [%1, {%3, %4, %5, %6}], [%2], %7, %8;"
      :
      : "r"(shared_address(shared)), "l"(map), "r"(shared_address(barrier)), "r"(c0), "r"(c1), "r"(c2), "r"(c3),
        "h"(cta_mask), "l"(cache_policy)
      : "memory");
}

template <int Sm = kTargetSm>
__device__ __forceinline__ void tma_load_5d(void* shared, const TensorMap* map, u64* barrier, int c0, int c1, int c2,
                                            int c3, int c4) {
  static_assert(Sm >= 90, "tensor copies need sm_90");
  asm volatile(
      "cp.async.bulk.tensor.5d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%3, %4, %5, %6, %7}], "
      "[%2];"
      :
      : "r"(shared_address(shared)), "l"(map), "r"(shared_address(barrier)), "r"(c0), "r"(c1), "r"(c2), "r"(c3), "r"(c4)
      : "memory");
}

template <int Sm = kTargetSm>
__device__ __forceinline__ void tma_load_5d(void* shared, const TensorMap* map, u64* barrier, int c0, int c1, int c2,
                                            int c3, int c4, u64 cache_policy) {
  static_assert(Sm >= 90, "tensor copies need sm_90");
  asm volatile(
      "cp.async.bulk.tensor.5d.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint "
      "[%0], [%1, {%3, %4, %5, %6, %7}], [%2], %8;"
      :
      : "r"(shared_address(shared)), "l"(map), "r"(shared_address(barrier)), "r"(c0), "r"(c1), "r"(c2), "r"(c3),
        "r"(c4), "l"(cache_policy)
      : "memory");
}

template <int Sm = kTargetSm>
__device__ __forceinline__ void tma_load_multicast_5d(void* shared, const TensorMap* map, u64* barrier, int c0, int c1,
                                                      int c2, int c3, int c4, u16 cta_mask) {
  static_assert(Sm >= 90, "tensor copies need sm_90");
  asm volatile(
      "cp.async.bulk.tensor.5d.shared::cluster.global.mbarrier::complete_tx::bytes.multicast::cluster "
      "[%0], [%1, {%3, %4, %5, %6, %7}], [%2], %8;"
      :
      : "r"(shared_address(shared)), "l"(map), "r"(shared_address(barrier)), "r"(c0), "r"(c1), "r"(c2), "r"(c3),
        "r"(c4), "h"(cta_mask)
      : "memory");
}

template <int Sm = kTargetSm>
__device__ __forceinline__ void tma_load_multicast_5d(void* shared, const TensorMap* map, u64* barrier, int c0, int c1,
                                                      int c2, int c3, int c4, u16 cta_mask, u64 cache_policy) {
  static_assert(Sm >= 90, "tensor copies need sm_90");
  asm volatile(
      "cp.async.bulk.tensor.5d.shared::cluster.global.mbarrier::complete_tx::bytes.multicast::cluster.L2::cache_hint "
      "[%0], [%1, {%3, %4, %5, %6, %7}], [%2], %8, %9;"
      :
      : "r"(shared_address(shared)), "l"(map), "r"(shared_address(barrier)), "r"(c0), "r"(c1), "r"(c2), "r"(c3),
        "r"(c4), "h"(cta_mask), "l"(cache_policy)
      : "memory");
}

template <int Sm = kTargetSm>
__device__ __forceinline__ void tma_store_1d(const TensorMap* map, const void* shared, int c0) {
  static_assert(Sm >= 90, "tensor copies need sm_90");
  asm volatile("cp.async.bulk.tensor.1d.global.shared::cta.bulk_group [%0, {%2}], [%1];"
               :
               : "l"(map), "r"(shared_address(shared)), "r"(c0)
               : "memory");
}

// Adds the tile to global memory, elementwise in the map's data type, in no stated order between copies.
template <int Sm = kTargetSm>
__device__ __forceinline__ void tma_reduce_add_1d(const TensorMap* map, const void* shared, int c0) {
  static_assert(Sm >= 90, "tensor copies need sm_90");
  asm volatile("cp.reduce.async.bulk.tensor.1d.global.shared::cta.add.bulk_group [%0, {%2}], [%1];"
               :
               : "l"(map), "r"(shared_address(shared)), "r"(c0)
               : "memory");
}

template <int Sm = kTargetSm>
__device__ __forceinline__ void tma_store_2d(const TensorMap* map, const void* shared, int c0, int c1) {
  static_assert(Sm >= 90, "tensor copies need sm_90");
  asm volatile("cp.async.bulk.tensor.2d.global.shared::cta.bulk_group [%0, {%2, %3}], [%1];"
               :
               : "l"(map), "r"(shared_address(shared)), "r"(c0), "r"(c1)
               : "memory");
}

template <int Sm = kTargetSm>
__device__ __forceinline__ void tma_reduce_add_2d(const TensorMap* map, const void* shared, int c0, int c1) {
  static_assert(Sm >= 90, "tensor copies need sm_90");
  asm volatile("cp.reduce.async.bulk.tensor.2d.global.shared::cta.add.bulk_group [%0, {%2, %3}], [%1];"
               :
               : "l"(map), "r"(shared_address(shared)), "r"(c0), "r"(c1)
               : "memory");
}

template <int Sm = kTargetSm>
__device__ __forceinline__ void tma_store_3d(const TensorMap* map, const void* shared, int c0, int c1, int c2) {
  static_assert(Sm >= 90, "tensor copies need sm_90");
  asm volatile("cp.async.bulk.tensor.3d.global.shared::cta.bulk_group [%0, {%2, %3, %4}], [%1];"
               :
               : "l"(map), "r"(shared_address(shared)), "r"(c0), "r"(c1), "r"(c2)
               : "memory");
}

template <int Sm = kTargetSm>
__device__ __forceinline__ void tma_reduce_add_3d(const TensorMap* map, const void* shared, int c0, int c1, int c2) {
  static_assert(Sm >= 90, "tensor copies need sm_90");
  asm volatile("cp.reduce.async.bulk.tensor.3d.global.shared::cta.add.bulk_group [%0, {%2, %3, %4}], [%1];"
               :
               : "l"(map), "r"(shared_address(shared)), "r"(c0), "r"(c1), "r"(c2)
               : "memory");
}

template <int Sm = kTargetSm>
__device__ __forceinline__ void tma_store_4d(const TensorMap* map, const void* shared, int c0, int c1, int c2, int c3) {
  static_assert(Sm >= 90, "tensor copies need sm_90");
  asm volatile("cp.async.bulk.tensor.4d.global.shared::cta.bulk_group [%0, {%2, %3, %4, %5}], [%1];"
               :
               : "l"(map), "r"(shared_address(shared)), "r"(c0), "r"(c1), "r"(c2), "r"(c3)
               : "memory");
}

template <int Sm = kTargetSm>
__device__ __forceinline__ void tma_reduce_add_4d(const TensorMap* map, const void* shared, int c0, int c1, int c2,
                                                  int c3) {
  static_assert(Sm >= 90, "tensor copies need sm_90");
  asm volatile("cp.reduce.async.bulk.tensor.4d.global.shared::cta.add.bulk_group [%0, {%2, %3, %4, %5}], [%1];"
               :
               : "l"(map), "r"(shared_address(shared)), "r"(c0), "r"(c1), "r"(c2), "r"(c3)
               : "memory");
}

template <int Sm = kTargetSm>
__device__ __forceinline__ void tma_store_5d(const TensorMap* map, const void* shared, int c0, int c1, int c2, int c3,
                                             int c4) {
  static_assert(Sm >= 90, "tensor copies need sm_90");
  asm volatile("cp.async.bulk.tensor.5d.global.shared::cta.bulk_group [%0, {%2, %3, %4, %5, %6}], [%1];"
               :
               : "l"(map), "r"(shared_address(shared)), "r"(c0), "r"(c1), "r"(c2), "r"(c3), "r"(c4)
               : "memory");
}

template <int Sm = kTargetSm>
__device__ __forceinline__ void tma_reduce_add_5d(const TensorMap* map, const void* shared, int c0, int c1, int c2,
                                                  int c3, int c4) {
  static_assert(Sm >= 90, "tensor copies need sm_90");
  asm volatile("cp.reduce.async.bulk.tensor.5d.global.shared::cta.add.bulk_group [%0, {%2, %3, %4, %5, %6}], [%1];"
               :
               : "l"(map), "r"(shared_address(shared)), "r"(c0), "r"(c1), "r"(c2), "r"(c3), "r"(c4)
               : "memory");
}

}  // namespace cki::ptx
