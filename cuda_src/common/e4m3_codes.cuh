// Scales and codes of values stored as e4m3: value = code * scale.
//
// The scale of a group of values brings the largest finite magnitude to 448, the largest code. Infinities are left out of
// it and saturate; a NaN becomes the code of NaN and nothing else.
#pragma once

#include "common/types.cuh"
#include "common/vec.cuh"
#include "ptx/convert.cuh"

namespace cki {

// The larger of `largest` and the magnitudes of values, those that are not finite left out.
template <int N>
__device__ __forceinline__ float largest_finite(float largest, const float (&values)[N]) {
#pragma unroll
  for (int i = 0; i < N; ++i) {
    const float magnitude = fabsf(values[i]);
    if (magnitude <= 3.402823466e38f) largest = fmaxf(largest, magnitude);  // the largest finite fp32; false for NaN
  }
  return largest;
}

// Zeros get the scale 1. Below 448 * 2^-126 a quotient would lose bits, and its reciprocal overflow: 2^-126 is the least.
__device__ __forceinline__ float e4m3_scale(float largest) {
  return largest > 0.0f ? fmaxf(largest / 448.0f, 1.17549435e-38f) : 1.0f;
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
