// Infinities and NaNs in values: 0 * NaN is NaN, so a weight of zero does not hide a value that is not finite.
//
// Where a key is hidden from some query, anything may lie behind it (padding, unused cache slots). So in tiles in which a key
// is hidden from some row (fp32: in all tiles, because an infinity does not survive the split for tf32), each thread searches the pieces of V that it copied itself, before the barrier that publishes
// them, and replaces what is not finite by zero. Rows that do not see such a value are right then. Rows that do see it are
// repaired after the output is written, by plain loops over the tiles in question: slow, but only for blocks that met
// such values, and short where all of them are hidden.
#pragma once

#include "attention/logits.cuh"
#include "attention/tile.cuh"
#include "common/convert_element.cuh"
#include "common/types.cuh"

namespace cki::attention {

// The bits that are all ones in an infinity or a NaN.
template <class Element>
constexpr u32 kExponentBits = 0;
template <>
constexpr u32 kExponentBits<float> = 0x7f800000u;
template <>
constexpr u32 kExponentBits<f16> = 0x7c00u;
template <>
constexpr u32 kExponentBits<bf16> = 0x7f80u;

// Zeroes the elements of a word that are not finite; true if there were any.
template <class Element>
__device__ __forceinline__ bool drop_nonfinite(u32& word) {
  constexpr u32 kLow = kExponentBits<Element>;
  bool found = (word & kLow) == kLow;
  if constexpr (sizeof(Element) == 4) {
    if (found) word = 0;
  } else {
    constexpr u32 kHigh = kLow << 16;
    const bool found_high = (word & kHigh) == kHigh;
    if (found) word &= 0xffff0000u;
    if (found_high) word &= 0x0000ffffu;
    found |= found_high;
  }
  return found;
}

// Zeroes what is not finite in the pieces that this thread copied, which must have arrived; true if there was any.
template <class T, int kCopyBytes, int kThreads>
__device__ __forceinline__ bool drop_own_nonfinite(unsigned char* tile) {
  using Element = typename T::Element;
  bool any = false;
  PieceShare<T, kCopyBytes, kThreads>::for_each_own([&](int row, int piece) {
    unsigned char* p = tile + row * T::kPitch + piece * kCopyBytes;
    bool found = false;
    if constexpr (kCopyBytes == 16) {
      uint4 words = *reinterpret_cast<const uint4*>(p);
      found |= drop_nonfinite<Element>(words.x);
      found |= drop_nonfinite<Element>(words.y);
      found |= drop_nonfinite<Element>(words.z);
      found |= drop_nonfinite<Element>(words.w);
      if (found) *reinterpret_cast<uint4*>(p) = words;
    } else if constexpr (kCopyBytes >= 4) {
#pragma unroll
      for (int i = 0; i < kCopyBytes; i += 4) {
        u32& word = *reinterpret_cast<u32*>(p + i);
        u32 kept = word;
        if (drop_nonfinite<Element>(kept)) {
          word = kept;
          found = true;
        }
      }
    } else {
      u16& half = *reinterpret_cast<u16*>(p);
      u32 kept = half;
      found = drop_nonfinite<Element>(kept);
      if (found) half = static_cast<u16>(kept);
    }
    any |= found;
  });
  return any;
}

// Adds to one row of the output the values of keys [first_key, end_key) that the row sees and that are not finite.
// value_row(key): the key's value; kMayMiss: or null, where zeros stand for it. is_kept(key): whether dropout left it.
template <class Features, bool kMayMiss, class Result, class ValueRow, class Band, class BiasElement, class IsKept>
__device__ void repair_row(Result* out, i64 out_dim, ValueRow value_row, i64 value_dim_stride, int value_dim,
                           int first_key, int end_key, const QueryRow<BiasElement>& row, const Band& band,
                           const LogitRules& rules, IsKept is_kept) {
  for (int key = max(first_key, band.begin(row.query)); key < min(end_key, band.end(row.query)); ++key) {
    if (!is_visible<Features>(key, row, rules) || !is_kept(key)) continue;
    const auto* value = value_row(key);
    if (kMayMiss && value == nullptr) continue;
    for (int column = 0; column < value_dim; ++column) {
      const float x = to_float(value[column * value_dim_stride]);
      if (fabsf(x) < positive_infinity()) continue;
      Result& sum = out[column * out_dim];
      sum = from_float<Result>(to_float(sum) + x);
    }
  }
}

}  // namespace cki::attention
