// RMS norm of rows that do not fit in a block's registers. Formula, arguments and roundings as in rms_norm.cu.
//
// One block a row; a pass for the sum of squares and one for the output. The second reads the row from L2: the rows in
// flight take 132 SMs * 128 KB = 17 MB at 64K bf16 elements, under an H200's 60 MB. Bytes from memory a row as in
// rms_norm.cu, and half as many again from L2. The largest magnitude is taken along, so that a row whose squares leave the
// range of fp32 (fp32_range.cuh) costs one more pass and no second kernel.
#include "common/row_address.cuh"
#include "norm/fp32_range.cuh"
#include "norm/row_in_memory.cuh"

using namespace cki;

extern "C" __global__ void __launch_bounds__(kThreadsPerRow, kMinBlocks)
    rms_norm_long(const Element* x, const Element* residual, const Weight* weight, Element* y, Element* sum, int rows,
                  int width, int extent1, int extent2, i64 x_stride0, i64 x_stride1, i64 x_stride2, i64 x_step,
                  i64 residual_stride0, i64 residual_stride1, i64 residual_stride2, i64 residual_step, i64 y_stride0,
                  i64 y_stride1, i64 y_stride2, i64 y_step, i64 sum_stride0, i64 sum_stride1, i64 sum_stride2, i64 sum_step,
                  i64 weight_step, float eps, float weight_offset) {
  __shared__ __align__(16) float sum_scratch[1][kRowWarps];
  __shared__ __align__(16) float largest_scratch[1][kRowWarps];

  const RowExtents extents{extent1, extent2};
  const RowTensor<const Element> x_rows{x, x_stride0, x_stride1, x_stride2, x_step};
  const RowTensor<const Element> residual_rows{residual, residual_stride0, residual_stride1, residual_stride2, residual_step};
  const RowTensor<Element> y_rows{y, y_stride0, y_stride1, y_stride2, y_step};
  const RowTensor<Element> sum_rows{sum, sum_stride0, sum_stride1, sum_stride2, sum_step};
  const float inverse_width = 1.0f / static_cast<float>(width);

  for (int index = blockIdx.x; index < rows; index += gridDim.x) {
    const LongRow row{x_rows.row(index, extents), kHasResidual ? residual_rows.row(index, extents) : nullptr, x_step,
                      residual_step};
    float total = 0.0f, largest = 0.0f;
    for_each_value(row, width, [&](float value) {
      total = fmaf(value, value, total);
      largest = fmaxf(largest, fabsf(value));
    });
    float mean_square = block_sum(total, sum_scratch) * inverse_width;
    largest = block_max(largest, largest_scratch);
    float scale = 1.0f, row_eps = eps;
    if (!mean_square_in_range(mean_square, eps)) {
      scale = power_of_two_scale(largest, eps);
      row_eps = scaled_eps(eps, scale);
      total = 0.0f;
      for_each_value(row, width, [&](float value) { total = fmaf(value * scale, value * scale, total); });
      mean_square = block_sum(total, sum_scratch) * inverse_width;
      __syncthreads();  // the next row's reduction writes sum_scratch first
    }
    const float reciprocal = rsqrtf(mean_square + row_eps);

    Element* y_row = y_rows.row(index, extents);
    for_each_vector(width, [&](int column) {
      float values[kVectorSize], factors[kVectorSize];
      Vector<Element, kVectorSize> rounded_sum;
      row.take(column, values, rounded_sum);
      if constexpr (kHasResidual) rounded_sum.store(sum_rows.row(index, extents) + column_offset(column, sum_step));
      if constexpr (kHasWeight) load_floats(weight + column_offset(column, weight_step), factors);
#pragma unroll
      for (int i = 0; i < kVectorSize; ++i) {
        values[i] = values[i] * scale * reciprocal;
        if constexpr (kHasWeight) values[i] *= factors[i] + weight_offset;
      }
      store_floats(y_row + column_offset(column, y_step), values);
    });
  }
}
