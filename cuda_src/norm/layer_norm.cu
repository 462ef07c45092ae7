// Layer norm of rows that fit in registers, with the residual addition in front of it.
//
//   y[r, c] = (v[r, c] - mean_c v) * rsqrt(mean_c((v - mean_c v)^2) + eps) * weight[c] + bias[c]
//   v = x, or with kHasResidual v = x + residual, which is also written, rounded to Element, to `sum` (row_input.cuh).
// Arithmetic is fp32; the only roundings to Element are those of `sum` and `y`.
//
// The mean comes first and the squares are of deviations, both from registers: mean(v^2) - mean(v)^2 would cancel. A mean of
// 1e4 carries a rounding error near 1e-3, which a spread of 1 would show, so the deviations' own mean, which is exact to
// 1e-7 of the spread, is taken in the same pass as their squares and removed:
//   d = v - m,  e = mean(d),  variance = mean(d^2) - e^2 (e^2 is tiny beside mean(d^2)),  y = (d - e) * rsqrt(...)
//
// x, residual, y, sum: rows of `width` elements (row_address.cuh). weight, bias: [width] of types Weight and Bias.
// Bytes moved a row: 2 * width * sizeof(Element), with a residual 4 *; weight and bias stay in L1 or in registers.
//
// Work: as in rms_norm.cu, with two reductions a row. y may be x, and sum may be x or residual.
#include "common/row_address.cuh"
#include "common/row_in_registers.cuh"
#include "norm/normalize_row.cuh"
#include "norm/row_input.cuh"

using namespace cki;

extern "C" __global__ void __launch_bounds__(kThreadsPerRow* kRowsPerBlock, kMinBlocks)
    layer_norm(const Element* x, const Element* residual, const Weight* weight, const Bias* bias, Element* y, Element* sum,
               int rows, int width, int extent1, int extent2, i64 x_stride0, i64 x_stride1, i64 x_stride2, i64 x_step,
               i64 residual_stride0, i64 residual_stride1, i64 residual_stride2, i64 residual_step, i64 y_stride0,
               i64 y_stride1, i64 y_stride2, i64 y_step, i64 sum_stride0, i64 sum_stride1, i64 sum_stride2, i64 sum_step,
               i64 weight_step, i64 bias_step, float eps) {
  static_assert(kRowsPerBlock == 1 || kThreadsPerRow <= 32, "a row of several warps takes the whole block");
  __shared__ __align__(16) float mean_scratch[1][kRowWarps];
  __shared__ __align__(16) float moment_scratch[2][2][kRowWarps];

  const RowExtents extents{extent1, extent2};
  const RowTensor<const Element> x_rows{x, x_stride0, x_stride1, x_stride2, x_step};
  const RowTensor<const Element> residual_rows{residual, residual_stride0, residual_stride1, residual_stride2, residual_step};
  const RowTensor<Element> y_rows{y, y_stride0, y_stride1, y_stride2, y_step};
  const RowTensor<Element> sum_rows{sum, sum_stride0, sum_stride1, sum_stride2, sum_step};
  const float inverse_width = 1.0f / static_cast<float>(width);
  const int row_in_block = threadIdx.x / kThreadsPerRow;
  const int grid_rows = gridDim.x * kRowsPerBlock;

  RowPart<Weight> held_weight;
  RowPart<Bias> held_bias;
  if constexpr (kHasWeight && kHoldWeight) held_weight.load(weight, weight_step, width, true);
  if constexpr (kHasBias && kHoldWeight) held_bias.load(bias, bias_step, width, true);

  RowInput input;
  const auto load = [&](int row) { input.load(x_rows, residual_rows, row, extents, width, row < rows); };
  if constexpr (kPrefetch) load(blockIdx.x * kRowsPerBlock + row_in_block);

  for (int first = blockIdx.x * kRowsPerBlock; first < rows; first += grid_rows) {
    const int row = first + row_in_block;
    const bool present = row < rows;
    if constexpr (!kPrefetch) load(row);
    RowValues values;
    input.take(values, sum_rows, row, extents, width, present);
    if constexpr (kPrefetch) load(row + grid_rows);

    const Centred centred = centre_row(values, width, inverse_width, eps, mean_scratch, moment_scratch);

    Element* y_row = y_rows.row(row, extents);
#pragma unroll
    for (int v = 0; v < kVectorsPerThread; ++v) {
      if (!present || !row_holds(v, width)) continue;
      float factors[kVectorSize], shifts[kVectorSize];
      if constexpr (kHasWeight && kHoldWeight) held_weight.vectors[v].to_floats(factors);
      if constexpr (kHasWeight && !kHoldWeight) load_floats(weight + column_offset(row_column(v), weight_step), factors);
      if constexpr (kHasBias && kHoldWeight) held_bias.vectors[v].to_floats(shifts);
      if constexpr (kHasBias && !kHoldWeight) load_floats(bias + column_offset(row_column(v), bias_step), shifts);
#pragma unroll
      for (int i = 0; i < kVectorSize; ++i) {
        float result = (values[v][i] - centred.mean_of_deviations) * centred.reciprocal;
        if constexpr (kHasWeight) result *= factors[i];
        if constexpr (kHasBias) result += shifts[i];
        values[v][i] = result;
      }
      store_floats(y_row + column_offset(row_column(v), y_step), values[v]);
    }
  }
}
