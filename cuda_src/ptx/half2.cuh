// Arithmetic on pairs of f16 in a register: two elements an instruction, each rounded to the nearest f16.
#pragma once

#include "common/types.cuh"

namespace cki::ptx {

// a b + c.
__device__ __forceinline__ u32 fma_f16x2(u32 a, u32 b, u32 c) {
  u32 y;
  asm("fma.rn.f16x2 %0, %1, %2, %3;" : "=r"(y) : "r"(a), "r"(b), "r"(c));
  return y;
}

// c - a b.
__device__ __forceinline__ u32 fnma_f16x2(u32 a, u32 b, u32 c) {
  u32 y;
  asm("{\n.reg .b32 n;\nneg.f16x2 n, %1;\nfma.rn.f16x2 %0, n, %2, %3;\n}" : "=r"(y) : "r"(a), "r"(b), "r"(c));
  return y;
}

// |a| b within 0 and 1; NaN becomes 0.
__device__ __forceinline__ u32 mul_abs_saturate_f16x2(u32 a, u32 b) {
  u32 y;
  asm("{\n.reg .b32 m;\nabs.f16x2 m, %1;\nmul.rn.sat.f16x2 %0, m, %2;\n}" : "=r"(y) : "r"(a), "r"(b));
  return y;
}

// The larger of both; NaN where either is.
__device__ __forceinline__ u32 max_nan_f16x2(u32 a, u32 b) {
  u32 y;
  asm("max.NaN.f16x2 %0, %1, %2;" : "=r"(y) : "r"(a), "r"(b));
  return y;
}

// 2^x, relative error below 2^-9.9.
__device__ __forceinline__ u32 ex2_approx_f16x2(u32 a) {
  u32 y;
  asm("ex2.approx.f16x2 %0, %1;" : "=r"(y) : "r"(a));
  return y;
}

}  // namespace cki::ptx
