// Activation functions on fp32 values, in forms that keep small results right.
#pragma once

#include "common/types.cuh"
#include "ptx/half2.cuh"
#include "ptx/math.cuh"

namespace cki::gemm {

// The numbers are those of cki/heuristics/linear.py.
enum class Activation { kNone = 0, kGelu = 1, kGeluTanh = 2, kSilu = 3, kRelu = 4, kGeluPairs = 5 };

// x / (1 + exp(-u)): of the exponential's error only the part beside 1 counts, and u -> -inf ends in -0 without overflow.
__device__ __forceinline__ float times_sigmoid(float x, float u) {
  constexpr float kLog2E = 1.4426950408889634f;
  return x * ptx::rcp_approx(1.0f + ptx::ex2_approx(-kLog2E * u));
}

// x Phi(x) for a result of 16 bits, in 9 instructions instead of erff's 25, one of them of the special function unit,
// which bounds the others' number. x Phi(x) = max(x, 0) - t Phi(-t) with t = |x|; the logarithm of Phi(-t) is nearly a
// parabola, here a polynomial of u = t / 8 fitted to the least relative error of the result: 8e-5 where f16 is normal
// (results beyond 6e-5, x > -4.2), and less than 1e-8 in absolute terms below. From u = 1 on the tail is 1e-14, so u
// saturates, which costs a multiplication; a minimum costs twice as much beside the tensor core. A NaN stays one.
// coefficients: the logarithm's, of the highest order first.
template <int kCount>
__device__ __forceinline__ float gelu_by_tail(float x, const float (&coefficients)[kCount]) {
  const float u = __saturatef(fabsf(x) * 0.125f);
  float log2_tail = coefficients[0];
#pragma unroll
  for (int i = 1; i < kCount; ++i) log2_tail = fmaf(log2_tail, u, coefficients[i]);
  return fmaf(-u, ptx::ex2_approx(log2_tail), ptx::max_nan(x, 0.0f));
}

__device__ __forceinline__ float gelu_for_16_bits(float x) {
  return gelu_by_tail(x, {-10.940662f, 24.39959f, -24.919767f, -29.66637f, -9.1955624f, 1.9998988f});
}

// For bf16 with one order less: 6.4e-4, a third of its half unit.
__device__ __forceinline__ float gelu_for_bf16(float x) {
  return gelu_by_tail(x, {10.036387f, -18.340696f, -30.890747f, -9.1163654f, 1.9990875f});
}

// The same of two f16, for a result of f16, in 10 instructions for both: all of it but the exponential's own rounding in
// pairs. What it loses lies in t Phi(-t) = u 2^(3 + log2 Phi(-t)), u = t / 8, at most 0.17: of all f16, with an exponential
// of any error below 2^-9.9, 2e-4 beside the result's half unit (1.8e-4 of it the exponential's), and up to 1 % of
// the result at -3.4. The exponent is no larger than 2 where that matters, for it, too, is rounded. Saturation at u = 1,
// where the tail is 0, costs nothing. One order less than above is enough.
__device__ __forceinline__ u32 gelu_pair(u32 x) {
  const auto both = [](u32 bits) { return bits << 16 | bits; };
  const u32 u = ptx::mul_abs_saturate_f16x2(x, both(0x3000u));  // 1/8
  u32 log2_tail = both(0x4983u);                                // 11.023
  log2_tail = ptx::fma_f16x2(log2_tail, u, both(0xccf0u));      // -19.750
  log2_tail = ptx::fma_f16x2(log2_tail, u, both(0xcfa0u));      // -30.500
  log2_tail = ptx::fma_f16x2(log2_tail, u, both(0xc891u));      // -9.1328
  log2_tail = ptx::fma_f16x2(log2_tail, u, both(0x3ffeu));      // 1.9980
  return ptx::fnma_f16x2(u, ptx::ex2_approx_f16x2(log2_tail), ptx::max_nan_f16x2(x, 0u));
}

template <Activation kActivation>
__device__ __forceinline__ float activate(float x) {
  if constexpr (kActivation == Activation::kGelu) {  // x Phi(x), by the error function (Hendrycks and Gimpel 2016)
    constexpr float kSqrtHalf = 0.70710678118654752f;
    return 0.5f * x * (1.0f + erff(x * kSqrtHalf));
  } else if constexpr (kActivation == Activation::kGeluTanh) {
    // x/2 (1 + tanh(v)) with v = sqrt(2/pi) (x + 0.044715 x^3); (1 + tanh(v)) / 2 is the sigmoid of 2 v, here 1 / (1 + 2^u).
    constexpr float kLinear = -2.3022082f, kCubic = -0.10294324f;  // -2 log2(e) sqrt(2/pi), and 0.044715 times that
    const float u = x * fmaf(x * x, kCubic, kLinear);
    return x * ptx::rcp_approx(1.0f + ptx::ex2_approx(u));
  } else if constexpr (kActivation == Activation::kSilu) {
    return times_sigmoid(x, x);
  } else if constexpr (kActivation == Activation::kRelu) {
    return ptx::max_nan(x, 0.0f);
  } else {
    return x;
  }
}

}  // namespace cki::gemm
