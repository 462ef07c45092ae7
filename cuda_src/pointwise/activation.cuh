// Activation functions on fp32 values, cheap enough to stay behind the memory in a kernel that reads each value once: at
// 4 TB/s of 16-bit values an H200 has 28 instruction slots an element.
#pragma once

#include "gemm/activation.cuh"
#include "ptx/math.cuh"

namespace cki::pointwise {

// The numbers are those of cki/heuristics/pointwise.py; the first five are gemm::Activation's.
enum class Activation {
  kNone = 0, kGelu = 1, kGeluTanh = 2, kSilu = 3, kRelu = 4, kSigmoid = 5, kTanh = 6, kQuickGelu = 7, kRelu2 = 8
};

// x Phi(x) as max(x, 0) - |x| Phi(-|x|), with Phi(-z) = t P(t) exp(-z^2 / 2) and t = 1 / (1 + p z), the form of Abramowitz
// and Stegun 7.1.26. P was fitted to the least relative error: 6e-7 on z = 0 .. 14. The result's relative error is 1.1e-6 for
// |x| < 4 and 3.4e-6 at -8, where (1 + erff) / 2 has cancelled to noise; and it takes 20 instructions instead of 29.
// P(0) != 0, so the bound on z keeps an infinity from meeting the zero of the exponential; a NaN passes by max(x, 0).
__device__ __forceinline__ float gelu(float x) {
  constexpr float kHalfLog2E = 0.72134752f;
  const float z = fminf(fabsf(x), 32.0f);
  const float t = ptx::rcp_approx(fmaf(0.26445794f, z, 1.0f));
  float tail = -0.06858095f;
  tail = fmaf(tail, t, 0.19961846f);
  tail = fmaf(tail, t, -0.07161694f);
  tail = fmaf(tail, t, 0.14575245f);
  tail = fmaf(tail, t, 0.08163657f);
  tail = fmaf(tail, t, 0.10782066f);
  tail = fmaf(tail, t, 0.10536946f);
  tail *= t * ptx::ex2_approx(-kHalfLog2E * z * z);
  return fmaf(-z, tail, gemm::activate<gemm::Activation::kRelu>(x));
}

// kItemSize: bytes of the type that the result is rounded to. GELU of 16 bits needs no more than half the instructions.
template <Activation kKind, int kItemSize>
__device__ __forceinline__ float activate(float x) {
  if constexpr (kKind == Activation::kGelu && kItemSize == 2) {
    return gemm::gelu_for_16_bits(x);
  } else if constexpr (kKind == Activation::kGelu) {
    return gelu(x);
  } else if constexpr (kKind == Activation::kSigmoid) {
    return gemm::times_sigmoid(1.0f, x);
  } else if constexpr (kKind == Activation::kTanh) {
    return tanhf(x);
  } else if constexpr (kKind == Activation::kQuickGelu) {  // the sigmoid approximation of GELU that CLIP uses
    return gemm::times_sigmoid(x, 1.702f * x);
  } else if constexpr (kKind == Activation::kRelu2) {  // squared ReLU (So et al. 2021, arXiv:2109.08668)
    const float positive = gemm::activate<gemm::Activation::kRelu>(x);
    return positive * positive;
  } else {
    return gemm::activate<static_cast<gemm::Activation>(kKind)>(x);
  }
}

}  // namespace cki::pointwise
