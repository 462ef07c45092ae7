// Rows as e4m3 with a scale a row, of rows that do not fit in registers. Formula and arguments as in quantize_fp8_rows.cu.
//
// One block a row; a pass for the largest magnitude and one for the codes, which reads the row from L2.
#include "common/e4m3_codes.cuh"
#include "common/reduce.cuh"
#include "common/row_address.cuh"
#include "pointwise/long_row.cuh"

using namespace cki;

extern "C" __global__ void __launch_bounds__(kThreadsPerRow, kMinBlocks)
    quantize_fp8_rows_long(const Element* x, u8* codes, float* scale, int rows, int width, int extent1, int extent2,
                           i64 x_stride0, i64 x_stride1, i64 x_stride2, i64 x_step, i64 codes_stride0, i64 codes_stride1,
                           i64 codes_stride2, i64 codes_step, i64 scale_stride0, i64 scale_stride1, i64 scale_stride2,
                           i64 scale_step) {
  __shared__ __align__(16) float scratch[1][kRowWarps];

  const RowExtents extents{extent1, extent2};
  const int row = blockIdx.x;  // one block for each of `rows`
  const Element* x_row = RowTensor<const Element>{x, x_stride0, x_stride1, x_stride2, x_step}.row(row, extents);
  u8* codes_row = RowTensor<u8>{codes, codes_stride0, codes_stride1, codes_stride2, codes_step}.row(row, extents);

  float largest = 0.0f;
  for_each_vector(x_row, x_step, width, [&](int, const float(&values)[kVectorSize]) {
    largest = largest_finite(largest, values);
  });
  const float row_scale = e4m3_scale(block_max(largest, scratch));
  const float inverse = inverse_of_scale(row_scale);
  if (threadIdx.x == 0)
    *RowTensor<float>{scale, scale_stride0, scale_stride1, scale_stride2, scale_step}.row(row, extents) = row_scale;
  for_each_vector(x_row, x_step, width, [&](int column, const float(&values)[kVectorSize]) {
    store_e4m3(codes_row + column_offset(column, codes_step), values, inverse);
  });
}
