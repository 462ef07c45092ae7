// Simulated ptx/math.cuh: correctly rounded or nearly so, within the error that the PTX manual states for the
// hardware's approximations, but not its bits. Subnormal inputs and results of .ftz forms become zeros of the same
// sign.
#pragma once

#include <cmath>

#include "common/types.cuh"
#include "runtime/convert.h"

namespace cki::ptx {

namespace detail {

inline float flush(float x) {
  const u32 bits = sim::float_bits(x);
  return (bits & 0x7f800000u) == 0 ? sim::bits_float(bits & 0x80000000u) : x;
}

}  // namespace detail

__device__ __forceinline__ float ex2_approx(float x) { return detail::flush(::exp2f(detail::flush(x))); }
__device__ __forceinline__ float lg2_approx(float x) { return detail::flush(::log2f(detail::flush(x))); }
__device__ __forceinline__ float rcp_approx(float x) { return detail::flush(1.0f / detail::flush(x)); }
__device__ __forceinline__ float rsqrt_approx(float x) { return detail::flush(1.0f / ::sqrtf(detail::flush(x))); }
__device__ __forceinline__ float tanh_approx(float x) { return ::tanhf(x); }
__device__ __forceinline__ float max_nan(float a, float b) { return a != a || b != b ? NAN : ::fmaxf(a, b); }

}  // namespace cki::ptx
