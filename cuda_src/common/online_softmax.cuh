// Softmax over keys that arrive tile by tile, for the rows of mma accumulators.
//
// A row keeps a reference, the largest score so far, and the sum of all weights relative to it, over the columns that this
// lane holds (the four lanes of a row are added at the end). When the reference moves, everything accumulated so far is
// multiplied by one correction. Weights enter the sum in fp32, before they are rounded for the tensor core.
// (Milakov and Gimelshein, arXiv 1805.02867; Dao, arXiv 2307.08691.)
//
// weight = 2^((score - reference) * exponent_scale). exponent_scale is log2(e) for finished logits, and scale * log2(e) > 0
// for raw products. Subtracting before multiplying gives the largest weight as exactly 1 however large the scores are, and
// nothing overflows for a bias of the lowest fp32. Multiplying first, 2^(score * exponent_scale - offset) with offset =
// reference * exponent_scale rounded, saves an instruction of five; it makes all weights of the row wrong by one factor, at
// most 2^-24 * |offset|. For 16-bit weights and |offset| below kShortOffset that is far below their rounding.
#pragma once

#include "common/reduce.cuh"
#include "common/types.cuh"
#include "ptx/math.cuh"

namespace cki {

__device__ __forceinline__ float positive_infinity() { return __uint_as_float(0x7f800000u); }
__device__ __forceinline__ float negative_infinity() { return __uint_as_float(0xff800000u); }

struct SoftmaxRow {
  static constexpr float kShortOffset = 2048.0f;

  float reference = negative_infinity();
  float sum = 0.0f;

  // Moves the reference to `updated` and returns the correction. A row that has seen hidden keys only has the reference
  // -inf, from which nothing may be subtracted: `subtract` is 0 then, which makes all weights 0.
  template <bool kMayHide>
  __device__ __forceinline__ float move_reference(float updated, float exponent_scale, float& subtract) {
    subtract = kMayHide && updated == negative_infinity() ? 0.0f : updated;
    const float correction = ptx::ex2_approx((reference - subtract) * exponent_scale);
    reference = updated;
    return correction;
  }

  // Takes in the row's part of a tile: `scores` is [tiles][4] of which this row owns elements first and first + 1.
  // Scores become weights; the return value is the correction of everything accumulated so far.
  // kMayHide: the row may have seen no key yet (all scores -inf). kExact: fp32 weights, or scores that may overflow.
  template <bool kMayHide, bool kExact, int kTiles>
  __device__ __forceinline__ float take(float (&scores)[kTiles][4], int first, float exponent_scale) {
    float largest = reference;
#pragma unroll
    for (int n = 0; n < kTiles; ++n) largest = fmaxf(largest, fmaxf(scores[n][first], scores[n][first + 1]));
    largest = warp_reduce<Max, 4>(largest);
    float subtract;
    const float correction = move_reference<kMayHide>(largest, exponent_scale, subtract);
    const float offset = subtract * exponent_scale;
    float added = 0.0f;
    if (!kExact && fabsf(offset) < kShortOffset) {
#pragma unroll
      for (int n = 0; n < kTiles; ++n) {
#pragma unroll
        for (int e = first; e < first + 2; ++e) {
          scores[n][e] = ptx::ex2_approx(fmaf(scores[n][e], exponent_scale, -offset));
          added += scores[n][e];
        }
      }
    } else {
#pragma unroll
      for (int n = 0; n < kTiles; ++n) {
#pragma unroll
        for (int e = first; e < first + 2; ++e) {
          scores[n][e] = ptx::ex2_approx((scores[n][e] - subtract) * exponent_scale);
          added += scores[n][e];
        }
      }
    }
    sum = fmaf(sum, correction, added);
    return correction;
  }

  // After the last tile: adds the four lanes' sums, so that all lanes of the row agree, and turns the reference into a
  // logit, logit = score * logit_scale. Rounded here and in log_sum_exp() by name: a compiler that joins the product and
  // the addition does so in one kernel and not in another, and a sequence alone would have other bits than in a batch.
  __device__ __forceinline__ void finish(float logit_scale) {
    sum = warp_reduce<Sum, 4>(sum);
    reference = __fmul_rn(reference, logit_scale);
  }

  // One more logit, the same in all lanes: an attention sink's after finish(), or of a row whose logits come one by one.
  // Returns the correction.
  __device__ __forceinline__ float take_logit(float logit) {
    constexpr float kLog2e = 1.44269504088896340736f;
    float subtract;
    const float correction = move_reference<true>(fmaxf(reference, logit), kLog2e, subtract);
    sum = fmaf(sum, correction, ptx::ex2_approx((logit - subtract) * kLog2e));
    return correction;
  }

  // What turns accumulated values into their mean; 0 for a row that saw no key.
  __device__ __forceinline__ float normalizer() const { return sum == 0.0f ? 0.0f : 1.0f / sum; }

  // Natural logarithm of the sum of the exponentials of all logits, after finish(); -inf for a row that saw no key.
  __device__ __forceinline__ float log_sum_exp() const {
    return sum == 0.0f ? negative_infinity() : __fadd_rn(reference, logf(sum));
  }
};

}  // namespace cki
