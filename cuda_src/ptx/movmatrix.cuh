// Transposes an 8x8 matrix of 16-bit elements across a warp's registers (PTX movmatrix, sm_75).
#pragma once

#include "common/types.cuh"

namespace cki::ptx {

// Lane l holds the elements (row l/4, columns 2*(l%4) and +1); it receives (rows 2*(l%4) and +1, column l/4).
__device__ __forceinline__ u32 movmatrix_trans(u32 a) {
  u32 d;
  asm volatile("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(d) : "r"(a));
  return d;
}

}  // namespace cki::ptx
