// What a norm reads: x, or x + residual with the sum written out on the way.
//
// Prelude constants: kHasResidual; kNormalizeRounded: the norm reads the sum as rounded to Element (what an addition
// followed by a norm gives, as Hugging Face models compute it) instead of the fp32 sum.
// Loading is apart from using, so that a kernel can load its next row before it reduces the present one.
#pragma once

#include "common/row_address.cuh"
#include "common/row_in_registers.cuh"

namespace cki {

struct RowInput {
  RowPart<Element> x, residual;

  __device__ __forceinline__ void load(const RowTensor<const Element>& x_rows, const RowTensor<const Element>& residual_rows,
                                       int row, RowExtents extents, int width, bool present) {
    x.load(x_rows.row(row, extents), x_rows.step, width, present);
    if constexpr (kHasResidual) residual.load(residual_rows.row(row, extents), residual_rows.step, width, present);
  }

  // The values that the norm reads. With a residual, the rounded sum goes to `sum_rows`.
  __device__ __forceinline__ void take(RowValues& values, const RowTensor<Element>& sum_rows, int row, RowExtents extents,
                                       int width, bool present) const {
    x.to_floats(values);
    if constexpr (kHasResidual) {
      RowValues addend;
      residual.to_floats(addend);
#pragma unroll
      for (int v = 0; v < kVectorsPerThread; ++v)
#pragma unroll
        for (int i = 0; i < kVectorSize; ++i) values[v][i] += addend[v][i];
      RowPart<Element> rounded;
      rounded.from_floats(values);
      rounded.store(sum_rows.row(row, extents), sum_rows.step, width, present);
      if constexpr (kNormalizeRounded) rounded.to_floats(values);
    }
  }
};

}  // namespace cki
