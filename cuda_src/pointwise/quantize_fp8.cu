// Values as e4m3, with a scale for each 128 neighbours of a row or with one given scale.
//
//   scale[r, b] = max |x[r, c]| / 448 over c of block b      codes[r, c] = e4m3(x[r, c] / scale[r, c / 128])
//   or kGivenScale: scale [1] is read, codes[r, c] = e4m3(x[r, c] / scale)                            (e4m3_codes.cuh)
//
// x, codes: rows of `width` elements (row_address.cuh). scale: fp32 rows of ceil(width / 128) elements, of any strides (a
// GEMM may want them transposed). x / scale is x times the reciprocal of the rounded scale.
// Bytes moved: sizeof(Element) + 1 an element, and the scales.
//
// Work: tiles as in tile.cuh. The 16 or 32 neighbouring lanes whose vectors make up a block of 128 find its largest magnitude
// by shuffles, so a row's threads are a multiple of them. Rows that cannot move in vectors of kVectorSize (odd widths or
// addresses, steps) move element by element, each thread still owning kVectorSize neighbours (kVectorAccess = false).
// kOverlaps (sm_90): the launch may begin while the one before it ends, of which it waits for all, and the next one beside it.
#include "common/e4m3_codes.cuh"
#include "common/reduce.cuh"
#include "common/row_address.cuh"
#include "pointwise/tile.cuh"
#include "ptx/grid_dependency.cuh"

using namespace cki;

constexpr int kBlock = 128;
constexpr int kBlockLanes = kBlock / kVectorSize;
static_assert(kGivenScale || kThreadsPerRow % kBlockLanes == 0, "blocks of 128 do not straddle rows");

extern "C" __global__ void __launch_bounds__(kThreads, kMinBlocks)
    quantize_fp8(const Element* x, u8* codes, float* scale, int rows, int width, int extent1, int extent2, i64 x_stride0,
                 i64 x_stride1, i64 x_stride2, i64 x_step, i64 codes_stride0, i64 codes_stride1, i64 codes_stride2,
                 i64 codes_step, i64 scale_stride0, i64 scale_stride1, i64 scale_stride2, i64 scale_step) {
  const int row = tile_row();
  const bool present = kRowsPerBlock == 1 || row < rows;  // all lanes of a warp take part in the shuffles
  const RowExtents extents{extent1, extent2};
  const Element* x_row = RowTensor<const Element>{x, x_stride0, x_stride1, x_stride2, x_step}.row(row, extents);
  u8* codes_row = RowTensor<u8>{codes, codes_stride0, codes_stride1, codes_stride2, codes_step}.row(row, extents);
  float* scale_row = scale;
  float inverse = 1.0f, raise = 1.0f;
  if constexpr (kOverlaps) {
    ptx::griddepcontrol_launch_dependents();
    ptx::griddepcontrol_wait();
  }
  if constexpr (kGivenScale) {
    // The reciprocal of a scale below 2^-126 could be infinite, and zero times that NaN: x and scale are raised alike.
    if (*scale < 1.17549435e-38f) raise = 18446744073709551616.0f;  // 2^64
    inverse = 1.0f / (*scale * raise);
  } else {
    scale_row = RowTensor<float>{scale, scale_stride0, scale_stride1, scale_stride2, scale_step}.row(row, extents);
  }

  for_each_tile(width, [&](int first) {
    Vector<Element, kVectorSize> inputs[kVectorsPerThread];
    float values[kVectorsPerThread][kVectorSize] = {};
#pragma unroll
    for (int v = 0; v < kVectorsPerThread; ++v) {
      const int column = tile_column(first, v);
      if constexpr (kVectorAccess) {
        inputs[v].fill_zero();
        if (present && in_row(column, width)) inputs[v].load(x_row + column);
      } else {
#pragma unroll
        for (int i = 0; i < kVectorSize; ++i)
          if (present && column + i < width) values[v][i] = to_float(x_row[(column + i) * x_step]);
      }
    }
#pragma unroll
    for (int v = 0; v < kVectorsPerThread; ++v) {
      const int column = tile_column(first, v);
      if constexpr (kVectorAccess) inputs[v].to_floats(values[v]);
      if constexpr (kGivenScale) {
#pragma unroll
        for (int i = 0; i < kVectorSize; ++i) values[v][i] *= raise;
      } else {
        const float block_scale = e4m3_scale(warp_max<kBlockLanes>(largest_finite(0.0f, values[v])));
        inverse = inverse_of_scale(block_scale);
        if (present && column < width && column % kBlock == 0) scale_row[column / kBlock * scale_step] = block_scale;
      }
      if constexpr (kVectorAccess) {
        if (present && in_row(column, width)) store_e4m3(codes_row + column, values[v], inverse);
      } else {
#pragma unroll
        for (int i = 0; i < kVectorSize; ++i)
          if (present && column + i < width) store_e4m3<1>(codes_row + (column + i) * codes_step, {values[v][i]}, inverse);
      }
    }
  });
}
