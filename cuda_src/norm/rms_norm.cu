// RMS norm of rows that fit in registers, with the residual addition in front of it.
//
//   y[r, c] = v[r, c] * rsqrt(mean_c(v[r, c]^2) + eps) * (weight[c] + weight_offset)
//   v = x, or with kHasResidual v = x + residual, which is also written, rounded to Element, to `sum` (row_input.cuh).
// Arithmetic is fp32; the only roundings to Element are those of `sum` and `y`.
//
// x, residual, y, sum: rows of `width` elements (row_address.cuh). weight: [width] of type Weight.
// Bytes moved a row: 2 * width * sizeof(Element), with a residual 4 *; the weights stay in L1 or in registers.
//
// Work: a row belongs to a part of a warp, a warp, or a block (kThreadsPerRow) and is held in registers from its load to its
// output, so memory is read once. Blocks walk over the rows in steps of the grid. With kPrefetch a block loads its next row
// before it reduces the present one, which keeps loads in flight during the reduction; with kHoldWeight the weights stay in
// registers from row to row. y may be x, and sum may be x or residual: a thread has read what it overwrites.
// kOverlaps (sm_90): the launch may begin while the one before it ends, of which it waits for all, and the next one beside it.
#include "common/row_address.cuh"
#include "common/row_in_registers.cuh"
#include "norm/normalize_row.cuh"
#include "norm/row_input.cuh"
#include "ptx/grid_dependency.cuh"

using namespace cki;

extern "C" __global__ void __launch_bounds__(kThreadsPerRow* kRowsPerBlock, kMinBlocks)
    rms_norm(const Element* x, const Element* residual, const Weight* weight, Element* y, Element* sum, int rows, int width,
             int extent1, int extent2, i64 x_stride0, i64 x_stride1, i64 x_stride2, i64 x_step, i64 residual_stride0,
             i64 residual_stride1, i64 residual_stride2, i64 residual_step, i64 y_stride0, i64 y_stride1, i64 y_stride2,
             i64 y_step, i64 sum_stride0, i64 sum_stride1, i64 sum_stride2, i64 sum_step, i64 weight_step, float eps,
             float weight_offset) {
  static_assert(kRowsPerBlock == 1 || kThreadsPerRow <= 32, "a row of several warps takes the whole block");
  __shared__ __align__(16) float scratch[2][1][kRowWarps];

  const RowExtents extents{extent1, extent2};
  const RowTensor<const Element> x_rows{x, x_stride0, x_stride1, x_stride2, x_step};
  const RowTensor<const Element> residual_rows{residual, residual_stride0, residual_stride1, residual_stride2, residual_step};
  const RowTensor<Element> y_rows{y, y_stride0, y_stride1, y_stride2, y_step};
  const RowTensor<Element> sum_rows{sum, sum_stride0, sum_stride1, sum_stride2, sum_step};
  const float inverse_width = 1.0f / static_cast<float>(width);
  const int row_in_block = threadIdx.x / kThreadsPerRow;
  const int grid_rows = gridDim.x * kRowsPerBlock;

  if constexpr (kOverlaps) {
    ptx::griddepcontrol_launch_dependents();
    ptx::griddepcontrol_wait();
  }
  RowPart<Weight> held_weight;
  if constexpr (kHasWeight && kHoldWeight) held_weight.load(weight, weight_step, width, true);

  RowInput input;
  const auto load = [&](int row) { input.load(x_rows, residual_rows, row, extents, width, row < rows); };
  if constexpr (kPrefetch) load(blockIdx.x * kRowsPerBlock + row_in_block);

  int turn = 0;  // the scratch that the next reduction uses: two in turns, see block_reduce
  for (int first = blockIdx.x * kRowsPerBlock; first < rows; first += grid_rows) {
    const int row = first + row_in_block;
    const bool present = row < rows;
    if constexpr (!kPrefetch) load(row);
    RowValues values;
    input.take(values, sum_rows, row, extents, width, present);
    if constexpr (kPrefetch) load(row + grid_rows);

    const float reciprocal = reciprocal_rms(values, inverse_width, eps, scratch, turn);

    Element* y_row = y_rows.row(row, extents);
#pragma unroll
    for (int v = 0; v < kVectorsPerThread; ++v) {
      if (!present || !row_holds(v, width)) continue;
      float factors[kVectorSize];
      if constexpr (kHasWeight && kHoldWeight) held_weight.vectors[v].to_floats(factors);
      if constexpr (kHasWeight && !kHoldWeight) load_floats(weight + column_offset(row_column(v), weight_step), factors);
#pragma unroll
      for (int i = 0; i < kVectorSize; ++i) {
        values[v][i] *= reciprocal;
        if constexpr (kHasWeight) values[v][i] *= factors[i] + weight_offset;
      }
      store_floats(y_row + column_offset(row_column(v), y_step), values[v]);
    }
  }
}
