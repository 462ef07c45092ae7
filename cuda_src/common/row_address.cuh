// Where the rows of a strided tensor lie.
//
// A row operation (norm, softmax, activation) works on the last axis, for every index of the leading ones. The planner
// merges leading axes that lie evenly in memory; what remains is one axis (kRowAxes = 1: dense tensors and slices of them)
// or up to three (kRowAxes = 3: for example per-head rows of [batch, seq, heads, dim] stored [batch, heads, seq, dim]).
// Offsets are 64-bit: a tensor may hold more than 2^31 elements.
//
// Prelude constants: kRowAxes; kStepped (elements of a row are not neighbours in memory).
#pragma once

#include "common/types.cuh"

namespace cki {

// Extents of the two inner row axes; the outermost needs none.
struct RowExtents {
  int extent1, extent2;
};

// Strides in elements, outermost axis first; `step` lies between the elements of a row.
template <typename T>
struct RowTensor {
  T* data;
  i64 stride0, stride1, stride2, step;

  // Elements from the tensor's start to the row's.
  __device__ __forceinline__ i64 offset(int index, RowExtents extents) const {
    static_assert(kRowAxes == 1 || kRowAxes == 3, "one merged axis, or three");
    if constexpr (kRowAxes == 1) return index * stride2;
    const int outer = index / extents.extent2;
    return outer / extents.extent1 * stride0 + outer % extents.extent1 * stride1 + index % extents.extent2 * stride2;
  }

  __device__ __forceinline__ T* row(int index, RowExtents extents) const { return data + offset(index, extents); }
};

// Offset of a column from its row's start.
__device__ __forceinline__ i64 column_offset(int column, i64 step) {
  if constexpr (kStepped) return column * step;
  return column;
}

}  // namespace cki
