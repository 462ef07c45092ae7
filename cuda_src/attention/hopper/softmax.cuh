// Online softmax of one tile of keys on wgmma accumulators: a lane holds parts of two rows.
//
// The same arithmetic as common/online_softmax.cuh, whose SoftmaxRow keeps reference and sum of a row, but for both rows at
// a time: their exponentials interleave, and the rare rows with a large reference branch once a tile. Element i of
// `scores` belongs to row i / 2 % 2.
#pragma once

#include "common/online_softmax.cuh"
#include "common/reduce.cuh"
#include "ptx/math.cuh"

namespace cki::attention {

// Scores become weights; correction[r] is what everything accumulated so far of row r is to be multiplied by.
// kMayHide: a row may have seen no key yet (all scores -inf). kExact: always subtract before multiplying.
template <bool kMayHide, bool kExact, int kCount>
__device__ __forceinline__ void take_tile(float (&scores)[kCount], SoftmaxRow (&rows)[2], float (&correction)[2],
                                          float exponent_scale) {
  float subtract[2], offset[2];
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    float even = scores[2 * r], odd = scores[2 * r + 1];  // two chains, half as long
#pragma unroll
    for (int i = 4; i < kCount; i += 4) {
      even = fmaxf(even, scores[i + 2 * r]);
      odd = fmaxf(odd, scores[i + 2 * r + 1]);
    }
    const float largest = warp_reduce<Max, 4>(fmaxf(rows[r].reference, fmaxf(even, odd)));
    correction[r] = rows[r].move_reference<kMayHide>(largest, exponent_scale, subtract[r]);
    offset[r] = subtract[r] * exponent_scale;
  }
  const bool is_short = fabsf(offset[0]) < SoftmaxRow::kShortOffset && fabsf(offset[1]) < SoftmaxRow::kShortOffset;
  if (kExact || !is_short) {
#pragma unroll
    for (int i = 0; i < kCount; ++i) scores[i] -= subtract[i / 2 % 2];
    offset[0] = offset[1] = 0.0f;
  }
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    float even = 0.0f, odd = 0.0f;
#pragma unroll
    for (int i = 2 * r; i < kCount; i += 4) {
      scores[i] = ptx::ex2_approx(fmaf(scores[i], exponent_scale, -offset[r]));
      scores[i + 1] = ptx::ex2_approx(fmaf(scores[i + 1], exponent_scale, -offset[r]));
      even += scores[i];
      odd += scores[i + 1];
    }
    rows[r].sum = fmaf(rows[r].sum, correction[r], even + odd);
  }
}

// Accumulators of two rows, each times its own factor.
template <int kCount>
__device__ __forceinline__ void scale_rows(float (&accumulators)[kCount], const float (&factor)[2]) {
#pragma unroll
  for (int i = 0; i < kCount; ++i) accumulators[i] *= factor[i / 2 % 2];
}

}  // namespace cki::attention
