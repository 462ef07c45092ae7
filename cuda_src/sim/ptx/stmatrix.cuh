// Simulated ptx/stmatrix.cuh: runtime/ldmatrix.cpp.
#pragma once

#include "common/types.cuh"

extern "C" void cki_sim_stmatrix(void* row_pointer, int matrices, int transpose, const unsigned* registers);

namespace cki::ptx {

__device__ __forceinline__ void stmatrix_x1(void* row_pointer, const u32 (&r)[1]) {
  cki_sim_stmatrix(row_pointer, 1, 0, r);
}
__device__ __forceinline__ void stmatrix_x2(void* row_pointer, const u32 (&r)[2]) {
  cki_sim_stmatrix(row_pointer, 2, 0, r);
}
__device__ __forceinline__ void stmatrix_x4(void* row_pointer, const u32 (&r)[4]) {
  cki_sim_stmatrix(row_pointer, 4, 0, r);
}

__device__ __forceinline__ void stmatrix_x1_trans(void* row_pointer, const u32 (&r)[1]) {
  cki_sim_stmatrix(row_pointer, 1, 1, r);
}

__device__ __forceinline__ void stmatrix_x2_trans(void* row_pointer, const u32 (&r)[2]) {
  cki_sim_stmatrix(row_pointer, 2, 1, r);
}

__device__ __forceinline__ void stmatrix_x4_trans(void* row_pointer, const u32 (&r)[4]) {
  cki_sim_stmatrix(row_pointer, 4, 1, r);
}

}  // namespace cki::ptx
