// The statistics of a row in registers, safe from leaving the range of fp32 (fp32_range.cuh).
//
// Prelude constants: as for common/row_in_registers.cuh. Values are changed in place: what the functions return is to be
// applied to them.
#pragma once

#include "common/row_in_registers.cuh"
#include "norm/fp32_range.cuh"

namespace cki {

// r = rsqrt(mean(v^2) + eps): the RMS norm is v * r. `turn` says which scratch the next reduction uses, two in turns as
// block_reduce asks for; a kernel that walks over rows keeps it from row to row.
__device__ __forceinline__ float reciprocal_rms(RowValues& values, float inverse_width, float eps,
                                                float (&scratch)[2][1][kRowWarps], int& turn) {
  const auto mean_of_squares = [&] {
    float total = 0.0f;
    for_each_value(values, [&](float value) { total = fmaf(value, value, total); });
    turn ^= 1;
    return row_reduce<Sum>(total, scratch[turn]) * inverse_width;
  };
  float mean_square = mean_of_squares();
  if (any_row_of_warp(!mean_square_in_range(mean_square, eps))) {
    float largest = 0.0f;
    for_each_value(values, [&](float value) { largest = fmaxf(largest, fabsf(value)); });
    turn ^= 1;
    const float scale = power_of_two_scale(row_reduce<Max>(largest, scratch[turn]), eps);
    for_each_value(values, [&](float& value) { value *= scale; });
    eps = scaled_eps(eps, scale);
    mean_square = mean_of_squares();
  }
  return rsqrtf(mean_square + eps);
}

// Layer norm is (d - mean_of_deviations) * reciprocal, d being what values are left as: their deviations from a rounded mean.
//   d = v - m,  e = mean(d),  variance = mean(d^2) - e^2 (e^2 is tiny beside mean(d^2))
struct Centred {
  float mean_of_deviations, reciprocal;
};

__device__ __forceinline__ Centred centre_row(RowValues& values, int width, float inverse_width, float eps,
                                              float (&mean_scratch)[1][kRowWarps],
                                              float (&moment_scratch)[2][2][kRowWarps]) {
  // The mean of terms v/width instead of the sum over width: it does not overflow before a value does.
  float mean = 0.0f;
  for_each_value(values, [&](float value) { mean = fmaf(value, inverse_width, mean); });
  mean = finite_mean(row_reduce<Sum>(mean, mean_scratch));
  const auto subtract = [&](float centre) {
#pragma unroll
    for (int v = 0; v < kVectorsPerThread; ++v)
#pragma unroll
      for (int i = 0; i < kVectorSize; ++i)  // columns past the width stay zero
        values[v][i] = row_holds(v, width) ? values[v][i] - centre : 0.0f;
  };
  subtract(mean);

  float moments[2];  // mean(d), mean(d^2)
  const auto take_moments = [&](float (&scratch)[2][kRowWarps]) {
    moments[0] = moments[1] = 0.0f;
    for_each_value(values, [&](float value) {
      moments[0] += value;
      moments[1] = fmaf(value, value, moments[1]);
    });
    row_reduce<Sum>(moments, scratch);
    moments[0] *= inverse_width;
    moments[1] *= inverse_width;
  };
  take_moments(moment_scratch[0]);
  if (any_row_of_warp(!deviations_in_range(moments, eps))) {
    float limits[2] = {Max::identity(), Max::identity()};
#pragma unroll
    for (int v = 0; v < kVectorsPerThread; ++v)
#pragma unroll
      for (int i = 0; i < kVectorSize; ++i)
        if (row_holds(v, width)) {
          limits[0] = fmaxf(limits[0], values[v][i]);
          limits[1] = fmaxf(limits[1], -values[v][i]);
        }
    row_reduce<Max>(limits, moment_scratch[1]);
    const float scale = deviations_scale(limits, eps);
    for_each_value(values, [&](float& value) { value *= scale; });
    for (float& limit : limits) limit *= scale;
    eps = scaled_eps(eps, scale);
    take_moments(moment_scratch[0]);
    subtract(mean_within(limits, moments[0]));
    take_moments(moment_scratch[1]);
  }
  const float variance = fmaxf(fmaf(-moments[0], moments[0], moments[1]), 0.0f);
  return {moments[0], rsqrtf(variance + eps)};
}

}  // namespace cki
