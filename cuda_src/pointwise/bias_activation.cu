// Bias, activation and multiplication by another tensor, element by element.
//
//   y[r, c] = activation(x[r, c] + bias[c]) * multiplier[r, c]
//
// x, multiplier, y: rows of `width` elements (row_address.cuh). bias: [width] of type Bias. Bias and multiplier are left out
// with kHasBias and kHasMultiplier. Arithmetic is fp32, rounded once. Bytes moved a row: 2 * width * sizeof(Element), with
// a multiplier 3 *; the bias stays in L1 and L2.
// y may be x or the multiplier: a thread has read what it overwrites, and nobody else reads it.
#include "common/row_address.cuh"
#include "common/vec.cuh"
#include "pointwise/activation.cuh"
#include "pointwise/tile.cuh"

using namespace cki;

constexpr pointwise::Activation kKind = static_cast<pointwise::Activation>(kActivation);

extern "C" __global__ void __launch_bounds__(kThreads, kMinBlocks)
    bias_activation(const Element* x, const Bias* bias, const Element* multiplier, Element* y, int rows, int width,
                    int extent1, int extent2, i64 x_stride0, i64 x_stride1, i64 x_stride2, i64 x_step,
                    i64 multiplier_stride0, i64 multiplier_stride1, i64 multiplier_stride2, i64 multiplier_step,
                    i64 y_stride0, i64 y_stride1, i64 y_stride2, i64 y_step, i64 bias_step) {
  const int row = tile_row();
  if (kRowsPerBlock > 1 && row >= rows) return;
  const RowExtents extents{extent1, extent2};
  const Element* x_row = RowTensor<const Element>{x, x_stride0, x_stride1, x_stride2, x_step}.row(row, extents);
  const Element* multiplier_row = multiplier;
  if constexpr (kHasMultiplier)
    multiplier_row = RowTensor<const Element>{multiplier, multiplier_stride0, multiplier_stride1, multiplier_stride2,
                                              multiplier_step}.row(row, extents);
  Element* y_row = RowTensor<Element>{y, y_stride0, y_stride1, y_stride2, y_step}.row(row, extents);

  for_each_tile(width, [&](int first) {
    Vector<Element, kVectorSize> inputs[kVectorsPerThread];
    Vector<Element, kVectorSize> multipliers[kVectorsPerThread];
#pragma unroll
    for (int v = 0; v < kVectorsPerThread; ++v) {
      const int column = tile_column(first, v);
      if (!in_row(column, width)) continue;
      inputs[v].load(x_row + column_offset(column, x_step));
      if constexpr (kHasMultiplier) multipliers[v].load(multiplier_row + column_offset(column, multiplier_step));
    }
#pragma unroll
    for (int v = 0; v < kVectorsPerThread; ++v) {
      const int column = tile_column(first, v);
      if (!in_row(column, width)) continue;
      float values[kVectorSize], biases[kVectorSize], factors[kVectorSize];
      inputs[v].to_floats(values);
      if constexpr (kHasBias) load_floats(bias + column_offset(column, bias_step), biases);
      if constexpr (kHasMultiplier) multipliers[v].to_floats(factors);
#pragma unroll
      for (int i = 0; i < kVectorSize; ++i) {
        if constexpr (kHasBias) values[i] += biases[i];
        values[i] = pointwise::activate<kKind, sizeof(Element)>(values[i]);
        if constexpr (kHasMultiplier) values[i] *= factors[i];
      }
      store_floats(y_row + column_offset(column, y_step), values);
    }
  });
}
