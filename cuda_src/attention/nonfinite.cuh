// Infinities and NaNs in values: 0 * NaN is NaN, so a weight of zero does not hide a value that is not finite.
//
// Where a key is hidden from some query, values may hold anything behind it (padding, unused cache slots). Tiles in which
// keys are hidden are therefore searched for such values, each thread searching what it copied; only when one is found
// is the product taken in parts: finite values by weight, and for the others the count of queries' visible keys that hold
// +inf, -inf or NaN, as products of ones and zeros. A visible infinity gives an infinity and a visible NaN a NaN, as in the
// plain product; hidden ones give nothing.
#pragma once

#include "attention/tile.cuh"
#include "common/types.cuh"

namespace cki::attention {

template <class Element>
struct FloatBits;

template <>
struct FloatBits<float> {
  static constexpr u32 kExponent = 0x7f800000u, kMantissa = 0x007fffffu, kSign = 0x80000000u, kOne = 0x3f800000u;
};
template <>
struct FloatBits<f16> {
  static constexpr u32 kExponent = 0x7c00u, kMantissa = 0x03ffu, kSign = 0x8000u, kOne = 0x3c00u;
};
template <>
struct FloatBits<bf16> {
  static constexpr u32 kExponent = 0x7f80u, kMantissa = 0x007fu, kSign = 0x8000u, kOne = 0x3f80u;
};

template <class Element>
__device__ __forceinline__ bool word_holds_nonfinite(u32 word) {
  constexpr u32 kExponent = FloatBits<Element>::kExponent;
  bool found = (word & kExponent) == kExponent;
  if constexpr (sizeof(Element) == 2) found |= (word >> 16 & kExponent) == kExponent;
  return found;
}

// Whether a piece that this thread copied holds a value that is not finite. The copies must be complete.
template <class T, int kCopyBytes, int kThreads>
__device__ __forceinline__ bool own_pieces_hold_nonfinite(const unsigned char* tile) {
  using Element = typename T::Element;
  bool found = false;
  for_each_own_piece<T, kCopyBytes, kThreads>([&](int row, int piece) {
    const unsigned char* p = tile + row * T::kPitch + piece * kCopyBytes;
    if constexpr (kCopyBytes == 16) {
      const uint4 words = *reinterpret_cast<const uint4*>(p);
      found |= word_holds_nonfinite<Element>(words.x) || word_holds_nonfinite<Element>(words.y) ||
               word_holds_nonfinite<Element>(words.z) || word_holds_nonfinite<Element>(words.w);
    } else if constexpr (kCopyBytes >= 4) {
#pragma unroll
      for (int i = 0; i < kCopyBytes; i += 4) found |= word_holds_nonfinite<Element>(*reinterpret_cast<const u32*>(p + i));
    } else {
      found |= word_holds_nonfinite<Element>(*reinterpret_cast<const u16*>(p));
    }
  });
  return found;
}

// A word of one or two elements in three parts: the finite elements, and ones where an element is +inf or NaN, or -inf or
// NaN.
struct ValueParts {
  u32 finite = 0, positive = 0, negative = 0;
};

template <class Element>
__device__ __forceinline__ ValueParts split_nonfinite(u32 word) {
  using Bits = FloatBits<Element>;
  constexpr int kPerWord = 4 / static_cast<int>(sizeof(Element));
  ValueParts parts;
#pragma unroll
  for (int i = 0; i < kPerWord; ++i) {
    const u32 value = kPerWord == 1 ? word : word >> (16 * i) & 0xffffu;
    const bool finite = (value & Bits::kExponent) != Bits::kExponent;
    const bool nan = !finite && (value & Bits::kMantissa) != 0;
    const bool negative = (value & Bits::kSign) != 0;
    parts.finite |= (finite ? value : 0u) << (16 * i);
    parts.positive |= (!finite && (nan || !negative) ? Bits::kOne : 0u) << (16 * i);
    parts.negative |= (!finite && (nan || negative) ? Bits::kOne : 0u) << (16 * i);
  }
  return parts;
}

}  // namespace cki::attention
