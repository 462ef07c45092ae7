// Dropout of attention weights in wgmma's accumulators, as attention/dropout.cuh defines it.
//
// The words of Philox are drawn in a loop that is not unrolled, four calls at a time for their latency, and end as a bit for
// each weight, two registers for a lane's two rows: unrolled, a tile's 32 calls would be 1700 instructions in each loop over
// keys. They do not depend on the scores, so they are drawn while the products run.
#pragma once

#include "attention/dropout.cuh"
#include "attention/logits.cuh"
#include "common/types.cuh"

namespace cki::attention {

// Which of a lane's weights of a tile are dropped: bit 4 n + i of row r is for word i of keys [16 n, +16). Without kDropout
// none is, and nothing is compiled.
template <int kBlockKeys>
struct DroppedWeights {
  static constexpr int kGroups = kBlockKeys / 16;
  u32 rows[2] = {0, 0};

  // tile: of kBlockKeys keys.
  template <class BiasElement>
  __device__ __forceinline__ DroppedWeights(const Dropout& dropout, int tile, const QueryRow<BiasElement> (&query)[2]) {
    if constexpr (kDropout) {
      static_assert(kGroups <= 8, "a row's bits are one word");
      const int pair = static_cast<int>(threadIdx.x) % 4;
#pragma unroll 1
      for (int first = 0; first < kGroups; first += 2) {
#pragma unroll
        for (int n = 0; n < 2; ++n) {
          if (kGroups % 2 != 0 && first + n >= kGroups) break;
#pragma unroll
          for (int r = 0; r < 2; ++r) {
            const PhiloxWords all =
                dropout.words(tile * kGroups + first + n, pair, query[r].query, query[r].dropout_row);
            u32 bits = 0;
#pragma unroll
            for (int i = 0; i < 4; ++i) bits |= all.word[i] < dropout.threshold ? 1u << i : 0u;
            rows[r] |= bits << 4 * (first + n);
          }
        }
      }
    }
  }

  // Weight i of the lane's, or 0.
  __device__ __forceinline__ float kept(int i, float weight) const {
    const int bit = i / 8 * 4 + i / 4 % 2 * 2 + i % 2;
    return kDropout && (rows[i / 2 % 2] & 1u << bit) != 0 ? 0.0f : weight;
  }

  template <int kCount>
  __device__ __forceinline__ void apply(float (&weights)[kCount]) const {
#pragma unroll
    for (int i = 0; i < kCount; ++i) weights[i] = kept(i, weights[i]);
  }
};

// What becomes of a row's weights when it is repaired (repair.cuh).
struct DroppedKeys {
  static constexpr bool kMayDrop = kDropout;
  const Dropout& dropout;
  int query;
  u32 row;
  float kept_factor;

  __device__ __forceinline__ bool drops(int key) const { return kDropout && dropout.drops(key, query, row); }
  __device__ __forceinline__ float factor() const { return kDropout || kDescaled ? kept_factor : 1.0f; }
};

}  // namespace cki::attention
