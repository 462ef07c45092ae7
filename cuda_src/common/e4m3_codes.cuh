// Scales and codes of values stored as e4m3: value = code * scale.
//
// The scale of a group of values brings the largest finite magnitude to 448, the largest code. Infinities are left out of
// it and saturate; a NaN becomes the code of NaN and nothing else.
#pragma once

#include "common/types.cuh"
#include "common/vec.cuh"
#include "ptx/convert.cuh"
#include "ptx/math.cuh"

namespace cki {

// The larger of `largest` and the magnitudes of values, those that are not finite left out. fmaxf leaves out NaN; only
// where an infinity turns up are values looked at one by one.
template <int N>
__device__ __forceinline__ float largest_finite(float largest, const float (&values)[N]) {
  constexpr float kLargestFloat = 3.402823466e38f;
  float found = largest;
#pragma unroll
  for (int i = 0; i < N; ++i) found = fmaxf(found, fabsf(values[i]));
  if (found > kLargestFloat) {
    found = largest;
#pragma unroll
    for (int i = 0; i < N; ++i)
      if (fabsf(values[i]) <= kLargestFloat) found = fmaxf(found, fabsf(values[i]));
  }
  return found;
}

// largest / 448, correctly rounded: one step from the product with the rounded reciprocal (Markstein 1990), in a third of a
// division's instructions. Zeros get the scale 1. Below 448 * 2^-126 a quotient would lose bits, and its reciprocal overflow:
// 2^-126 is the least.
__device__ __forceinline__ float e4m3_scale(float largest) {
  constexpr float kReciprocal = 1.0f / 448.0f;
  const float quotient = largest * kReciprocal;
  const float scale = fmaf(fmaf(-448.0f, quotient, largest), kReciprocal, quotient);
  return largest > 0.0f ? fmaxf(scale, 1.17549435e-38f) : 1.0f;
}

// 1 / scale to an ulp, scale being what e4m3_scale returns: neither it nor its reciprocal is subnormal.
__device__ __forceinline__ float inverse_of_scale(float scale) {
  const float inverse = ptx::rcp_approx(scale);
  return fmaf(fmaf(-scale, inverse, 1.0f), inverse, inverse);
}

// Codes of values / scale, to nearest even, saturated; p is aligned to N bytes.
template <int N>
__device__ __forceinline__ void store_e4m3(u8* p, const float (&values)[N], float inverse_scale) {
  if constexpr (N == 1) {
    *p = static_cast<u8>(ptx::f32x2_to_e4m3x2(values[0] * inverse_scale, 0.0f));
  } else {
    u16 pairs[N / 2];
#pragma unroll
    for (int i = 0; i < N; i += 2)
      pairs[i / 2] = ptx::f32x2_to_e4m3x2(values[i] * inverse_scale, values[i + 1] * inverse_scale);
    if constexpr (N == 2) {
      *reinterpret_cast<u16*>(p) = pairs[0];
    } else {
      u32 words[N / 4];
#pragma unroll
      for (int i = 0; i < N / 4; ++i) words[i] = pairs[2 * i] | static_cast<u32>(pairs[2 * i + 1]) << 16;
      store_words(p, words);
    }
  }
}

}  // namespace cki
