// What a lane of gemm/skinny/decode.cu loads of a weight, as operands of products, and how x must lie for them.
//
// A lane loads 16 bytes of K of each of its two rows, twice a step: kChunk elements at lane % 4 * kChunk, and the same
// 4 * kChunk later. A product of 16 sums over K in any order, so those elements stand for the ones that the tensor core's
// layout would give the lane, in w and x alike.
//
// e4m3 (W8A16). A code's bits, moved to where the 16-bit type has sign, exponent and mantissa, are the number over a power
// of two, subnormal or not: four codes become two registers by 7 integer instructions, where conversions to f16 and on to
// bf16 take 16. A code has no room for infinities; those of NaN become 480 (weights have none). The power goes into x and
// the sums:
//     f16    w / 2^8
//     bf16   w / 2^120; x is kept times 2^60, so that products lie in the middle of fp32
// The registers hold codes 0 and 2, and 1 and 3 of a word: x is kept with the middle two of every four exchanged.
#pragma once

#include "common/convert_element.cuh"
#include "common/types.cuh"
#include "common/vec.cuh"

namespace cki::gemm {

template <class T>
struct IsBf16 {
  static constexpr bool kValue = false;
};
template <>
struct IsBf16<bf16> {
  static constexpr bool kValue = true;
};

template <class Element, class Code>
struct DecodeOperand {  // Code is Element
  static constexpr int kChunk = 8;
  static constexpr int kProducts = 2;    // of 16, of a chunk
  static constexpr float kFactor = 1.0f;  // by which sums are to be multiplied

  // Product i of a chunk: the two registers of a row.
  static __device__ __forceinline__ void registers(const uint4& words, int i, u32 (&row)[2]) {
    row[0] = i == 0 ? words.x : words.z;
    row[1] = i == 0 ? words.y : words.w;
  }
  static __device__ __forceinline__ void arrange(Vector<Element, 8>&) {}
};

template <class Element>
struct DecodeOperand<Element, e4m3> {
  static constexpr int kChunk = 16;
  static constexpr int kProducts = 4;
  static constexpr bool kIsBf16 = IsBf16<Element>::kValue;
  static constexpr int kShift = kIsBf16 ? 4 : 7;  // of a code's exponent and mantissa, from the low byte of a half
  static constexpr float kOfX = kIsBf16 ? 0x1p60f : 1.0f;
  static constexpr float kFactor = kIsBf16 ? 0x1p60f : 0x1p8f;

  static __device__ __forceinline__ void registers(const uint4& words, int i, u32 (&row)[2]) {
    const u32 word = i == 0 ? words.x : i == 1 ? words.y : i == 2 ? words.z : words.w;
    constexpr u32 kMagnitude = (0x7fu << kShift) * 0x10001u;
    row[0] = (word << kShift & kMagnitude) | (word << 8 & 0x80008000u);
    row[1] = (word >> (8 - kShift) & kMagnitude) | (word & 0x80008000u);
  }

  // Eight elements of x as the products want them.
  static __device__ __forceinline__ void arrange(Vector<Element, 8>& vector) {
    if constexpr (kOfX != 1.0f) {
      float values[8];
      vector.to_floats(values);
#pragma unroll
      for (int i = 0; i < 8; ++i) values[i] *= kOfX;  // exact
      vector.from_floats(values);
    }
#pragma unroll
    for (int i = 0; i < 4; i += 2) {
      const u32 low = vector.words[i], high = vector.words[i + 1];
      vector.words[i] = __byte_perm(low, high, 0x5410);
      vector.words[i + 1] = __byte_perm(low, high, 0x7632);
    }
  }
};

// e4m3 by the conversion to f16 that sm_89 has, in the order of memory: then x is f16.
struct ConvertedCodes {
  static constexpr int kChunk = 16;
  static constexpr float kFactor = 1.0f;

  static __device__ __forceinline__ void registers(const uint4& words, int i, u32 (&row)[2]) {
    const u32 word = i == 0 ? words.x : i == 1 ? words.y : i == 2 ? words.z : words.w;
    row[0] = e4m3x2_as_f16x2(static_cast<u16>(word));
    row[1] = e4m3x2_as_f16x2(static_cast<u16>(word >> 16));
  }
  static __device__ __forceinline__ void arrange(Vector<f16, 8>&) {}
};

}  // namespace cki::gemm
