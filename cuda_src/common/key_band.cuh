// Causal and windowed attention as a band of keys: what a query may see is one interval of key positions.
//
// Query i stands at position i + shift among the keys (shift is keys - queries when the last query is aligned with the last
// key, 0 when the first ones are). It sees key j when position - left <= j <= position + right. Causal is right = 0. Both
// ends move up with the query, so the interval of a block of queries follows from its first and its last query alone.
#pragma once

#include "common/types.cuh"

namespace cki {

// A side without a limit costs nothing: its comparison is not compiled.
template <bool kLimitLeft, bool kLimitRight>
struct KeyBand {
  int keys;
  int shift;
  int left;
  int right;

  // First visible key; may lie behind the last key.
  __device__ __forceinline__ int begin(int query) const {
    if constexpr (kLimitLeft) return max(0, query + shift - left);
    return 0;
  }

  // One past the last visible key; at least 0.
  __device__ __forceinline__ int end(int query) const {
    if constexpr (kLimitRight) return max(0, min(keys, query + shift + right + 1));
    return keys;
  }
};

}  // namespace cki
