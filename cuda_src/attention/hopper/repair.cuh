// Rows whose output is not finite, computed anew without tensor cores.
//
// A key that a row does not see has weight 0, but 0 times NaN is NaN: what lies behind hidden keys (padding, unused cache
// slots, the future) would reach every row that shares a tile with it. Searching the tiles for such values would cost reads
// of shared memory in the main loop. Here the result shows them: an output that is not finite though its row's sum of
// exponentials is. Such a row is computed again by its warp, key by key, over the keys that it sees; a value that is not
// finite and that it does see is then in the result, as it must be. Slow, and only where such values are met.
//
// Its weights are relative to sums of its own logits, by two passes over its keys. Those of the tensor core are sums in
// another order, whose rounding grows with the logits: weighed by their sum of exponentials, weights would not add up to 1.
#pragma once

#include "attention/logits.cuh"
#include "attention/paged_tile.cuh"
#include "common/convert_element.cuh"
#include "common/online_softmax.cuh"
#include "common/reduce.cuh"
#include "common/types.cuh"
#include "ptx/math.cuh"
#include "ptx/wgmma.cuh"

namespace cki::attention {

// Whether all of this lane's accumulators of row r (0 or 1) are finite: x * 0 is 0 for those only.
template <int kCount>
__device__ __forceinline__ bool is_finite_row(const float (&output)[kCount], int r) {
  float zero = 0.0f;
#pragma unroll
  for (int i = 0; i < kCount; i += 4) zero = fmaf(output[i + 2 * r], 0.0f, fmaf(output[i + 2 * r + 1], 0.0f, zero));
  return zero == 0.0f;
}

// Calls repair(r, lane) for each row of which a lane is bad: to_repair[r] is a mask of lanes, four to a row.
template <class Repair>
__device__ __forceinline__ void for_each_bad_row(const u32 (&to_repair)[2], const Repair& repair) {
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    __syncwarp();  // behind the stores of other lanes to the same rows
    for (u32 bad = to_repair[r]; bad != 0;) {
      const int lane = __ffs(static_cast<int>(bad)) - 1;
      bad &= ~(0xfu << lane / 4 * 4);
      repair(r, lane);
    }
  }
}

// Where the row of a key lies, by its number: one behind the other, or in a cache of blocks.
template <class Element>
struct StridedRows {
  static constexpr bool kMayMiss = false;
  const Element* first;
  i64 stride;

  __device__ __forceinline__ const Element* operator()(int key) const { return first + key * stride; }
};

template <class Element, class TableIndex>
struct PagedRows {
  static constexpr bool kMayMiss = true;
  const Element* first;
  i64 block_stride;
  i64 slot_stride;
  BlockRow<TableIndex> blocks;

  // Null where zeros stand for the key.
  __device__ __forceinline__ const Element* operator()(int key) const {
    const KeyPlace place = blocks.find(key);
    return place.block < 0 ? nullptr : first + place.block * block_stride + place.slot * slot_stride;
  }
};

// Where one row's operands are, and its result.
template <class Element, class KeyRows, class Result = Element>
struct RowOperands {
  const Element* query;
  KeyRows keys;
  KeyRows values;
  Result* out;
  i64 out_dim;
};

// By a whole warp. sink: the logit of the row's attention sink, -inf without one. fate: fate.drops(key), and fate.factor()
// for the weights of the others. kColumns: at least value_dim, a multiple of 16.
template <class Features, int kColumns, class Element, class KeyRows, class Result, class Band, class BiasElement,
          class Fate>
__device__ __forceinline__ void compute_row(const RowOperands<Element, KeyRows, Result>& at, int head_dim, int value_dim,
                                            const QueryRow<BiasElement>& row, const Band& band, const LogitRules& rules,
                                            float sink, const Fate& fate) {
  constexpr float kLog2e = 1.44269504088896340736f;
  constexpr int kLaneColumns = (kColumns + 31) / 32;
  // An opaque copy: else the compiler computes what depends on the lane before the loop over all work, and keeps it in
  // registers through the main loop, which has none to spare.
  u32 opaque[1] = {threadIdx.x % 32};
  ptx::wgmma_fence_registers(opaque);
  const int lane = static_cast<int>(opaque[0]);
  float sums[kLaneColumns] = {};
  SoftmaxRow softmax;
  softmax.take_logit(sink);
  // The sum of the weights, then the values. Not unrolled: machine code that few rows ever need.
#pragma unroll 1
  for (int pass = 0; pass < 2; ++pass) {
    const float normalizer = softmax.normalizer() * fate.factor();
    for (int key = band.begin(row.query); key < band.end(row.query); ++key) {
      if constexpr (Features::kBias || Features::kMask) {
        // The same in all lanes; the shuffle tells the compiler, which else prepares all that follows for a split warp.
        if (__shfl_sync(kFullWarp, is_visible<Features>(key, row, rules), 0) == 0) continue;
      }
      if constexpr (Fate::kMayDrop) {
        if (pass == 1 && __shfl_sync(kFullWarp, fate.drops(key), 0) != 0) continue;
      }
      const Element* key_row = at.keys(key);
      const int known_dims = KeyRows::kMayMiss && key_row == nullptr ? 0 : head_dim;
      float score = 0.0f;
      for (int d = lane; d < known_dims; d += 32) {
        score = fmaf(to_float(at.query[d]), to_float(key_row[d]), score);
      }
      score = warp_sum(score);
      float logit = score * rules.scale;
      if constexpr (Features::kSoftcap) logit = soft_capped(score, rules);
      if constexpr (Features::kAlibi) logit -= row.slope * fabsf(static_cast<float>(row.query + band.shift - key));
      if constexpr (Features::kBias) logit += to_float(row.bias[key * rules.bias_stride]);
      if (pass == 0) {
        softmax.take_logit(logit);
        continue;
      }
      if (KeyRows::kMayMiss && key_row == nullptr) continue;  // its value is zero
      const float weight = ptx::ex2_approx((logit - softmax.reference) * kLog2e) * normalizer;
      const Element* value_row = at.values(key);
#pragma unroll
      for (int i = 0; i < kLaneColumns; ++i) {
        const int column = lane + 32 * i;
        if (column >= value_dim) continue;
        const float value = to_float(value_row[column]);
        // A weight too small for fp32 must not turn an infinity into NaN.
        sums[i] = fabsf(value) < positive_infinity() ? fmaf(weight, value, sums[i]) : sums[i] + value;
      }
    }
  }
#pragma unroll
  for (int i = 0; i < kLaneColumns; ++i) {
    const int column = lane + 32 * i;
    if (column < value_dim) at.out[column * at.out_dim] = from_float<Result>(sums[i]);
  }
}

}  // namespace cki::attention
