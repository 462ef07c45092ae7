// How large weights are that become e4m3, for softmax.cuh.
//
// The largest number of e4m3 is 448 and the least normal one 2^-6, so weights are at most 256, not 1: those down to 2^-14 of
// the largest keep their three bits. The rows' sums are as many times as large (kWeightUnit takes it out).
//
// Eagerly, references are the largest scores so far. Lazily (kLazy, LazySoftmax), a reference follows only when a score
// exceeds it by more than 2^kHeadroom, and nothing is rescaled until then: weights are 2^kExponent at the reference, and
// three bits are kept down to 2^-10 of it.
#pragma once

#include "common/types.cuh"

namespace cki::attention {

struct E4m3Weights {
  static constexpr float kHeadroom = kLazy ? 4.0f : 0.0f;
  static constexpr float kExponent = 8.0f - kHeadroom;
  static constexpr bool kSummed = kLse;  // unrounded, for the logarithm alone
};
constexpr float kWeightUnit = kLazy ? 1.0f / 16.0f : 1.0f / 256.0f;  // 2^-kExponent

}  // namespace cki::attention
