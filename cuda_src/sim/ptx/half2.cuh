// Simulated ptx/half2.cuh: each element in double, rounded once; the exponential correctly rounded, which the hardware's
// is not.
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

}  // namespace detail

__device__ __forceinline__ u32 fma_f16x2(u32 a, u32 b, u32 c) {
  return detail::for_pair([&](auto at) { return at(a) * at(b) + at(c); });
}
__device__ __forceinline__ u32 fnma_f16x2(u32 a, u32 b, u32 c) {
  return detail::for_pair([&](auto at) { return at(c) - at(a) * at(b); });
}
__device__ __forceinline__ u32 abs_f16x2(u32 a) { return a & 0x7fff7fffu; }
__device__ __forceinline__ u32 min_f16x2(u32 a, u32 b) {
  return detail::for_pair([&](auto at) { return ::fmin(at(a), at(b)); });
}
__device__ __forceinline__ u32 max_nan_f16x2(u32 a, u32 b) {
  return detail::for_pair([&](auto at) { return at(a) != at(a) || at(b) != at(b) ? NAN : ::fmax(at(a), at(b)); });
}
__device__ __forceinline__ u32 ex2_approx_f16x2(u32 a) {
  return detail::for_pair([&](auto at) { return ::exp2(at(a)); });
}

}  // namespace cki::ptx
