// Warp-wide stores of 8x8 matrices of 16-bit elements from mma fragments to shared memory (PTX stmatrix, sm_90).
//
// The mirror of ldmatrix: lane l passes the address of row l%8 of matrix l/8 and holds in r[i] the elements (row l/4,
// columns 2*(l%4) and +1) of matrix i; with _trans the elements (rows 2*(l%4) and +1, column l/4).
#pragma once

#include "common/types.cuh"
#include "ptx/address.cuh"
#include "ptx/target.cuh"

namespace cki::ptx {

template <int Sm = kTargetSm>
__device__ __forceinline__ void stmatrix_x1(void* row_pointer, const u32 (&r)[1]) {
  static_assert(Sm >= 90, "stmatrix needs sm_90");
  asm volatile("stmatrix.sync.aligned.m8n8.x1.shared.b16 [%0], {%1};"
               :
               : "r"(shared_address(row_pointer)), "r"(r[0])
               : "memory");
}

template <int Sm = kTargetSm>
__device__ __forceinline__ void stmatrix_x2(void* row_pointer, const u32 (&r)[2]) {
  static_assert(Sm >= 90, "stmatrix needs sm_90");
  asm volatile("stmatrix.sync.aligned.m8n8.x2.shared.b16 [%0], {%1, %2};"
               :
               : "r"(shared_address(row_pointer)), "r"(r[0]), "r"(r[1])
               : "memory");
}

template <int Sm = kTargetSm>
__device__ __forceinline__ void stmatrix_x4(void* row_pointer, const u32 (&r)[4]) {
  static_assert(Sm >= 90, "stmatrix needs sm_90");
  asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};"
               :
               : "r"(shared_address(row_pointer)), "r"(r[0]), "r"(r[1]), "r"(r[2]), "r"(r[3])
               : "memory");
}

template <int Sm = kTargetSm>
__device__ __forceinline__ void stmatrix_x1_trans(void* row_pointer, const u32 (&r)[1]) {
  static_assert(Sm >= 90, "stmatrix needs sm_90");
  asm volatile("stmatrix.sync.aligned.m8n8.x1.trans.shared.b16 [%0], {%1};"
               :
               : "r"(shared_address(row_pointer)), "r"(r[0])
               : "memory");
}

template <int Sm = kTargetSm>
__device__ __forceinline__ void stmatrix_x2_trans(void* row_pointer, const u32 (&r)[2]) {
  static_assert(Sm >= 90, "stmatrix needs sm_90");
  asm volatile("stmatrix.sync.aligned.m8n8.x2.trans.shared.b16 [%0], {%1, %2};"
               :
               : "r"(shared_address(row_pointer)), "r"(r[0]), "r"(r[1])
               : "memory");
}

template <int Sm = kTargetSm>
__device__ __forceinline__ void stmatrix_x4_trans(void* row_pointer, const u32 (&r)[4]) {
  static_assert(Sm >= 90, "stmatrix needs sm_90");
  asm volatile("stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [%0], {%1, %2, %3, %4};"
               :
               : "r"(shared_address(row_pointer)), "r"(r[0]), "r"(r[1]), "r"(r[2]), "r"(r[3])
               : "memory");
}

}  // namespace cki::ptx
