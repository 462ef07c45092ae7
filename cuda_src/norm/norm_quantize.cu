// Layer norm or RMS norm of rows that fit in registers, with e4m3 codes as its result.
//
//   y = rms_norm or, with kCentred, layer_norm of v (rms_norm.cu, layer_norm.cu), in fp32 and not rounded
//   scale = max |y| / 448 over the row, or with kBlockScales over each 128 neighbours of it       codes = e4m3(y / scale)
//   v = x, or with kHasResidual v = x + residual, which is also written, rounded to Element, to `sum` (row_input.cuh).
//
// x, residual, codes, sum: rows of `width` elements; scale: fp32 rows of one element, or of ceil(width / 128)
// (row_address.cuh). weight, bias: [width] of types Weight and Bias. y / scale is y times the reciprocal of the rounded scale.
// Bytes moved a row: width * (sizeof(Element) + 1), with a residual width * (3 * sizeof(Element) + 1); and the scales.
//
// Work: as in rms_norm.cu, without its walk over rows. With kBlockScales the lanes whose vectors make up 128 neighbours find
// their largest magnitude by shuffles, so a row's threads are a multiple of them. sum may be x or residual.
// kOverlaps: as in rms_norm.cu.
#include "common/e4m3_codes.cuh"
#include "common/row_address.cuh"
#include "common/row_in_registers.cuh"
#include "norm/normalize_row.cuh"
#include "norm/row_input.cuh"
#include "ptx/grid_dependency.cuh"

using namespace cki;

constexpr int kBlock = 128;
constexpr int kBlockLanes = kBlockScales ? kBlock / kVectorSize : 1;
static_assert(kBlockLanes <= 32 && kThreadsPerRow % kBlockLanes == 0, "a block of 128 is of one warp and of one row");

extern "C" __global__ void __launch_bounds__(kThreadsPerRow* kRowsPerBlock, kMinBlocks)
    norm_quantize(const Element* x, const Element* residual, const Weight* weight, const Bias* bias, u8* codes, float* scale,
                  Element* sum, int rows, int width, int extent1, int extent2, i64 x_stride0, i64 x_stride1, i64 x_stride2,
                  i64 x_step, i64 residual_stride0, i64 residual_stride1, i64 residual_stride2, i64 residual_step,
                  i64 codes_stride0, i64 codes_stride1, i64 codes_stride2, i64 codes_step, i64 scale_stride0,
                  i64 scale_stride1, i64 scale_stride2, i64 scale_step, i64 sum_stride0, i64 sum_stride1, i64 sum_stride2,
                  i64 sum_step, i64 weight_step, i64 bias_step, float eps, float weight_offset) {
  static_assert(kRowsPerBlock == 1 || kThreadsPerRow <= 32, "a row of several warps takes the whole block");
  __shared__ __align__(16) float scratch[2][1][kRowWarps];
  __shared__ __align__(16) float moment_scratch[2][2][kRowWarps];
  __shared__ __align__(16) float largest_scratch[1][kRowWarps];

  const RowExtents extents{extent1, extent2};
  const RowTensor<const Element> x_rows{x, x_stride0, x_stride1, x_stride2, x_step};
  const RowTensor<const Element> residual_rows{residual, residual_stride0, residual_stride1, residual_stride2, residual_step};
  const RowTensor<u8> codes_rows{codes, codes_stride0, codes_stride1, codes_stride2, codes_step};
  const RowTensor<float> scale_rows{scale, scale_stride0, scale_stride1, scale_stride2, scale_step};
  const RowTensor<Element> sum_rows{sum, sum_stride0, sum_stride1, sum_stride2, sum_step};
  const float inverse_width = 1.0f / static_cast<float>(width);
  const int row = blockIdx.x * kRowsPerBlock + threadIdx.x / kThreadsPerRow;
  const bool present = kRowsPerBlock == 1 || row < rows;  // threads without a row take part in the warp's reductions

  if constexpr (kOverlaps) {
    ptx::griddepcontrol_launch_dependents();
    ptx::griddepcontrol_wait();
  }
  RowInput input;
  input.load(x_rows, residual_rows, row, extents, width, present);
  RowValues values;
  input.take(values, sum_rows, row, extents, width, present);

  float centre = 0.0f, reciprocal;
  if constexpr (kCentred) {
    const Centred centred = centre_row(values, width, inverse_width, eps, scratch[0], moment_scratch);
    centre = centred.mean_of_deviations;
    reciprocal = centred.reciprocal;
  } else {
    int turn = 0;
    reciprocal = reciprocal_rms(values, inverse_width, eps, scratch, turn);
  }
  float row_largest = 0.0f;
#pragma unroll
  for (int v = 0; v < kVectorsPerThread; ++v) {
    float factors[kVectorSize] = {}, shifts[kVectorSize] = {};
    const bool held = present && row_holds(v, width);
    if constexpr (kHasWeight)
      if (held) load_floats(weight + column_offset(row_column(v), weight_step), factors);
    if constexpr (kHasBias)
      if (held) load_floats(bias + column_offset(row_column(v), bias_step), shifts);
#pragma unroll
    for (int i = 0; i < kVectorSize; ++i) {
      float result = (values[v][i] - centre) * reciprocal;
      if constexpr (kHasWeight) result *= factors[i] + weight_offset;
      if constexpr (kHasBias) result += shifts[i];
      values[v][i] = held ? result : 0.0f;
    }
    row_largest = largest_finite(row_largest, values[v]);
  }

  float row_scale = 1.0f;
  if constexpr (!kBlockScales) row_scale = e4m3_scale(row_reduce<Max>(row_largest, largest_scratch));
  float inverse = inverse_of_scale(row_scale);
  u8* codes_row = codes_rows.row(row, extents);
  float* scale_row = scale_rows.row(row, extents);
  if constexpr (!kBlockScales)
    if (present && threadIdx.x % kThreadsPerRow == 0) *scale_row = row_scale;
#pragma unroll
  for (int v = 0; v < kVectorsPerThread; ++v) {
    const int column = row_column(v);
    const bool held = present && row_holds(v, width);
    if constexpr (kBlockScales) {
      const float block_scale = e4m3_scale(warp_max<kBlockLanes>(largest_finite(0.0f, values[v])));
      inverse = inverse_of_scale(block_scale);
      if (held && column % kBlock == 0) scale_row[column / kBlock * scale_step] = block_scale;
    }
    if (held) store_e4m3(codes_row + column_offset(column, codes_step), values[v], inverse);
  }
}
