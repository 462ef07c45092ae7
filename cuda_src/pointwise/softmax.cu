// Softmax over rows that fit in registers.
//
//   y[r, c] = exp(scale * (x[r, c] - m)) / sum_c exp(scale * (x[r, c] - m)),  m = max_c x[r, c]
//
// over the columns that `mask` keeps; hidden ones give 0 and are not looked at. A row with nothing to see (all hidden or
// -infinity) gives zeros. The maximum is taken off before the scale is multiplied, so that no product overflows.
// exponent_scale is scale * log2(e), above 0. Arithmetic is fp32, rounded once.
//
// x, y, mask: rows of `width` elements (row_address.cuh). Bytes moved a row: 2 * width * sizeof(Element), and the mask.
// Work: as in norm/rms_norm.cu; a row lives in the registers of a part of a warp, a warp, or a block, and is read once.
// y may be x.
#include "common/row_address.cuh"
#include "common/row_in_registers.cuh"
#include "pointwise/keep_mask.cuh"
#include "ptx/math.cuh"

using namespace cki;

extern "C" __global__ void __launch_bounds__(kThreadsPerRow* kRowsPerBlock, kMinBlocks)
    softmax(const Element* x, const u8* mask, Element* y, int rows, int width, int extent1, int extent2, i64 x_stride0,
            i64 x_stride1, i64 x_stride2, i64 x_step, i64 mask_stride0, i64 mask_stride1, i64 mask_stride2, i64 mask_step,
            i64 y_stride0, i64 y_stride1, i64 y_stride2, i64 y_step, float exponent_scale) {
  static_assert(kRowsPerBlock == 1 || kThreadsPerRow <= 32, "a row of several warps takes the whole block");
  __shared__ __align__(16) float largest_scratch[1][kRowWarps];
  __shared__ __align__(16) float total_scratch[1][kRowWarps];

  const RowExtents extents{extent1, extent2};
  const int row = blockIdx.x * kRowsPerBlock + threadIdx.x / kThreadsPerRow;
  const bool present = kRowsPerBlock == 1 || row < rows;  // threads without a row take part in the warp's reductions

  RowPart<Element> input;
  input.load(RowTensor<const Element>{x, x_stride0, x_stride1, x_stride2, x_step}.row(row, extents), x_step, width, present);
  bool keep[kVectorsPerThread][kVectorSize] = {};
  if constexpr (kHasMask) {
    const u8* mask_row = RowTensor<const u8>{mask, mask_stride0, mask_stride1, mask_stride2, mask_step}.row(row, extents);
#pragma unroll
    for (int v = 0; v < kVectorsPerThread; ++v)
      if (present && row_holds(v, width)) load_mask(mask_row + row_column(v) * mask_step, mask_step, keep[v]);
  }

  RowValues values;
  input.to_floats(values);
  float largest = Max::identity();
#pragma unroll
  for (int v = 0; v < kVectorsPerThread; ++v) {
#pragma unroll
    for (int i = 0; i < kVectorSize; ++i) {
      if (!present || !row_holds(v, width)) values[v][i] = Max::identity();
      if constexpr (kHasMask) values[v][i] = keep[v][i] ? values[v][i] : Max::identity();
      largest = fmaxf(largest, values[v][i]);
    }
  }
  largest = row_reduce<Max>(largest, largest_scratch);
  if (largest == Max::identity()) largest = 0.0f;  // -inf - -inf is NaN; -inf - 0 gives the weight 0

  float total = 0.0f;
  for_each_value(values, [&](float& value) {
    value = ptx::ex2_approx((value - largest) * exponent_scale);
    total += value;
  });
  total = row_reduce<Sum>(total, total_scratch);
  const float reciprocal = total == 0.0f ? 0.0f : 1.0f / total;  // a total of NaN stays one

  Element* y_row = RowTensor<Element>{y, y_stride0, y_stride1, y_stride2, y_step}.row(row, extents);
#pragma unroll
  for (int v = 0; v < kVectorsPerThread; ++v) {
    if (!present || !row_holds(v, width)) continue;
#pragma unroll
    for (int i = 0; i < kVectorSize; ++i) values[v][i] *= reciprocal;
    store_floats(y_row + column_offset(row_column(v), y_step), values[v]);
  }
}
