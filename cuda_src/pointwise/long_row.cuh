// A row too long for a block's registers, walked by the whole block as often as a kernel needs: from L2 after the first time.
//
// Prelude constants: kThreadsPerRow (the block), kVectorSize, kStepped, and Element. A thread loads kBatch vectors before it
// uses the first: 1024 threads then have 64 KB in flight.
#pragma once

#include "common/row_address.cuh"
#include "common/types.cuh"
#include "common/vec.cuh"

namespace cki {

constexpr int kRowWarps = kThreadsPerRow / 32;
constexpr int kBatch = 4;

// function(column, values) for each vector of this thread. Columns are 32-bit: the planner refuses rows above 2^30 elements.
// A row may be written over by the function: its vectors are this thread's alone, and loaded before.
template <typename Function>
__device__ __forceinline__ void for_each_vector(const Element* row, i64 step, int width, Function function) {
  constexpr int kStride = kThreadsPerRow * kVectorSize;
  for (int first = threadIdx.x * kVectorSize; first < width; first += kBatch * kStride) {
    Vector<Element, kVectorSize> vectors[kBatch];
#pragma unroll
    for (int b = 0; b < kBatch; ++b)
      if (first + b * kStride < width) vectors[b].load(row + column_offset(first + b * kStride, step));
#pragma unroll
    for (int b = 0; b < kBatch; ++b) {
      if (first + b * kStride >= width) break;
      float values[kVectorSize];
      vectors[b].to_floats(values);
      function(first + b * kStride, values);
    }
  }
}

}  // namespace cki
