// Simulated ptx/movmatrix.cuh: runtime/ldmatrix.cpp.
#pragma once

#include "common/types.cuh"

extern "C" unsigned cki_sim_movmatrix_trans(unsigned a);

namespace cki::ptx {

__device__ __forceinline__ u32 movmatrix_trans(u32 a) { return cki_sim_movmatrix_trans(a); }

}  // namespace cki::ptx
