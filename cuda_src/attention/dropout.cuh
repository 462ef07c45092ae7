// Dropout of attention weights: which keys a query keeps is a pure function of seed, offset, batch, head, query and key.
//
// Philox 4x32-10 with key `seed` and the counter
//   (key / 16 * 4 + key % 8 / 2,  query,  batch * heads + head,  offset mod 2^32)
// gives four words, for the keys k, k + 1, k + 8, k + 9 (k even, k % 16 < 8): those that one lane holds of a row in two
// neighbouring accumulator tiles, so that no word is thrown away, whatever the tile of keys. A key is dropped when its word
// is below threshold = p * 2^32.
//
// Seed and offset lie in device memory: a captured graph that adds to the offset drops other keys at each replay.
// The sum of the weights and the LSE are those without dropout; what is kept is multiplied by 1 / (1 - p) at the end.
#pragma once

#include "common/philox.cuh"
#include "common/types.cuh"

namespace cki::attention {

struct Dropout {
  u64 seed;
  u32 offset;
  u32 threshold;

  // The words of the keys k, k + 1, k + 8, k + 9 with k = block16 * 16 + pair * 2. row: batch * heads + head.
  __device__ __forceinline__ PhiloxWords words(int block16, int pair, int query, u32 row) const {
    const u64 low = static_cast<u32>(block16 * 4 + pair) | static_cast<u64>(static_cast<u32>(query)) << 32;
    return philox_4x32_10(low, row | static_cast<u64>(offset) << 32, seed);
  }

  __device__ __forceinline__ bool drops(int key, int query, u32 row) const {
    const PhiloxWords all = words(key / 16, key % 8 / 2, query, row);
    const u32 even = key % 16 < 8 ? all.word[0] : all.word[2];
    const u32 odd = key % 16 < 8 ? all.word[1] : all.word[3];
    return (key % 2 == 0 ? even : odd) < threshold;
  }

  // Zeroes what is dropped of elements first and first + 1 of each tile of a row's weights, keys [first_key, +8 kTiles);
  // first_key and 8 kTiles are multiples of 16.
  template <int kTiles>
  __device__ __forceinline__ void apply(float (&weights)[kTiles][4], int first, int first_key, int query, u32 row) const {
    static_assert(kTiles % 2 == 0, "Philox gives words for two tiles at once");
#pragma unroll
    for (int n = 0; n < kTiles; n += 2) {
      const PhiloxWords all = words(first_key / 16 + n / 2, static_cast<int>(threadIdx.x) % 4, query, row);
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        if (all.word[i] < threshold) weights[n + i / 2][first + i % 2] = 0.0f;
      }
    }
  }
};

}  // namespace cki::attention
