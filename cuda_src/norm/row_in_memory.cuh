// A row too long for registers: every pass reads it again, from L2 for all but the first.
//
// Prelude constants: kThreadsPerRow (the block), kVectorSize, kHasResidual, kNormalizeRounded, kStepped, and Element.
// Nothing is written before the last pass, because y may be x, and sum may be x or residual; in the last pass a thread
// reads each vector before it writes it.
#pragma once

#include "common/convert_element.cuh"
#include "common/reduce.cuh"
#include "common/row_address.cuh"
#include "common/types.cuh"
#include "common/vec.cuh"

namespace cki {

constexpr int kRowWarps = kThreadsPerRow / 32;

struct LongRow {
  const Element* x;
  const Element* residual;
  i64 x_step, residual_step;

  // What the norm reads at columns column .. column + kVectorSize - 1. `rounded_sum`, if there is a residual, gets the sum
  // as it is to be stored.
  __device__ __forceinline__ void take(int column, float (&values)[kVectorSize],
                                       Vector<Element, kVectorSize>& rounded_sum) const {
    load_floats(x + column_offset(column, x_step), values);
    if constexpr (kHasResidual) {
      float addend[kVectorSize];
      load_floats(residual + column_offset(column, residual_step), addend);
#pragma unroll
      for (int i = 0; i < kVectorSize; ++i) values[i] += addend[i];
      rounded_sum.from_floats(values);
      if constexpr (kNormalizeRounded) rounded_sum.to_floats(values);
    }
  }
};

// function(column) for each vector of this thread. Columns are 32-bit: the planner refuses rows above 2^30 elements.
template <typename Function>
__device__ __forceinline__ void for_each_vector(int width, Function function) {
  for (int column = threadIdx.x * kVectorSize; column < width; column += kThreadsPerRow * kVectorSize) function(column);
}

// function(value) for each value that the norm reads.
template <typename Function>
__device__ __forceinline__ void for_each_value(const LongRow& row, int width, Function function) {
  for_each_vector(width, [&](int column) {
    float values[kVectorSize];
    Vector<Element, kVectorSize> rounded_sum;
    row.take(column, values, rounded_sum);
#pragma unroll
    for (int i = 0; i < kVectorSize; ++i) function(values[i]);
  });
}

}  // namespace cki
