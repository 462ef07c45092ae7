// Numbers as two of e4m3: the number rounded, and what that left. Each has four bits, so the two have the eight of bf16.
//
// Numbers come times a power of two, the same for a group of neighbours, by which the largest of them is in [128, 256): those down
// to 2^-9 of the largest that are of bf16 are kept exactly, and smaller ones within 2^-17 of it.
#pragma once

#include "common/types.cuh"
#include "ptx/convert.cuh"

namespace cki {

// The power of two that brings `largest` to [128, 256), and what undoes it: not a number where `largest` is none.
__device__ __forceinline__ void power_of(float largest, float& up, float& down) {
  const u32 exponent = min(max(__float_as_uint(largest) >> 23, 8u), 254u);
  up = __uint_as_float((261 - exponent) << 23);
  down = __float_as_uint(largest) >= 0x7f800000u ? largest : __uint_as_float((exponent - 7) << 23);
}

// Two numbers: rounded to e4m3, and the rest. From sm_89 on; a template, because others include this file, too.
template <class Word>
__device__ __forceinline__ void split_pair(float first, float second, Word& high, Word& low) {
  high = ptx::f32x2_to_e4m3x2(first, second);
  float first_high, second_high;
  ptx::f16x2_to_f32x2(ptx::e4m3x2_to_f16x2(high), first_high, second_high);
  low = ptx::f32x2_to_e4m3x2(first - first_high, second - second_high);
}

}  // namespace cki
