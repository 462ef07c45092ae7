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
