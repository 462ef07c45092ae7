// Online softmax of one tile of keys on wgmma accumulators: a lane holds parts of two rows.
//
// The same arithmetic as common/online_softmax.cuh, whose SoftmaxRow keeps reference and sum of a row, in pieces that a
// kernel places around its waits: take_tile for a row's first tile, LazySoftmax for those that follow. Element i of
// `scores` belongs to row r = i / 2 % 2.
#pragma once

#include "common/online_softmax.cuh"
#include "common/reduce.cuh"
#include "ptx/math.cuh"
#include "ptx/wgmma.cuh"

namespace cki::attention {

// The largest of this lane's scores of row r.
template <int kCount>
__device__ __forceinline__ float largest_score(const float (&scores)[kCount], int r) {
  float even = scores[2 * r], odd = scores[2 * r + 1];  // two chains, half as long
#pragma unroll
  for (int i = 4; i < kCount; i += 4) {
    even = fmaxf(even, scores[i + 2 * r]);
    odd = fmaxf(odd, scores[i + 2 * r + 1]);
  }
  return fmaxf(even, odd);
}

// Takes row r's largest score into its reference. Returns what is to be subtracted from the scores; correction is what
// everything accumulated so far of the row is to be multiplied by. kMayHide: the row may have seen no key yet (all -inf).
template <bool kMayHide, int kCount>
__device__ __forceinline__ float take_reference(const float (&scores)[kCount], int r, SoftmaxRow& row, float& correction,
                                                float exponent_scale) {
  const float largest = warp_reduce<Max, 4>(fmaxf(row.reference, largest_score(scores, r)));
  float subtract;
  correction = row.move_reference<kMayHide>(largest, exponent_scale, subtract);
  return subtract;
}

// Row r's scores become weights, 2^(score * exponent_scale - offset), and enter its sum.
template <int kCount>
__device__ __forceinline__ void take_weights(float (&scores)[kCount], int r, SoftmaxRow& row, float correction,
                                             float offset, float exponent_scale) {
  float even, odd;
#pragma unroll
  for (int i = 2 * r; i < kCount; i += 4) {
    scores[i] = ptx::ex2_approx(fmaf(scores[i], exponent_scale, -offset));
    scores[i + 1] = ptx::ex2_approx(fmaf(scores[i + 1], exponent_scale, -offset));
    even = i == 2 * r ? scores[i] : even + scores[i];
    odd = i == 2 * r ? scores[i + 1] : odd + scores[i + 1];
  }
  row.sum = fmaf(row.sum, correction, even + odd);
}

// Row r's scores relative to the reference, exactly 0 for the largest; the offset of take_weights is 0 then.
template <int kCount>
__device__ __forceinline__ void subtract_reference(float (&scores)[kCount], int r, float subtract) {
#pragma unroll
  for (int i = 2 * r; i < kCount; i += 4) {
    scores[i] -= subtract;
    scores[i + 1] -= subtract;
  }
}

// How large weights are: 2^kExponent at a row's reference, which follows when a score exceeds it by more than 2^kHeadroom.
// kSummed: whether their sums are needed.
struct PlainWeights {
  static constexpr float kHeadroom = 8.0f;
  static constexpr float kExponent = 0.0f;
  static constexpr bool kSummed = true;
};

// x * factor + added, and added - x, without an instruction more where `added`, a compile-time choice, is 0.
__device__ __forceinline__ float times_plus(float x, float factor, float added) {
  return added == 0.0f ? x * factor : fmaf(x, factor, added);
}
__device__ __forceinline__ float added_minus(float added, float x) { return added == 0.0f ? -x : added - x; }

// Both rows at a time: their exponentials interleave. Rows of a large reference are subtracted before they are scaled, by
// one branch a tile, which also parts the search for the largest from the exponentials (attention.cu says why that helps).
// kExact: always subtract first.
template <bool kMayHide, bool kExact, class Weights = PlainWeights, int kCount>
__device__ __forceinline__ void take_tile(float (&scores)[kCount], SoftmaxRow (&rows)[2], float (&correction)[2],
                                          float exponent_scale) {
  float subtract[2], offset[2];
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    subtract[r] = take_reference<kMayHide>(scores, r, rows[r], correction[r], exponent_scale);
    offset[r] = times_plus(subtract[r], exponent_scale, -Weights::kExponent);
  }
  const bool is_short = fabsf(offset[0]) < SoftmaxRow::kShortOffset && fabsf(offset[1]) < SoftmaxRow::kShortOffset;
  if (kExact || !is_short) {
#pragma unroll
    for (int r = 0; r < 2; ++r) subtract_reference(scores, r, subtract[r]);
    offset[0] = offset[1] = 0.0f - Weights::kExponent;
  }
#pragma unroll
  for (int r = 0; r < 2; ++r) take_weights(scores, r, rows[r], correction[r], offset[r], exponent_scale);
}

// Both rows of a lane, lazily (FlashAttention-4's rule): references stay where they are, and nothing is rescaled, unless a
// score exceeds its row's reference by more than 2^kHeadroom. What a row does depends on its own scores alone, though its
// warp does it together. Rows that saw no key yet and rows with a large reference take the slow way in each tile, the
// latter to be subtracted before they are scaled.
//
// The first kAhead weights are computed by the references as they are, beside the search for the largest scores, which
// would leave the special function unit idle; they are computed again when a reference moves.
template <bool kMayHide, bool kExact, int kAheadCount, int kCount, class Weights = PlainWeights>
struct LazySoftmax {
  static constexpr bool kReadsKeysAgain = false;
  static constexpr int kAhead = kAheadCount;

  float (&scores)[kCount];
  SoftmaxRow (&rows)[2];
  const float exponent_scale;
  float offset[2], subtract[2];
  float added[4];  // sums of new weights, two chains a row
  float ahead[kAhead > 0 ? kAhead : 1];

  __device__ __forceinline__ LazySoftmax(float (&scores)[kCount], SoftmaxRow (&rows)[2], float exponent_scale)
      : scores(scores), rows(rows), exponent_scale(exponent_scale) {}

  // Weights of scores [0, kAhead), after references have moved where they must. rescale(correction) is called then.
  template <class Rescale>
  __device__ __forceinline__ void begin(Rescale rescale) {
    float largest[2];
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      subtract[r] = rows[r].reference;
      offset[r] = subtract[r] * exponent_scale;
    }
    take_ahead();
#pragma unroll
    for (int r = 0; r < 2; ++r) largest[r] = largest_score(scores, r);
    if (__any_sync(kFullWarp, rises(0, largest[0]) | rises(1, largest[1]))) {
      float correction[2];
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        const float row_largest = warp_reduce<Max, 4>(largest[r]);
        const float updated = rises(r, row_largest) ? fmaxf(rows[r].reference, row_largest) : rows[r].reference;
        correction[r] = rows[r].template move_reference<kMayHide>(updated, exponent_scale, subtract[r]);
        rows[r].sum *= correction[r];
        offset[r] = subtract[r] * exponent_scale;
        if (!kExact && is_large(r)) {
          subtract_reference(scores, r, subtract[r]);
          offset[r] = 0.0f;
        }
      }
      rescale(correction);
      take_ahead();
    }
#pragma unroll
    for (int i = 0; i < kAhead; ++i) add(i, ahead[i]);
  }

  // Weights of scores [kBegin, kEnd), in order from kAhead on.
  template <int kBegin, int kEnd>
  __device__ __forceinline__ void take() {
#pragma unroll
    for (int i = kBegin; i < kEnd; ++i) {
      scores[i] = weight(i);
      add(i, scores[i]);
    }
    // ptxas would sink these additions behind the next branch, where they cost time.
    if constexpr (Weights::kSummed) ptx::wgmma_fence_registers(added);
  }

  // In a branch among them: release() says that queries are not needed any more.
  template <int, class Release>
  __device__ __forceinline__ void part(Release release) const {
    release();
  }

  // Weight i of those that have been taken. The first stay apart from the scores: accumulators that change their place
  // between two products would have to be moved back, for which ptxas ends the products one by one.
  __device__ __forceinline__ float taken(int i) const { return i < kAhead ? ahead[i < kAhead ? i : 0] : scores[i]; }

  __device__ __forceinline__ void finish() {
#pragma unroll
    for (int r = 0; r < 2; ++r) rows[r].sum += added[2 * r] + added[2 * r + 1];
  }

 private:
  __device__ __forceinline__ bool is_large(int r) const { return !(fabsf(offset[r]) < SoftmaxRow::kShortOffset); }

  // Also when the reference is -inf or is_large.
  __device__ __forceinline__ bool rises(int r, float largest) const {
    const float above = kExact ? (largest - subtract[r]) * exponent_scale : fmaf(largest, exponent_scale, -offset[r]);
    return !(above <= Weights::kHeadroom) | (!kExact && is_large(r));
  }
  __device__ __forceinline__ float weight(int i) const {
    const int r = i / 2 % 2;
    return ptx::ex2_approx(kExact ? times_plus(scores[i] - subtract[r], exponent_scale, Weights::kExponent)
                                  : fmaf(scores[i], exponent_scale, added_minus(Weights::kExponent, offset[r])));
  }
  __device__ __forceinline__ void take_ahead() {
#pragma unroll
    for (int i = 0; i < kAhead; ++i) ahead[i] = weight(i);
  }
  __device__ __forceinline__ void add(int i, float weight) {
    const int chain = i / 2 % 2 * 2 + i % 2;
    added[chain] = i < 4 ? weight : added[chain] + weight;
  }
};

// Accumulators of two rows, each times its own factor.
template <int kCount>
__device__ __forceinline__ void scale_rows(float (&accumulators)[kCount], const float (&factor)[2]) {
#pragma unroll
  for (int i = 0; i < kCount; ++i) accumulators[i] *= factor[i / 2 % 2];
}

}  // namespace cki::attention
