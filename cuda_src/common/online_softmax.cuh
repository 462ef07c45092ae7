// Softmax over keys that arrive tile by tile, for the rows of mma accumulators.
//
// A row keeps a reference, the largest logit so far, and the sum of all exponentials relative to it, over the columns that
// this lane holds (the four lanes of a row are added at the end). When the reference moves, everything accumulated so far is
// multiplied by one correction. Weights enter the sum in fp32, before they are rounded for the tensor core.
// (Milakov and Gimelshein, arXiv 1805.02867; Dao, arXiv 2307.08691.)
//
// Two forms of the logits:
//   kNatural = false  scores are raw products and score_scale = scale * log2(e) > 0: weight = 2^(score * score_scale -
//                     reference), one FFMA and one ex2. The reference is in log2 units. It is rounded, which does no harm:
//                     weights, sum and output are all relative to the same number, and it cancels in output / sum.
//   kNatural = true   scores are finished logits in natural units: weight = 2^((score - reference) * log2(e)). One more
//                     instruction, for logits whose product with log2(e) could overflow (a bias of the lowest fp32) or
//                     whose order a negative scale would turn round.
#pragma once

#include "common/reduce.cuh"
#include "common/types.cuh"
#include "ptx/math.cuh"

namespace cki {

__device__ __forceinline__ float positive_infinity() { return __uint_as_float(0x7f800000u); }
__device__ __forceinline__ float negative_infinity() { return __uint_as_float(0xff800000u); }

template <bool kNatural>
struct SoftmaxRow {
  static constexpr float kLog2e = 1.44269504088896340736f;
  static constexpr float kLn2 = 0.693147180559945309417f;

  float reference = negative_infinity();
  float sum = 0.0f;

  // 2^(what `logit` exceeds `subtract` by), both in the reference's units.
  static __device__ __forceinline__ float weight(float logit, float subtract) {
    return ptx::ex2_approx(kNatural ? (logit - subtract) * kLog2e : logit - subtract);
  }

  // Moves the reference to `updated`; returns the correction. A row of hidden keys only has the reference -inf, from which
  // nothing may be subtracted: `subtract` is 0 then, which makes all weights 0.
  template <bool kMayHide>
  __device__ __forceinline__ float move_reference(float updated, float& subtract) {
    subtract = kMayHide && updated == negative_infinity() ? 0.0f : updated;
    const float correction = weight(reference, subtract);
    reference = updated;
    return correction;
  }

  // Takes in the row's part of a tile: `scores` is [tiles][4] of which this row owns elements first and first + 1.
  // Scores become weights; the return value is the correction of everything accumulated so far.
  // kMayHide: the row may have seen no key yet (all scores -inf).
  template <bool kMayHide, int kTiles>
  __device__ __forceinline__ float take(float (&scores)[kTiles][4], int first, float score_scale) {
    float largest = negative_infinity();
#pragma unroll
    for (int n = 0; n < kTiles; ++n) largest = fmaxf(largest, fmaxf(scores[n][first], scores[n][first + 1]));
    largest = warp_reduce<Max, 4>(largest);
    if constexpr (!kNatural) largest *= score_scale;
    float subtract;
    const float correction = move_reference<kMayHide>(fmaxf(reference, largest), subtract);
    float added = 0.0f;
#pragma unroll
    for (int n = 0; n < kTiles; ++n) {
#pragma unroll
      for (int e = 0; e < 2; ++e) {
        float& score = scores[n][first + e];
        score = kNatural ? weight(score, subtract) : ptx::ex2_approx(fmaf(score, score_scale, -subtract));
        added += score;
      }
    }
    sum = fmaf(sum, correction, added);
    return correction;
  }

  // Adds the four lanes' sums. After it all lanes of the row agree.
  __device__ __forceinline__ void gather() { sum = warp_reduce<Sum, 4>(sum); }

  // One more logit without a value (an attention sink), in natural units, after gather(). Returns the correction.
  __device__ __forceinline__ float take_sink(float logit) {
    if constexpr (!kNatural) logit *= kLog2e;
    float subtract;
    const float correction = move_reference<true>(fmaxf(reference, logit), subtract);
    sum = fmaf(sum, correction, weight(logit, subtract));
    return correction;
  }

  // What turns accumulated values into their mean; 0 for a row that saw no key.
  __device__ __forceinline__ float normalizer() const { return sum == 0.0f ? 0.0f : 1.0f / sum; }

  // Natural logarithm of the sum of the exponentials of all logits; -inf for a row that saw no key.
  __device__ __forceinline__ float log_sum_exp() const {
    return sum == 0.0f ? negative_infinity() : fmaf(reference, kNatural ? 1.0f : kLn2, logf(sum));
  }
};

}  // namespace cki
