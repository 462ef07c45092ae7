// Conversions between fp32 and the 16-bit, 8-bit and tf32 formats (PTX cvt).
//
// To 16 bits: round to nearest even, overflow to infinity. To 8 bits: round to nearest even and saturate to the largest
// finite value (.satfinite); NaN stays NaN. To tf32: round to nearest, ties away from zero. Packed forms put the first
// element into the lower half.
#pragma once

#include "common/types.cuh"
#include "ptx/target.cuh"

namespace cki::ptx {

__device__ __forceinline__ float f16_to_f32(f16 x) {
  float y;
  asm("cvt.f32.f16 %0, %1;" : "=f"(y) : "h"(x.bits));
  return y;
}

__device__ __forceinline__ f16 f32_to_f16(float x) {
  f16 y;
  asm("cvt.rn.f16.f32 %0, %1;" : "=h"(y.bits) : "f"(x));
  return y;
}

// Exact: a bf16 is the upper half of the fp32.
__device__ __forceinline__ float bf16_to_f32(bf16 x) { return __uint_as_float(static_cast<u32>(x.bits) << 16); }

__device__ __forceinline__ bf16 f32_to_bf16(float x) {
  bf16 y;
  asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(y.bits) : "f"(x));
  return y;
}

__device__ __forceinline__ u32 f32x2_to_f16x2(float lo, float hi) {
  u32 y;
  asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(y) : "f"(hi), "f"(lo));
  return y;
}

__device__ __forceinline__ u32 f32x2_to_bf16x2(float lo, float hi) {
  u32 y;
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(y) : "f"(hi), "f"(lo));
  return y;
}

__device__ __forceinline__ void f16x2_to_f32x2(u32 x, float& lo, float& hi) {
  lo = f16_to_f32(f16{static_cast<u16>(x)});
  hi = f16_to_f32(f16{static_cast<u16>(x >> 16)});
}

__device__ __forceinline__ void bf16x2_to_f32x2(u32 x, float& lo, float& hi) {
  lo = __uint_as_float(x << 16);
  hi = __uint_as_float(x & 0xffff0000u);
}

template <int Sm = kTargetSm>
__device__ __forceinline__ u16 f32x2_to_e4m3x2(float lo, float hi) {
  static_assert(Sm >= 89, "conversion to e4m3 needs sm_89");
  u16 y;
  asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(y) : "f"(hi), "f"(lo));
  return y;
}

template <int Sm = kTargetSm>
__device__ __forceinline__ u16 f32x2_to_e5m2x2(float lo, float hi) {
  static_assert(Sm >= 89, "conversion to e5m2 needs sm_89");
  u16 y;
  asm("cvt.rn.satfinite.e5m2x2.f32 %0, %1, %2;" : "=h"(y) : "f"(hi), "f"(lo));
  return y;
}

// Exact: f16 holds every e4m3 value.
template <int Sm = kTargetSm>
__device__ __forceinline__ u32 e4m3x2_to_f16x2(u16 x) {
  static_assert(Sm >= 89, "conversion from e4m3 needs sm_89");
  u32 y;
  asm("cvt.rn.f16x2.e4m3x2 %0, %1;" : "=r"(y) : "h"(x));
  return y;
}

// Exact: f16 holds every e5m2 value.
template <int Sm = kTargetSm>
__device__ __forceinline__ u32 e5m2x2_to_f16x2(u16 x) {
  static_assert(Sm >= 89, "conversion from e5m2 needs sm_89");
  u32 y;
  asm("cvt.rn.f16x2.e5m2x2 %0, %1;" : "=r"(y) : "h"(x));
  return y;
}

// An fp32 bit pattern with the lower 13 bits zero. A NaN whose payload lies in those bits becomes an infinity.
__device__ __forceinline__ u32 f32_to_tf32(float x) {
  u32 y;
  asm("cvt.rna.tf32.f32 %0, %1;" : "=r"(y) : "f"(x));
  return y;
}

}  // namespace cki::ptx
