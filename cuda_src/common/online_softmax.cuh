// Softmax over keys that arrive tile by tile, for the rows of mma accumulators.
//
// Logits are in units of log2, so that every exponential is one ex2: logit = score * score_scale, and the multiplication is
// part of the FFMA that subtracts the reference. A row keeps
//   reference  the largest logit so far, rounded; all exponentials of the row are relative to it
//   sum        of those exponentials, over the columns that this lane holds (the four lanes of a row are added at the end)
// The reference's rounding does not matter: weights, sum and the output accumulated so far are all relative to the same
// number, and it cancels in output / sum. Weights enter the sum in fp32, before they are rounded for the tensor core.
// (Milakov and Gimelshein, arXiv 1805.02867; Dao, arXiv 2307.08691.)
#pragma once

#include "common/reduce.cuh"
#include "common/types.cuh"
#include "ptx/math.cuh"

namespace cki {

__device__ __forceinline__ float negative_infinity() { return __uint_as_float(0xff800000u); }

struct SoftmaxRow {
  float reference = negative_infinity();
  float sum = 0.0f;

  // Takes in the row's part of a tile: `scores` is [tiles][4] of which this row owns elements first and first + 1.
  // Scores become weights; the return value is the factor for everything accumulated under the old reference.
  // kMayHide: a whole row may be hidden (all scores -inf); then nothing must be subtracted from -inf.
  template <bool kMayHide, int kTiles>
  __device__ __forceinline__ float take(float (&scores)[kTiles][4], int first, float score_scale) {
    float largest = scores[0][first];
#pragma unroll
    for (int n = 0; n < kTiles; ++n) largest = fmaxf(largest, fmaxf(scores[n][first], scores[n][first + 1]));
    largest = warp_reduce<Max, 4>(largest);
    const float updated = fmaxf(reference, largest * score_scale);
    float subtract = updated;
    if constexpr (kMayHide) subtract = updated == negative_infinity() ? 0.0f : updated;
    const float correction = ptx::ex2_approx(reference - subtract);
    float added = 0.0f;
#pragma unroll
    for (int n = 0; n < kTiles; ++n) {
#pragma unroll
      for (int e = 0; e < 2; ++e) {
        float& score = scores[n][first + e];
        score = ptx::ex2_approx(fmaf(score, score_scale, -subtract));
        added += score;
      }
    }
    sum = sum * correction + added;
    reference = updated;
    return correction;
  }

  // Adds the four lanes' sums. After it all lanes of the row agree.
  __device__ __forceinline__ void gather() { sum = warp_reduce<Sum, 4>(sum); }

  // One more logit without a value (an attention sink), in log2 units, after gather(). Returns the correction factor.
  __device__ __forceinline__ float take_sink(float logit) {
    const float updated = fmaxf(reference, logit);
    const float subtract = updated == negative_infinity() ? 0.0f : updated;
    const float correction = ptx::ex2_approx(reference - subtract);
    sum = sum * correction + ptx::ex2_approx(logit - subtract);
    reference = updated;
    return correction;
  }

  // What turns accumulated values into their mean; 0 for a row that saw no key.
  __device__ __forceinline__ float normalizer() const { return sum == 0.0f ? 0.0f : 1.0f / sum; }

  // Natural logarithm of the sum of exponentials of the natural logits; -inf for a row that saw no key.
  __device__ __forceinline__ float log_sum_exp() const {
    constexpr float kLn2 = 0.693147180559945309f;
    return sum == 0.0f ? negative_infinity() : fmaf(reference, kLn2, logf(sum));
  }
};

}  // namespace cki
