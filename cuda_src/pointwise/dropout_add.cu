// Dropout, and the addition of a residual.
//
//   y[r, c] = residual[r, c] + (word >= threshold ? x[r, c] * keep_scale : 0)
//   word = word i % 4 of Philox 4x32-10 with counter (i / 4, offset) and key seed,  i = the element's index in row-major order
//
// threshold = p * 2^32 and keep_scale = 1 / (1 - p). The decision depends on the element's index in the tensor's shape, on
// seed and on offset, and on nothing else: not on strides, type, tiling or device. seed and offset lie in device memory, so
// a captured graph that advances the offset drops other elements at each replay.
//
// x, residual, y: rows of `width` elements (row_address.cuh); index_stride0..2 and first_index give the index of a row's
// first element. seed, offset: one 64-bit integer each. Arithmetic is fp32, rounded once.
// Bytes moved a row: 3 * width * sizeof(Element), without a residual 2 *. y may be x or residual.
//
// One Philox call serves four neighbours. Vectors of four or more start at multiples of four, because the width is one then;
// a shorter vector needs a call of its own.
#include "common/philox.cuh"
#include "common/row_address.cuh"
#include "common/vec.cuh"
#include "pointwise/tile.cuh"

using namespace cki;

extern "C" __global__ void __launch_bounds__(kThreads, kMinBlocks)
    dropout_add(const Element* x, const Element* residual, Element* y, const u64* seed, const u64* offset, int rows,
                int width, int extent1, int extent2, i64 x_stride0, i64 x_stride1, i64 x_stride2, i64 x_step,
                i64 residual_stride0, i64 residual_stride1, i64 residual_stride2, i64 residual_step, i64 y_stride0,
                i64 y_stride1, i64 y_stride2, i64 y_step, i64 index_stride0, i64 index_stride1, i64 index_stride2,
                i64 first_index, u32 threshold, float keep_scale) {
  constexpr int kCallSize = kVectorSize < 4 ? kVectorSize : 4;  // elements that one Philox call decides
  const int row = tile_row();
  if (kRowsPerBlock > 1 && row >= rows) return;
  const RowExtents extents{extent1, extent2};
  const Element* x_row = RowTensor<const Element>{x, x_stride0, x_stride1, x_stride2, x_step}.row(row, extents);
  const Element* residual_row = residual;
  if constexpr (kHasResidual)
    residual_row = RowTensor<const Element>{residual, residual_stride0, residual_stride1, residual_stride2,
                                            residual_step}.row(row, extents);
  Element* y_row = RowTensor<Element>{y, y_stride0, y_stride1, y_stride2, y_step}.row(row, extents);
  const i64 row_index =
      first_index + RowTensor<Element>{nullptr, index_stride0, index_stride1, index_stride2, 1}.offset(row, extents);
  const u64 key = *seed, stream = *offset;

  for_each_tile(width, [&](int first) {
    Vector<Element, kVectorSize> inputs[kVectorsPerThread];
    Vector<Element, kVectorSize> residuals[kVectorsPerThread];
#pragma unroll
    for (int v = 0; v < kVectorsPerThread; ++v) {
      const int column = tile_column(first, v);
      if (!in_row(column, width)) continue;
      inputs[v].load(x_row + column_offset(column, x_step));
      if constexpr (kHasResidual) residuals[v].load(residual_row + column_offset(column, residual_step));
    }
#pragma unroll
    for (int v = 0; v < kVectorsPerThread; ++v) {
      const int column = tile_column(first, v);
      if (!in_row(column, width)) continue;
      float values[kVectorSize], addends[kVectorSize];
      inputs[v].to_floats(values);
      if constexpr (kHasResidual) residuals[v].to_floats(addends);
#pragma unroll
      for (int call = 0; call < kVectorSize; call += kCallSize) {
        const u64 index = static_cast<u64>(row_index + column + call);
        const PhiloxWords words = philox_4x32_10(index / 4, stream, key);
#pragma unroll
        for (int i = 0; i < kCallSize; ++i) {
          u32 word = words.word[i];
          if constexpr (kCallSize < 4) {
            const u32 place = static_cast<u32>(index + i) % 4;
            word = place < 2 ? (place == 0 ? words.word[0] : words.word[1]) : (place == 2 ? words.word[2] : words.word[3]);
          }
          float kept = word >= threshold ? values[call + i] * keep_scale : 0.0f;
          if constexpr (kHasResidual) kept += addends[call + i];
          values[call + i] = kept;
        }
      }
      store_floats(y_row + column_offset(column, y_step), values);
    }
  });
}
