// Warp-wide loads of 8x8 matrices of 16-bit elements from shared memory into mma fragments (PTX ldmatrix, sm_75).
//
// Lane l of a warp passes the address of row l%8 of matrix l/8 (16 bytes, 16-byte aligned); x1 reads the addresses of
// lanes 0-7, x2 of lanes 0-15, x4 of all. Lane l receives of matrix i, in r[i], the elements (row l/4, columns
// 2*(l%4) and +1), lower half first; with _trans the elements (rows 2*(l%4) and +1, column l/4).
#pragma once

#include "common/types.cuh"
#include "ptx/address.cuh"

namespace cki::ptx {

__device__ __forceinline__ void ldmatrix_x1(u32 (&r)[1], const void* row_pointer) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x1.shared.b16 {%0}, [%1];"
               : "=r"(r[0])
               : "r"(shared_address(row_pointer))
               : "memory");
}

__device__ __forceinline__ void ldmatrix_x2(u32 (&r)[2], const void* row_pointer) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x2.shared.b16 {%0, %1}, [%2];"
               : "=r"(r[0]), "=r"(r[1])
               : "r"(shared_address(row_pointer))
               : "memory");
}

__device__ __forceinline__ void ldmatrix_x4(u32 (&r)[4], const void* row_pointer) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
               : "r"(shared_address(row_pointer))
               : "memory");
}

__device__ __forceinline__ void ldmatrix_x1_trans(u32 (&r)[1], const void* row_pointer) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x1.trans.shared.b16 {%0}, [%1];"
               : "=r"(r[0])
               : "r"(shared_address(row_pointer))
               : "memory");
}

__device__ __forceinline__ void ldmatrix_x2_trans(u32 (&r)[2], const void* row_pointer) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x2.trans.shared.b16 {%0, %1}, [%2];"
               : "=r"(r[0]), "=r"(r[1])
               : "r"(shared_address(row_pointer))
               : "memory");
}

__device__ __forceinline__ void ldmatrix_x4_trans(u32 (&r)[4], const void* row_pointer) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
               : "r"(shared_address(row_pointer))
               : "memory");
}

}  // namespace cki::ptx
