// Keeping a mean square inside the range of fp32.
//
// A row of 1e19 is an ordinary fp32 row with a defined norm, but its squares overflow; a row of 1e-25 with eps = 0 loses its
// squares to underflow. In both cases the row is multiplied by a power of two, which is exact, and eps by that power's
// square. The test is one comparison a row on the sum that is computed anyway, so ordinary rows pay nothing.
#pragma once

#include "common/types.cuh"

namespace cki {

// False for an overflowed, vanishing or NaN mean square.
__device__ __forceinline__ bool mean_square_in_range(float mean_square, float eps) {
  return mean_square < 1e37f && mean_square + eps > 1e-30f;
}

// A power of two that brings the larger of the row's largest magnitude and sqrt(eps) to about 1. An infinite or NaN row
// keeps scale 1: its result is that of the formula.
__device__ __forceinline__ float power_of_two_scale(float largest, float eps) {
  const u32 exponent = __float_as_uint(fmaxf(largest, sqrtf(eps))) >> 23;
  if (exponent == 255) return 1.0f;
  return __uint_as_float((254 - min(exponent, 253u)) << 23);
}

// eps * scale^2 without leaving the range on the way.
__device__ __forceinline__ float scaled_eps(float eps, float scale) {
  const float root = sqrtf(eps) * scale;
  return root * root;
}

}  // namespace cki
