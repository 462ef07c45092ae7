// One row of logits as a block reads it: four neighbouring tokens a thread at a time.
//
// What is not a number counts as -infinity. Of a token that was seen before (a bit of `seen`) the logit is divided by the
// repetition penalty where it is positive, and multiplied by it elsewhere.
#pragma once

#include "common/reduce.cuh"
#include "common/vec.cuh"

namespace cki {

constexpr int kGroup = 4;
// Groups that a thread loads before it looks at the first: a row comes from L2, by one SM. What is rarely needed takes one,
// and compiles in a fraction of the time.
constexpr int kAhead = 4;

// How far a logit lies below the row's largest; 0 for that itself, an infinite one too.
__device__ __forceinline__ float distance_from(float largest, float logit) {
  return logit == largest ? 0.0f : largest - logit;
}

struct LogitRow {
  const Element* logits;
  i64 step;  // elements between neighbouring tokens
  int vocabulary;
  const u32* seen;  // or null
  float penalty;

  __device__ __forceinline__ float one(int token) const { return cleaned(to_float(logits[token * step])); }

  __device__ __forceinline__ float one_penalised(int token) const {
    return penalised(one(token), seen != nullptr && (seen[token / 32] >> (token % 32) & 1));
  }

  // The logits of the tokens first .. first + 3; -infinity beyond the vocabulary.
  __device__ __forceinline__ void load(int first, float (&values)[kGroup]) const {
    if (kVectorLoads && first + kGroup <= vocabulary) {
      Vector<Element, kGroup> vector;
      vector.load(logits + first);
      vector.to_floats(values);
    } else {
#pragma unroll
      for (int i = 0; i < kGroup; ++i)
        values[i] = first + i < vocabulary ? to_float(logits[(first + i) * step]) : Max::identity();
    }
#pragma unroll
    for (int i = 0; i < kGroup; ++i) values[i] = cleaned(values[i]);
  }

  __device__ __forceinline__ void load_penalised(int first, float (&values)[kGroup]) const {
    load(first, values);
    if (seen == nullptr) return;
    const u32 bits = seen[first / 32] >> (first % 32);
#pragma unroll
    for (int i = 0; i < kGroup; ++i) values[i] = penalised(values[i], bits >> i & 1);
  }

  static __device__ __forceinline__ float cleaned(float logit) {
    return logit == logit ? logit + 0.0f : Max::identity();  // -0 becomes 0
  }
  __device__ __forceinline__ float penalised(float logit, bool was_seen) const {
    return !was_seen ? logit : logit > 0.0f ? logit / penalty : logit * penalty;
  }

  // body(first token, logits) of this thread's groups, penalised, in rising order; logits may be written. kBlocks: blocks
  // that share the row, of which this is number `block`.
  template <int kAhead = cki::kAhead, int kBlocks = 1, typename Body>
  __device__ __forceinline__ void for_each_group(Body body, int block = 0) const {
    constexpr int kStride = kGroup * kThreads * kBlocks;
    for (int begin = kGroup * (threadIdx.x + block * kThreads); begin < vocabulary; begin += kAhead * kStride) {
      float values[kAhead][kGroup];
#pragma unroll
      for (int a = 0; a < kAhead; ++a)
        if (begin + a * kStride < vocabulary) load_penalised(begin + a * kStride, values[a]);
#pragma unroll
      for (int a = 0; a < kAhead; ++a)
        if (begin + a * kStride < vocabulary) body(begin + a * kStride, values[a]);
    }
  }

  // body(token, logit) of this thread's tokens, penalised, in rising order.
  template <int kAhead = cki::kAhead, typename Body>
  __device__ __forceinline__ void for_each(Body body) const {
    for_each_group<kAhead>([&](int first, float (&values)[kGroup]) {
#pragma unroll
      for (int i = 0; i < kGroup; ++i)
        if (first + i < vocabulary) body(first + i, values[i]);
    });
  }
};

}  // namespace cki
