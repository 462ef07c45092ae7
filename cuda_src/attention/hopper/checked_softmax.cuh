// The online softmax of a tile of keys without a search for the largest score: checked afterwards, by its sums.
//
// References follow lazily (LazySoftmax in softmax.cuh), so a weight is 2^(score - reference) whatever the tile holds, and
// whether the reference served shows in the sum of the weights, which is needed anyway: while a lane's part of it is at most
// 2^15, no weight of the row is beyond what f16 holds, and fp32 sums lose nothing. The search for the largest score is 62 of
// some 300 instructions of a step, of half rate, in which the special function unit has nothing to do.
//
// Rows whose sum is larger get their scores once more (scores_again.cuh), and a reference by them: any jump is right, also
// one that overflowed. A row decides by its own scores. Rows with no reference yet, or with a large one, which must be
// subtracted before it is scaled, are searched in each tile, in front of the exponentials.
//
// For logits that are products and nothing else, or -inf. NaN in a sum is the row's own result.
// kMayHide: the row may have seen no key yet (all scores -inf).
#pragma once

#include "attention/hopper/softmax.cuh"
#include "common/online_softmax.cuh"
#include "common/reduce.cuh"
#include "ptx/math.cuh"
#include "ptx/wgmma.cuh"

namespace cki::attention {

template <bool kMayHide, int kCount>
struct CheckedSoftmax {
  static constexpr bool kReadsKeysAgain = true;
  static constexpr float kLargestSum = 32768.0f;
  static constexpr int kAhead = 0;

  float (&scores)[kCount];
  SoftmaxRow (&rows)[2];
  const float exponent_scale;
  float offset[2];
  float added[4];  // sums of new weights, two chains a row

  __device__ __forceinline__ CheckedSoftmax(float (&scores)[kCount], SoftmaxRow (&rows)[2], float exponent_scale)
      : scores(scores), rows(rows), exponent_scale(exponent_scale) {
#pragma unroll
    for (int r = 0; r < 2; ++r) offset[r] = rows[r].reference * exponent_scale;
  }

  // References of the rows that must be searched. rescale(correction) is called where there are any in the warp.
  template <class Rescale>
  __device__ __forceinline__ void begin(Rescale rescale) {
    const bool searched[2] = {is_large(0), is_large(1)};
    if (!__any_sync(kFullWarp, searched[0] | searched[1])) return;
    float correction[2];
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      float subtract = move(r, searched[r], correction[r]);
      offset[r] = subtract * exponent_scale;
      if (is_large(r)) {
        subtract_reference(scores, r, subtract);
        offset[r] = 0.0f;
      }
    }
    rescale(correction);
  }

  // Weights of scores [kBegin, kEnd), in order from 0 on.
  template <int kBegin, int kEnd>
  __device__ __forceinline__ void take() {
#pragma unroll
    for (int i = kBegin; i < kEnd; ++i) {
      scores[i] = ptx::ex2_approx(fmaf(scores[i], exponent_scale, -offset[i / 2 % 2]));
      add(added, i, scores[i]);
    }
    ptx::wgmma_fence_registers(added);  // as in LazySoftmax
  }

  // In a branch that is seldom taken: ptxas leaves the weights in front of it and behind it on their sides only if it changes
  // what they are made of, and keeps it a branch only if it is long. Adds zeros, which ptxas does not know.
  // Queries may be needed again, so they are not released here.
  template <int kTaken, class Release>
  __device__ __forceinline__ void part(Release) {
    const float zero = exponent_scale * 0.0f;
#pragma unroll
    for (int r = 0; r < 2; ++r) offset[r] += zero;
#pragma unroll
    for (int c = 0; c < 4; ++c) added[c] += zero;
#pragma unroll
    for (int i = 0; i < (kTaken < 16 ? kTaken : 16); ++i) scores[i] += zero;
  }

  __device__ __forceinline__ float taken(int i) const { return scores[i]; }

  // Weights of rows whose sum exceeds, from scores_again(scores, wanted), which replaces the scores of the rows that are
  // wanted. False where there are none in the warp.
  template <class ScoresAgain, class Rescale>
  __device__ __forceinline__ bool settle(ScoresAgain scores_again, Rescale rescale) {
    if (!__any_sync(kFullWarp, exceeds(0) | exceeds(1))) return false;
    bool wanted[2];
    float correction[2], sums[4];
#pragma unroll
    for (int r = 0; r < 2; ++r) wanted[r] = warp_reduce<Max, 4>(exceeds(r) ? 1.0f : 0.0f) != 0.0f;
    scores_again(scores, wanted);
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const float subtract = move(r, wanted[r], correction[r]);
#pragma unroll
      for (int i = 2 * r; i < kCount; i += 4) {
#pragma unroll
        for (int e = i; e < i + 2; ++e) {
          if (wanted[r]) scores[e] = ptx::ex2_approx((scores[e] - subtract) * exponent_scale);
          add(sums, e, scores[e]);
        }
      }
    }
#pragma unroll
    for (int c = 0; c < 4; ++c) added[c] = sums[c];
    rescale(correction);
    return true;
  }

  __device__ __forceinline__ void finish() {
#pragma unroll
    for (int r = 0; r < 2; ++r) rows[r].sum += added[2 * r] + added[2 * r + 1];
  }

 private:
  // Also of a row that has no reference yet.
  __device__ __forceinline__ bool is_large(int r) const { return !(fabsf(offset[r]) < SoftmaxRow::kShortOffset); }
  // This lane's part of the row's sum: false for NaN.
  __device__ __forceinline__ bool exceeds(int r) const { return added[2 * r] + added[2 * r + 1] > kLargestSum; }

  // Takes row r's largest score into its reference, where the row moves, and into its sum; by all lanes. Returns what is to
  // be subtracted from the scores.
  __device__ __forceinline__ float move(int r, bool moves, float& correction) {
    const float largest = warp_reduce<Max, 4>(largest_score(scores, r));
    float subtract;
    const float factor = rows[r].template move_reference<kMayHide>(
        moves ? fmaxf(rows[r].reference, largest) : rows[r].reference, exponent_scale, subtract);
    correction = moves ? factor : 1.0f;
    rows[r].sum *= correction;
    return subtract;
  }
  static __device__ __forceinline__ void add(float (&sums)[4], int i, float weight) {
    const int chain = i / 2 % 2 * 2 + i % 2;
    sums[chain] = i < 4 ? weight : sums[chain] + weight;
  }
};

}  // namespace cki::attention
