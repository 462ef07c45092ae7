// Simulated ptx/half2.cuh: each element in double, rounded once; the exponential as far off as PTX lets it be.
#pragma once

#include <cmath>

#include "common/types.cuh"
#include "ptx/convert.cuh"

namespace cki::ptx {

namespace detail {

template <class Function>
inline u32 for_pair(Function&& function) {
  u32 y = 0;
  for (int i = 0; i < 2; ++i) {
    const auto at = [&](u32 pair) { return static_cast<double>(f16_to_f32(f16{static_cast<u16>(pair >> (16 * i))})); };
    y |= static_cast<u32>(f32_to_f16(static_cast<float>(function(at))).bits) << (16 * i);
  }
  return y;
}

// The f16 farthest above or below 2^x, by a bit of x that tells neighbours apart, whose relative error is below 2^-9.9:
// who is right with it is right with the hardware's. Among subnormals, whose relative error PTX does not limit, one unit.
inline double coarse_exp2(double x) {
  const double exact = ::exp2(x), unit = ::ldexp(1.0, exact < 0x1p-14 ? -24 : ::ilogb(exact) - 10);
  if (exact != exact || exact == INFINITY || x == -INFINITY || exact == 1.0) return exact;
  const bool up = (f32_to_f16(static_cast<float>(x)).bits * 0x9e37u >> 9 & 1) != 0;
  const double slack = exact < 0x1p-14 ? unit : exact * 0x1.125fbee250663p-10;  // 2^-9.9
  const double units = (up ? exact + slack : exact - slack) / unit;
  return ::fmax(up ? ::floor(units) : ::ceil(units), 0.0) * unit;
}

}  // namespace detail

__device__ __forceinline__ u32 fma_f16x2(u32 a, u32 b, u32 c) {
  return detail::for_pair([&](auto at) { return at(a) * at(b) + at(c); });
}
__device__ __forceinline__ u32 fnma_f16x2(u32 a, u32 b, u32 c) {
  return detail::for_pair([&](auto at) { return at(c) - at(a) * at(b); });
}
__device__ __forceinline__ u32 mul_abs_saturate_f16x2(u32 a, u32 b) {
  return detail::for_pair([&](auto at) { return ::fmin(::fmax(::fabs(at(a)) * at(b), 0.0), 1.0); });
}
__device__ __forceinline__ u32 max_nan_f16x2(u32 a, u32 b) {
  return detail::for_pair([&](auto at) { return at(a) != at(a) || at(b) != at(b) ? NAN : ::fmax(at(a), at(b)); });
}
__device__ __forceinline__ u32 ex2_approx_f16x2(u32 a) {
  return detail::for_pair([&](auto at) { return detail::coarse_exp2(at(a)); });
}

}  // namespace cki::ptx
