// Activation functions on fp32 values, in forms that keep small results right.
#pragma once

#include "ptx/math.cuh"

namespace cki::gemm {

// The numbers are those of cki/heuristics/linear.py.
enum class Activation { kNone = 0, kGelu = 1, kGeluTanh = 2, kSilu = 3, kRelu = 4 };

// x / (1 + exp(-u)): of the exponential's error only the part beside 1 counts, and u -> -inf ends in -0 without overflow.
__device__ __forceinline__ float times_sigmoid(float x, float u) {
  constexpr float kLog2E = 1.4426950408889634f;
  return x * ptx::rcp_approx(1.0f + ptx::ex2_approx(-kLog2E * u));
}

// x Phi(x) for a result of 16 bits, in 12 instructions instead of erff's 25. Phi(x) is the sigmoid of an odd function,
// here x P(x^2), with P fitted to the least relative error of the result: 7e-5 where f16 is normal (results beyond 6e-5,
// x > -4.2), then 1.6e-3 to -5, and less than 1e-8 in absolute terms. The sigmoid goes to 0 and 1 beyond.
__device__ __forceinline__ float gelu_for_16_bits(float x) {
  constexpr float kLog2E = 1.4426950408889634f;
  const float square = x * x;
  float u = -kLog2E * 1.5337459e-9f;
  u = fmaf(u, square, -kLog2E * -1.4128875e-7f);
  u = fmaf(u, square, -kLog2E * 5.0771620e-6f);
  u = fmaf(u, square, -kLog2E * -7.9720148e-5f);
  u = fmaf(u, square, -kLog2E * -2.2491492e-4f);
  u = fmaf(u, square, -kLog2E * 7.3015823e-2f);
  u = fmaf(u, square, -kLog2E * 1.5955525f);
  return x * ptx::rcp_approx(1.0f + ptx::ex2_approx(u * x));
}

template <Activation kActivation>
__device__ __forceinline__ float activate(float x) {
  if constexpr (kActivation == Activation::kGelu) {  // x Phi(x), by the error function (Hendrycks and Gimpel 2016)
    constexpr float kSqrtHalf = 0.70710678118654752f;
    return 0.5f * x * (1.0f + erff(x * kSqrtHalf));
  } else if constexpr (kActivation == Activation::kGeluTanh) {
    // x/2 (1 + tanh(v)) with v = sqrt(2/pi) (x + 0.044715 x^3); (1 + tanh(v)) / 2 is the sigmoid of 2 v.
    constexpr float kTwoSqrtTwoOverPi = 1.5957691216057308f;
    return times_sigmoid(x, kTwoSqrtTwoOverPi * (x + 0.044715f * x * x * x));
  } else if constexpr (kActivation == Activation::kSilu) {
    return times_sigmoid(x, x);
  } else if constexpr (kActivation == Activation::kRelu) {
    return x < 0.0f ? 0.0f : x;  // a NaN stays one
  } else {
    return x;
  }
}

}  // namespace cki::gemm
