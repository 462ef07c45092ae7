// The softmax of a tile whose weights become e4m3, on wgmma accumulators: softmax.cuh's arithmetic with larger weights.
//
// The largest number of e4m3 is 448 and the least normal one 2^-6, so weights are at most 256, not 1: those down to 2^-14 of
// the largest keep their three bits. The rows' sums are as many times as large (kWeightUnit takes it out).
//
// Eagerly, references are the largest scores so far. Lazily (kLazy, softmax.cuh's LazySoftmax), a reference follows only when
// a score exceeds it by more than 2^kRise, and nothing is rescaled until then: weights are 2^kWeightExponent at the
// reference, and three bits are kept down to 2^-10 of it.
#pragma once

#include "attention/hopper/configuration_e4m3.cuh"
#include "attention/hopper/softmax.cuh"
#include "common/online_softmax.cuh"
#include "common/reduce.cuh"
#include "common/types.cuh"
#include "ptx/math.cuh"
#include "ptx/wgmma.cuh"

namespace cki::attention {

constexpr float kRise = kLazy ? 4.0f : 0.0f;
constexpr float kWeightExponent = 8.0f - kRise;
constexpr float kWeightUnit = kLazy ? 1.0f / 16.0f : 1.0f / 256.0f;

// Eagerly; also the first tile of a lazy row.
template <bool kMayHide, bool kExact, int kCount>
__device__ __forceinline__ void take_e4m3_tile(float (&scores)[kCount], SoftmaxRow (&rows)[2], float (&correction)[2],
                                               float exponent_scale) {
  float subtract[2], offset[2];
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    subtract[r] = take_reference<kMayHide>(scores, r, rows[r], correction[r], exponent_scale);
    offset[r] = fmaf(subtract[r], exponent_scale, -kWeightExponent);
  }
  const bool is_short = fabsf(offset[0]) < SoftmaxRow::kShortOffset && fabsf(offset[1]) < SoftmaxRow::kShortOffset;
  if (kExact || !is_short) {
#pragma unroll
    for (int r = 0; r < 2; ++r) subtract_reference(scores, r, subtract[r]);
    offset[0] = offset[1] = -kWeightExponent;
  }
#pragma unroll
  for (int r = 0; r < 2; ++r) take_weights(scores, r, rows[r], correction[r], offset[r], exponent_scale);
}

// Lazily. kExact: always subtract before scaling, else rows of a large reference alone, which take the slow way in each tile.
template <bool kMayHide, bool kExact, int kCount>
struct LazyE4m3Softmax {
  float (&scores)[kCount];
  SoftmaxRow (&rows)[2];
  const float exponent_scale;
  float offset[2], subtract[2];
  float added[4];  // sums of new weights, two chains a row

  __device__ __forceinline__ LazyE4m3Softmax(float (&scores)[kCount], SoftmaxRow (&rows)[2], float exponent_scale)
      : scores(scores), rows(rows), exponent_scale(exponent_scale) {}

  // References move where they must; rescale(correction) is called then. What a row does depends on its own scores alone,
  // though its warp does it together.
  template <class Rescale>
  __device__ __forceinline__ void begin(Rescale rescale) {
    float largest[2];
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      subtract[r] = rows[r].reference;
      offset[r] = subtract[r] * exponent_scale;
      largest[r] = largest_score(scores, r);
    }
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
    }
  }

  // Weights of scores [kBegin, kEnd), in order from 0 on.
  template <int kBegin, int kEnd>
  __device__ __forceinline__ void take() {
#pragma unroll
    for (int i = kBegin; i < kEnd; ++i) {
      const int r = i / 2 % 2, chain = r * 2 + i % 2;
      scores[i] = ptx::ex2_approx(kExact ? fmaf(scores[i] - subtract[r], exponent_scale, kWeightExponent)
                                         : fmaf(scores[i], exponent_scale, kWeightExponent - offset[r]));
      added[chain] = i < 4 ? scores[i] : added[chain] + scores[i];
    }
    // Unrounded, for the logarithm alone. ptxas would sink these additions behind the next branch, where they cost time.
    if constexpr (kLse) ptx::wgmma_fence_registers(added);
  }

  __device__ __forceinline__ void finish() {
#pragma unroll
    for (int r = 0; r < 2; ++r) rows[r].sum += added[2 * r] + added[2 * r + 1];
  }

 private:
  __device__ __forceinline__ bool is_large(int r) const { return !(fabsf(offset[r]) < SoftmaxRow::kShortOffset); }

  // Also when the reference is -inf or is_large.
  __device__ __forceinline__ bool rises(int r, float largest) const {
    const float above = kExact ? (largest - subtract[r]) * exponent_scale : fmaf(largest, exponent_scale, -offset[r]);
    return !(above <= kRise) | (!kExact && is_large(r));
  }
};

}  // namespace cki::attention
