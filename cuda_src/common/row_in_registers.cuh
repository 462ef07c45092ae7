// A row spread over the registers of kThreadsPerRow threads: loading, storing, and sums over it.
//
// Prelude constants: kThreadsPerRow (1, 2, ... 32: a part of a warp; or a multiple of 32: the whole block),
// kVectorsPerThread, kVectorSize (elements), kFullRow (the width is exactly their product, so nothing is tested against
// it), kStepped (then kVectorSize is 1), and the Element type.
// Vector v of lane t covers columns (v * kThreadsPerRow + t) * kVectorSize onwards: neighbours in a warp read neighbouring
// addresses. Columns past the width hold zeros.
#pragma once

#include "common/reduce.cuh"
#include "common/row_address.cuh"
#include "common/types.cuh"
#include "common/vec.cuh"

namespace cki {

constexpr int kRowWarps = kThreadsPerRow <= 32 ? 1 : kThreadsPerRow / 32;

// The fp32 values of one thread's part of a row.
using RowValues = float[kVectorsPerThread][kVectorSize];

__device__ __forceinline__ int row_column(int vector) {
  const int lane = threadIdx.x % kThreadsPerRow;
  return (vector * kThreadsPerRow + lane) * kVectorSize;
}

// Whether a vector of this thread lies within the row.
__device__ __forceinline__ bool row_holds(int vector, int width) { return kFullRow || row_column(vector) < width; }

template <typename Function>
__device__ __forceinline__ void for_each_value(RowValues& values, Function function) {
#pragma unroll
  for (int v = 0; v < kVectorsPerThread; ++v)
#pragma unroll
    for (int i = 0; i < kVectorSize; ++i) function(values[v][i]);
}

// A thread's part of a row in its storage type.
template <typename T>
struct RowPart {
  Vector<T, kVectorSize> vectors[kVectorsPerThread];

  // `present` is false for a thread without a row: the last block may have fewer rows than others.
  __device__ __forceinline__ void load(const T* row, i64 step, int width, bool present) {
#pragma unroll
    for (int v = 0; v < kVectorsPerThread; ++v) {
      vectors[v].fill_zero();
      if (present && row_holds(v, width)) vectors[v].load(row + column_offset(row_column(v), step));
    }
  }

  __device__ __forceinline__ void store(T* row, i64 step, int width, bool present) const {
#pragma unroll
    for (int v = 0; v < kVectorsPerThread; ++v)
      if (present && row_holds(v, width)) vectors[v].store(row + column_offset(row_column(v), step));
  }

  __device__ __forceinline__ void to_floats(RowValues& values) const {
#pragma unroll
    for (int v = 0; v < kVectorsPerThread; ++v) vectors[v].to_floats(values[v]);
  }

  __device__ __forceinline__ void from_floats(const RowValues& values) {
#pragma unroll
    for (int v = 0; v < kVectorsPerThread; ++v) vectors[v].from_floats(values[v]);
  }
};

// Combines N values over the threads of a row. All threads of the warp (of the block, where the block is the row) take
// part. `scratch`: see block_reduce; it is unused where the row lies within a warp.
template <typename Operation, int N>
__device__ __forceinline__ void row_reduce(float (&values)[N], float (&scratch)[N][kRowWarps]) {
  if constexpr (kThreadsPerRow <= 32) {
#pragma unroll
    for (int n = 0; n < N; ++n) values[n] = warp_reduce<Operation, kThreadsPerRow>(values[n]);
  } else {
    block_reduce<Operation>(values, scratch);
  }
}

template <typename Operation>
__device__ __forceinline__ float row_reduce(float value, float (&scratch)[1][kRowWarps]) {
  float values[1] = {value};
  row_reduce<Operation>(values, scratch);
  return values[0];
}

// Whether `condition`, which is the same in all threads of a row, holds in any row whose threads share collectives with
// this thread: those of its warp. Code behind it may use row_reduce.
__device__ __forceinline__ bool any_row_of_warp(bool condition) {
  if constexpr (kThreadsPerRow < 32) return __any_sync(kFullWarp, condition);
  return condition;
}

}  // namespace cki
