// Simulated ptx/ldmatrix.cuh: runtime/ldmatrix.cpp.
#pragma once

#include "common/types.cuh"

extern "C" void cki_sim_ldmatrix(unsigned* registers, int matrices, int transpose, const void* row_pointer);

namespace cki::ptx {

__device__ __forceinline__ void ldmatrix_x1(u32 (&r)[1], const void* row_pointer) {
  cki_sim_ldmatrix(r, 1, 0, row_pointer);
}
__device__ __forceinline__ void ldmatrix_x2(u32 (&r)[2], const void* row_pointer) {
  cki_sim_ldmatrix(r, 2, 0, row_pointer);
}
__device__ __forceinline__ void ldmatrix_x4(u32 (&r)[4], const void* row_pointer) {
  cki_sim_ldmatrix(r, 4, 0, row_pointer);
}

__device__ __forceinline__ void ldmatrix_x1_trans(u32 (&r)[1], const void* row_pointer) {
  cki_sim_ldmatrix(r, 1, 1, row_pointer);
}

__device__ __forceinline__ void ldmatrix_x2_trans(u32 (&r)[2], const void* row_pointer) {
  cki_sim_ldmatrix(r, 2, 1, row_pointer);
}

__device__ __forceinline__ void ldmatrix_x4_trans(u32 (&r)[4], const void* row_pointer) {
  cki_sim_ldmatrix(r, 4, 1, row_pointer);
}

}  // namespace cki::ptx
