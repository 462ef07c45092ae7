// Conversions between fp32 and the small floating-point formats, to the bit as PTX's cvt rounds them.
//
// One generic rounding on integers serves f16, e4m3 and e5m2: shift the significand right by what the target's
// precision and, below its normal range, its exponent demand, and round to nearest even on the bits shifted out. NaN
// becomes the format's canonical NaN. Kernels (ptx/convert.cuh) and the matrix engines include this file.
#pragma once
#include <cstring>

#include "types.h"

namespace cki::sim {

inline u32 float_bits(float x) {
  u32 bits;
  std::memcpy(&bits, &x, 4);
  return bits;
}

inline float bits_float(u32 bits) {
  float x;
  std::memcpy(&x, &bits, 4);
  return x;
}

constexpr u32 kCanonicalNan = 0x7fffffff;

// Rounds |x|, given as the bits of a finite fp32, to a format of the given exponent and mantissa widths. The result
// may be one step above the largest finite value, or far above: the caller decides on overflow.
inline u32 round_magnitude(u32 magnitude, int exponent_bits, int mantissa_bits) {
  const int bias = (1 << (exponent_bits - 1)) - 1;
  const int exponent = static_cast<int>(magnitude >> 23) - 127 + bias;   // in the target, normal when >= 1
  if (magnitude < (1u << 23)) return 0;   // fp32 subnormals are below half of any target's least
  u32 significand = (magnitude & 0x7fffff) | (1u << 23);
  int shift = 23 - mantissa_bits;
  u32 result_exponent = 0;
  if (exponent >= 1) {
    significand &= 0x7fffff;
    result_exponent = static_cast<u32>(exponent) << mantissa_bits;
  } else {
    shift += 1 - exponent;
    if (shift > 25) return 0;
  }
  const u32 kept = significand >> shift;
  const u32 rest = significand & ((1u << shift) - 1);
  const u32 half = 1u << (shift - 1);
  const u32 up = rest > half || (rest == half && (kept & 1));
  return result_exponent + kept + up;   // a carry out of the mantissa moves to the next exponent by itself
}

inline u16 f32_to_f16_bits(float x) {
  const u32 bits = float_bits(x), magnitude = bits & 0x7fffffff;
  if (magnitude > 0x7f800000) return 0x7fff;
  const u32 sign = bits >> 16 & 0x8000;
  if (magnitude >= 0x47800000) return static_cast<u16>(sign | 0x7c00);   // 65536 and more, infinity
  return static_cast<u16>(sign | round_magnitude(magnitude, 5, 10));   // 65520..65535 round to 0x7c00 = infinity
}

inline u16 f32_to_bf16_bits(float x) {
  const u32 bits = float_bits(x);
  if ((bits & 0x7fffffff) > 0x7f800000) return 0x7fff;
  return static_cast<u16>((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}

// rn.satfinite: values beyond the largest finite one, infinity included, become it.
inline u8 f32_to_e4m3_bits(float x) {
  const u32 bits = float_bits(x), magnitude = bits & 0x7fffffff;
  if (magnitude > 0x7f800000) return 0x7f;
  const u32 sign = bits >> 24 & 0x80;
  if (magnitude >= 0x43e00000) return static_cast<u8>(sign | 0x7e);   // 448 and more
  const u32 rounded = round_magnitude(magnitude, 4, 3);
  return static_cast<u8>(sign | (rounded > 0x7e ? 0x7e : rounded));
}

inline u8 f32_to_e5m2_bits(float x) {
  const u32 bits = float_bits(x), magnitude = bits & 0x7fffffff;
  if (magnitude > 0x7f800000) return 0x7f;
  const u32 sign = bits >> 24 & 0x80;
  if (magnitude >= 0x47600000) return static_cast<u8>(sign | 0x7b);   // 57344 and more
  const u32 rounded = round_magnitude(magnitude, 5, 2);
  return static_cast<u8>(sign | (rounded > 0x7b ? 0x7b : rounded));
}

// To nearest, ties away from zero, at 10 mantissa bits; the 13 low bits of the result are zero. Infinity and NaN are
// only cut, as the hardware does (SASS: FSETP, IADD, LOP3): a NaN whose payload lies in the low bits becomes an
// infinity.
inline u32 f32_to_tf32_bits(float x) {
  const u32 bits = float_bits(x);
  const bool finite = (bits & 0x7fffffff) < 0x7f800000;
  return (finite ? bits + 0x1000 : bits) & 0xffffe000;
}

inline float bf16_bits_to_f32(u16 bits) { return bits_float(static_cast<u32>(bits) << 16); }

// Moves the f16 into an fp32's fields and corrects the exponent by a multiplication, which is exact for subnormals too;
// infinity and NaN get the all-ones exponent. No branch, so that loops over it are vectorised.
inline float f16_bits_to_f32(u16 bits) {
  const u32 magnitude = static_cast<u32>(bits & 0x7fff) << 13;
  const u32 finite = float_bits(bits_float(magnitude) * 0x1p112f);
  const u32 special = (bits & 0x7c00) == 0x7c00 ? 0x7f800000u : 0u;
  return bits_float(finite | special | static_cast<u32>(bits & 0x8000) << 16);
}

// f16 represents every value of both 8-bit formats.
inline u16 e5m2_bits_to_f16_bits(u8 bits) {
  if ((bits & 0x7f) > 0x7c) return 0x7fff;
  return static_cast<u16>(bits << 8);
}

inline float e4m3_bits_to_f32(u8 bits) {
  if ((bits & 0x7f) == 0x7f) return bits_float(kCanonicalNan);
  return bits_float(static_cast<u32>(bits & 0x80) << 24 |
                    float_bits(bits_float(static_cast<u32>(bits & 0x7f) << 20) * 0x1p120f));
}

inline u16 e4m3_bits_to_f16_bits(u8 bits) {
  if ((bits & 0x7f) == 0x7f) return 0x7fff;
  return f32_to_f16_bits(e4m3_bits_to_f32(bits));
}

// What cvt.f32.f16 gives: NaN is canonical.
inline float f16_bits_to_f32_canonical(u16 bits) {
  return (bits & 0x7fff) > 0x7c00 ? bits_float(kCanonicalNan) : f16_bits_to_f32(bits);
}

}  // namespace cki::sim
