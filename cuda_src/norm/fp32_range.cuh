// Keeping a mean square inside the range of fp32.
//
// A row of 1e19 is an ordinary fp32 row with a defined norm, but its squares overflow; a row of 1e-25 with eps = 0 loses its
// squares to underflow. In both cases the row is multiplied by a power of two, which is exact, and eps by that power's
// square. The test is one comparison a row on the sum that is computed anyway, so ordinary rows pay nothing.
//
// A layer norm squares deviations from a rounded mean. Those of equal elements are all error: of 1e30 they are 1e23 and
// overflow; of 1e12 their own mean's error shows. Such deviations are centred again, within their limits, so none is left.
#pragma once

#include "common/types.cuh"

namespace cki {

// False for an overflowed, vanishing or NaN mean square.
__device__ __forceinline__ bool mean_square_in_range(float mean_square, float eps) {
  return mean_square < 1e37f && mean_square + eps > 1e-30f;
}

// The same for deviations d of moments mean(d), mean(d^2), and whether they are more than the error of the mean they are from.
__device__ __forceinline__ bool deviations_in_range(const float (&moments)[2], float eps) {
  return mean_square_in_range(moments[1], eps) && moments[0] * moments[0] <= 0.5f * moments[1];
}

// A power of two that brings the larger of the row's largest magnitude and sqrt(eps) to about 1. An infinite or NaN row
// keeps scale 1: its result is that of the formula.
__device__ __forceinline__ float power_of_two_scale(float largest, float eps) {
  const u32 exponent = __float_as_uint(fmaxf(largest, sqrtf(eps))) >> 23;
  if (exponent == 255) return 1.0f;
  return __uint_as_float((254 - min(exponent, 253u)) << 23);
}

// eps * scale^2 without leaving the range on the way, above zero where eps is: a row without deviations has a norm of zero
// then, and only then.
__device__ __forceinline__ float scaled_eps(float eps, float scale) {
  constexpr float kLeastNormal = 1.17549435e-38f;
  const float root = sqrtf(eps) * scale;
  return eps > 0.0f ? fmaxf(root * root, kLeastNormal) : 0.0f;
}

// The mean of finite values, whose rounded terms may add up to more than the largest of them.
__device__ __forceinline__ float finite_mean(float mean) {
  constexpr float kLargestFinite = 3.402823466e38f;
  return fminf(fmaxf(mean, -kLargestFinite), kLargestFinite);
}

// The scale of deviations of which limits are the largest and the negated smallest. NaN where one is infinite: the mean that
// they are from says so no more, and the norm of a row with an infinity is NaN throughout.
__device__ __forceinline__ float deviations_scale(const float (&limits)[2], float eps) {
  const float largest = fmaxf(fmaxf(limits[0], limits[1]), 0.0f);
  return largest < __uint_as_float(0x7f800000u) ? power_of_two_scale(largest, eps) : __uint_as_float(0x7fffffffu);
}

// A rounded mean of numbers of which limits are the largest and the negated smallest.
__device__ __forceinline__ float mean_within(const float (&limits)[2], float mean) {
  return fminf(fmaxf(mean, -limits[1]), limits[0]);
}

}  // namespace cki
