// Layer norm of rows that do not fit in a block's registers. Formula, arguments and roundings as in layer_norm.cu.
//
// One block a row; a pass for the mean, one for the moments of the deviations, one for the output. The second and third read
// the row from L2 (see rms_norm_long.cu). Three passes and not a running (Welford) mean and variance, because a division an
// element and merges between threads cost more than an L2 read, and the deviations from a finished mean are more exact. Rows
// that fp32_range.cuh is about take two passes more.
#include "common/row_address.cuh"
#include "norm/fp32_range.cuh"
#include "norm/row_in_memory.cuh"

using namespace cki;

extern "C" __global__ void __launch_bounds__(kThreadsPerRow, kMinBlocks)
    layer_norm_long(const Element* x, const Element* residual, const Weight* weight, const Bias* bias, Element* y,
                    Element* sum, int rows, int width, int extent1, int extent2, i64 x_stride0, i64 x_stride1,
                    i64 x_stride2, i64 x_step, i64 residual_stride0, i64 residual_stride1, i64 residual_stride2,
                    i64 residual_step, i64 y_stride0, i64 y_stride1, i64 y_stride2, i64 y_step, i64 sum_stride0,
                    i64 sum_stride1, i64 sum_stride2, i64 sum_step, i64 weight_step, i64 bias_step, float eps) {
  __shared__ __align__(16) float mean_scratch[1][kRowWarps];
  __shared__ __align__(16) float moment_scratch[2][2][kRowWarps];

  const RowExtents extents{extent1, extent2};
  const RowTensor<const Element> x_rows{x, x_stride0, x_stride1, x_stride2, x_step};
  const RowTensor<const Element> residual_rows{residual, residual_stride0, residual_stride1, residual_stride2, residual_step};
  const RowTensor<Element> y_rows{y, y_stride0, y_stride1, y_stride2, y_step};
  const RowTensor<Element> sum_rows{sum, sum_stride0, sum_stride1, sum_stride2, sum_step};
  const float inverse_width = 1.0f / static_cast<float>(width);

  for (int index = blockIdx.x; index < rows; index += gridDim.x) {
    const LongRow row{x_rows.row(index, extents), kHasResidual ? residual_rows.row(index, extents) : nullptr, x_step,
                      residual_step};
    float mean = 0.0f;
    for_each_value(row, width, [&](float value) { mean = fmaf(value, inverse_width, mean); });
    mean = finite_mean(block_sum(mean, mean_scratch));

    float scale = 1.0f, centre = 0.0f;
    float limits[2] = {Max::identity(), Max::identity()};
    float moments[2];  // of the deviations d = (v - mean) * scale - centre: mean(d), mean(d^2)
    const auto take_moments = [&](float (&scratch)[2][kRowWarps]) {
      moments[0] = moments[1] = 0.0f;
      for_each_value(row, width, [&](float value) {
        const float deviation = fmaf(value - mean, scale, -centre);
        moments[0] += deviation;
        moments[1] = fmaf(deviation, deviation, moments[1]);
        limits[0] = fmaxf(limits[0], deviation);
        limits[1] = fmaxf(limits[1], -deviation);
      });
      block_reduce<Sum>(moments, scratch);
      moments[0] *= inverse_width;
      moments[1] *= inverse_width;
    };
    take_moments(moment_scratch[0]);
    float row_eps = eps;
    if (!deviations_in_range(moments, eps)) {
      block_reduce<Max>(limits, moment_scratch[1]);
      scale = deviations_scale(limits, eps);
      const float scaled[2] = {limits[0] * scale, limits[1] * scale};
      row_eps = scaled_eps(eps, scale);
      take_moments(moment_scratch[0]);
      centre = mean_within(scaled, moments[0]);
      take_moments(moment_scratch[1]);
    }
    const float variance = fmaxf(fmaf(-moments[0], moments[0], moments[1]), 0.0f);
    const float reciprocal = rsqrtf(variance + row_eps);

    Element* y_row = y_rows.row(index, extents);
    for_each_vector(width, [&](int column) {
      float values[kVectorSize], factors[kVectorSize], shifts[kVectorSize];
      Vector<Element, kVectorSize> rounded_sum;
      row.take(column, values, rounded_sum);
      if constexpr (kHasResidual) rounded_sum.store(sum_rows.row(index, extents) + column_offset(column, sum_step));
      if constexpr (kHasWeight) load_floats(weight + column_offset(column, weight_step), factors);
      if constexpr (kHasBias) load_floats(bias + column_offset(column, bias_step), shifts);
#pragma unroll
      for (int i = 0; i < kVectorSize; ++i) {
        values[i] = (fmaf(values[i] - mean, scale, -centre) - moments[0]) * reciprocal;
        if constexpr (kHasWeight) values[i] *= factors[i];
        if constexpr (kHasBias) values[i] += shifts[i];
      }
      store_floats(y_row + column_offset(column, y_step), values);
    });
  }
}
