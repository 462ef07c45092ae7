// The online softmax of a tile of keys without a search for the largest score: checked afterwards, by its sums.
//
// References follow lazily (LazySoftmax in softmax.cuh), so a weight is 2^(score - reference) whatever the tile holds, and
// whether the reference served shows in the sum of the weights, which is needed anyway: while a lane's part of it is at most
// 2^15, no weight of the row is beyond what f16 holds, and fp32 sums lose nothing. The search for the largest score is 62 of
// some 300 instructions of a step, of half rate, in which the special function unit has nothing to do.
//
// Rows whose sum is larger get their scores once more (scores_again.cuh), and a reference by them: any jump is right, also
// one that overflowed. So do rows with no reference yet, and with a large one, which must be subtracted before it is scaled, in
// each tile. A row decides by its own scores; that of another in its warp changes no bit of it.
//
// For logits that are products and nothing else, or -inf. kMayHide: the row may have seen no key yet (all scores -inf).
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

  template <class Rescale>
  __device__ __forceinline__ void begin(Rescale) const {}

  // Weights of scores [kBegin, kEnd), in order from 0 on.
  template <int kBegin, int kEnd>
  __device__ __forceinline__ void take() {
#pragma unroll
    for (int i = kBegin; i < kEnd; ++i) {
      scores[i] = ptx::ex2_approx(fmaf(scores[i], exponent_scale, -offset[i / 2 % 2]));
      add(i);
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

  // Weights of the rows that are wanted: scores_again(scores, wanted) adds their scores to zeros. False where there are none in
  // the warp.
  template <class ScoresAgain, class Rescale>
  __device__ __forceinline__ bool settle(ScoresAgain scores_again, Rescale rescale) {
    if (!__any_sync(kFullWarp, is_wrong(0) | is_wrong(1))) return false;
    bool wanted[2];
#pragma unroll
    for (int r = 0; r < 2; ++r) wanted[r] = warp_reduce<Max, 4>(is_wrong(r) ? 1.0f : 0.0f) != 0.0f;
#pragma unroll
    for (int i = 0; i < kCount; ++i) scores[i] = wanted[i / 2 % 2] ? 0.0f : scores[i];
    scores_again(scores, wanted);
    float correction[2], subtract[2];
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const float largest = warp_reduce<Max, 4>(largest_score(scores, r));
      const float moved = wanted[r] ? fmaxf(rows[r].reference, largest) : rows[r].reference;
      const float factor = rows[r].template move_reference<kMayHide>(moved, exponent_scale, subtract[r]);
      correction[r] = wanted[r] ? factor : 1.0f;
      rows[r].sum *= correction[r];
    }
#pragma unroll
    for (int i = 0; i < kCount; ++i) {
      const float weight = ptx::ex2_approx((scores[i] - subtract[i / 2 % 2]) * exponent_scale);
      scores[i] = wanted[i / 2 % 2] ? weight : scores[i];
      add(i);
    }
    rescale(correction);
    return true;
  }

  __device__ __forceinline__ void finish() {
#pragma unroll
    for (int r = 0; r < 2; ++r) rows[r].sum += added[2 * r] + added[2 * r + 1];
  }

 private:
  // This lane's part of row r's sum is too large (not of NaN, which is the row's own), or the reference is: such a one must be
  // subtracted before it is scaled. Also where there is none yet.
  __device__ __forceinline__ bool is_wrong(int r) const {
    return !(fabsf(offset[r]) < SoftmaxRow::kShortOffset) | (added[2 * r] + added[2 * r + 1] > kLargestSum);
  }
  __device__ __forceinline__ void add(int i) {
    const int chain = i / 2 % 2 * 2 + i % 2;
    added[chain] = i < 4 ? scores[i] : added[chain] + scores[i];
  }
};

}  // namespace cki::attention
