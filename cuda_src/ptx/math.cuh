// Approximate functions of the special function unit (PTX .approx). Error bounds are the PTX manual's.
//
// .ftz forms read subnormal inputs as zero and flush subnormal results to zero, in both cases keeping the sign. They
// are plain (not volatile) asm: the compiler may move, merge or drop them like arithmetic.
#pragma once

namespace cki::ptx {

// 2^x, relative error below 2^-22.5 (2 ulp).
__device__ __forceinline__ float ex2_approx(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

// log2(x), absolute error below 2^-22 for x in (0.5, 2), relative error below 2^-22 elsewhere.
__device__ __forceinline__ float lg2_approx(float x) {
  float y;
  asm("lg2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

// 1/x, error at most 1 ulp.
__device__ __forceinline__ float rcp_approx(float x) {
  float y;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

// 1/sqrt(x), relative error below 2^-22.9.
__device__ __forceinline__ float rsqrt_approx(float x) {
  float y;
  asm("rsqrt.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

// tanh(x), relative error below 2^-11: enough for 16-bit results, not for fp32 ones. It has no .ftz form.
__device__ __forceinline__ float tanh_approx(float x) {
  float y;
  asm("tanh.approx.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

// The larger of both; NaN where either is (fmaxf takes the other).
__device__ __forceinline__ float max_nan(float a, float b) {
  float y;
  asm("max.NaN.f32 %0, %1, %2;" : "=f"(y) : "f"(a), "f"(b));
  return y;
}

}  // namespace cki::ptx
