// An fp32 number as the sum of two tf32 numbers, for products that are fp32-accurate on the tensor core (3xTF32).
//
// a = high + low to 2^-22, and a*b is taken as low*high' + high*low' + high*high', the smallest first. What is left out is
// 2^-22 of the product, near fp32's own rounding of 2^-24. An infinity does not survive: low is inf - inf.
#pragma once

#include "common/types.cuh"
#include "ptx/convert.cuh"

namespace cki {

__device__ __forceinline__ void split_tf32(u32 word, u32& high, u32& low) {
  high = ptx::f32_to_tf32(__uint_as_float(word));
  low = ptx::f32_to_tf32(__uint_as_float(word) - __uint_as_float(high));
}

}  // namespace cki
