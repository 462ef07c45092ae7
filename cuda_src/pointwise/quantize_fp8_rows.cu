// Rows as e4m3 with a scale a row, of rows that fit in registers.
//
//   scale[r] = max_c |x[r, c]| / 448        codes[r, c] = e4m3(x[r, c] / scale[r])        (e4m3_codes.cuh)
//
// x, codes: rows of `width` elements (row_address.cuh). scale: fp32, one element a row. x / scale is x times the reciprocal
// of the rounded scale. Bytes moved a row: width * (sizeof(Element) + 1) and the scale.
// Work: as in norm/rms_norm.cu; a row lives in the registers of a part of a warp, a warp, or a block, and is read once.
#include "common/e4m3_codes.cuh"
#include "common/row_address.cuh"
#include "common/row_in_registers.cuh"

using namespace cki;

extern "C" __global__ void __launch_bounds__(kThreadsPerRow* kRowsPerBlock, kMinBlocks)
    quantize_fp8_rows(const Element* x, u8* codes, float* scale, int rows, int width, int extent1, int extent2,
                      i64 x_stride0, i64 x_stride1, i64 x_stride2, i64 x_step, i64 codes_stride0, i64 codes_stride1,
                      i64 codes_stride2, i64 codes_step, i64 scale_stride0, i64 scale_stride1, i64 scale_stride2,
                      i64 scale_step) {
  static_assert(kRowsPerBlock == 1 || kThreadsPerRow <= 32, "a row of several warps takes the whole block");
  __shared__ __align__(16) float scratch[1][kRowWarps];

  const RowExtents extents{extent1, extent2};
  const int row = blockIdx.x * kRowsPerBlock + threadIdx.x / kThreadsPerRow;
  const bool present = kRowsPerBlock == 1 || row < rows;  // threads without a row take part in the warp's reduction

  RowPart<Element> input;
  input.load(RowTensor<const Element>{x, x_stride0, x_stride1, x_stride2, x_step}.row(row, extents), x_step, width, present);
  RowValues values;
  input.to_floats(values);
  float largest = 0.0f;
#pragma unroll
  for (int v = 0; v < kVectorsPerThread; ++v) largest = largest_finite(largest, values[v]);
  const float row_scale = e4m3_scale(row_reduce<Max>(largest, scratch));
  const float inverse = inverse_of_scale(row_scale);
  if (!present) return;

  if (threadIdx.x % kThreadsPerRow == 0)
    *RowTensor<float>{scale, scale_stride0, scale_stride1, scale_stride2, scale_step}.row(row, extents) = row_scale;
  u8* codes_row = RowTensor<u8>{codes, codes_stride0, codes_stride1, codes_stride2, codes_step}.row(row, extents);
#pragma unroll
  for (int v = 0; v < kVectorsPerThread; ++v)
    if (row_holds(v, width)) store_e4m3(codes_row + column_offset(row_column(v), codes_step), values[v], inverse);
}
