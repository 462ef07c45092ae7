// Online softmax of one tile of keys on wgmma accumulators: a lane holds parts of two rows.
//
// The same arithmetic as common/online_softmax.cuh, whose SoftmaxRow keeps reference and sum of a row, in pieces that a
// kernel places around its waits. Element i of `scores` belongs to row r = i / 2 % 2.
#pragma once

#include "common/online_softmax.cuh"
#include "common/reduce.cuh"
#include "ptx/math.cuh"

namespace cki::attention {

// Takes row r's largest score into its reference. Returns what is to be subtracted from the scores; correction is what
// everything accumulated so far of the row is to be multiplied by. kMayHide: the row may have seen no key yet (all -inf).
template <bool kMayHide, int kCount>
__device__ __forceinline__ float take_reference(const float (&scores)[kCount], int r, SoftmaxRow& row, float& correction,
                                                float exponent_scale) {
  float even = fmaxf(row.reference, scores[2 * r]), odd = scores[2 * r + 1];  // two chains, half as long
#pragma unroll
  for (int i = 4; i < kCount; i += 4) {
    even = fmaxf(even, scores[i + 2 * r]);
    odd = fmaxf(odd, scores[i + 2 * r + 1]);
  }
  float subtract;
  correction = row.move_reference<kMayHide>(warp_reduce<Max, 4>(fmaxf(even, odd)), exponent_scale, subtract);
  return subtract;
}

// Row r's scores become weights, 2^(score * exponent_scale - offset), and enter its sum.
template <int kCount>
__device__ __forceinline__ void take_weights(float (&scores)[kCount], int r, SoftmaxRow& row, float correction,
                                             float offset, float exponent_scale) {
  float even = 0.0f, odd = 0.0f;
#pragma unroll
  for (int i = 2 * r; i < kCount; i += 4) {
    scores[i] = ptx::ex2_approx(fmaf(scores[i], exponent_scale, -offset));
    scores[i + 1] = ptx::ex2_approx(fmaf(scores[i + 1], exponent_scale, -offset));
    even += scores[i];
    odd += scores[i + 1];
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

// Both rows at a time: their exponentials interleave. Rows of a large reference are subtracted before they are scaled, by
// one branch a tile, which also parts the search for the largest from the exponentials (attention.cu says why that helps).
// kExact: always subtract first.
template <bool kMayHide, bool kExact, int kCount>
__device__ __forceinline__ void take_tile(float (&scores)[kCount], SoftmaxRow (&rows)[2], float (&correction)[2],
                                          float exponent_scale) {
  float subtract[2], offset[2];
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    subtract[r] = take_reference<kMayHide>(scores, r, rows[r], correction[r], exponent_scale);
    offset[r] = subtract[r] * exponent_scale;
  }
  const bool is_short = fabsf(offset[0]) < SoftmaxRow::kShortOffset && fabsf(offset[1]) < SoftmaxRow::kShortOffset;
  if (kExact || !is_short) {
#pragma unroll
    for (int r = 0; r < 2; ++r) subtract_reference(scores, r, subtract[r]);
    offset[0] = offset[1] = 0.0f;
  }
#pragma unroll
  for (int r = 0; r < 2; ++r) take_weights(scores, r, rows[r], correction[r], offset[r], exponent_scale);
}

// Accumulators of two rows, each times its own factor.
template <int kCount>
__device__ __forceinline__ void scale_rows(float (&accumulators)[kCount], const float (&factor)[2]) {
#pragma unroll
  for (int i = 0; i < kCount; ++i) accumulators[i] *= factor[i / 2 % 2];
}

}  // namespace cki::attention
