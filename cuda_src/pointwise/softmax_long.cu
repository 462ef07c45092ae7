// Softmax over rows that do not fit in a block's registers. Formula, arguments and roundings as in softmax.cu.
//
// One block a row; a pass for the maximum and the sum together, each thread keeping its sum relative to the largest value
// that it has seen (Milakov and Gimelshein 2018, arXiv:1805.02867), and one for the output, which reads the row from L2.
#include "common/reduce.cuh"
#include "common/row_address.cuh"
#include "pointwise/keep_mask.cuh"
#include "pointwise/long_row.cuh"
#include "ptx/math.cuh"

using namespace cki;

extern "C" __global__ void __launch_bounds__(kThreadsPerRow, kMinBlocks)
    softmax_long(const Element* x, const u8* mask, Element* y, int rows, int width, int extent1, int extent2, i64 x_stride0,
                 i64 x_stride1, i64 x_stride2, i64 x_step, i64 mask_stride0, i64 mask_stride1, i64 mask_stride2,
                 i64 mask_step, i64 y_stride0, i64 y_stride1, i64 y_stride2, i64 y_step, float exponent_scale) {
  __shared__ __align__(16) float largest_scratch[1][kRowWarps];
  __shared__ __align__(16) float total_scratch[1][kRowWarps];

  const RowExtents extents{extent1, extent2};
  const int row = blockIdx.x;  // one block for each of `rows`
  const Element* x_row = RowTensor<const Element>{x, x_stride0, x_stride1, x_stride2, x_step}.row(row, extents);
  const u8* mask_row = RowTensor<const u8>{mask, mask_stride0, mask_stride1, mask_stride2, mask_step}.row(row, extents);
  Element* y_row = RowTensor<Element>{y, y_stride0, y_stride1, y_stride2, y_step}.row(row, extents);

  // Hidden values become -infinity.
  const auto hide = [&](int column, float(&values)[kVectorSize]) {
    if constexpr (kHasMask) {
      bool keep[kVectorSize];
      load_mask(mask_row + column * mask_step, mask_step, keep);
#pragma unroll
      for (int i = 0; i < kVectorSize; ++i) values[i] = keep[i] ? values[i] : Max::identity();
    }
  };
  const auto weight = [&](float value, float largest) { return ptx::ex2_approx((value - largest) * exponent_scale); };
  // What is subtracted for a maximum: see softmax.cu.
  const auto finite = [](float largest) { return largest == Max::identity() ? 0.0f : largest; };

  float largest = Max::identity(), total = 0.0f;
  for_each_vector(x_row, x_step, width, [&](int column, float(&values)[kVectorSize]) {
    hide(column, values);
    float new_largest = largest;
#pragma unroll
    for (int i = 0; i < kVectorSize; ++i) new_largest = fmaxf(new_largest, values[i]);
    if (new_largest != largest) {
      total *= weight(largest, new_largest);
      largest = new_largest;
    }
#pragma unroll
    for (int i = 0; i < kVectorSize; ++i) total += weight(values[i], finite(largest));
  });
  const float row_largest = finite(block_max(largest, largest_scratch));
  if (total != 0.0f) total *= weight(largest, row_largest);  // a thread that saw nothing has no maximum to relate to
  total = block_sum(total, total_scratch);
  const float reciprocal = total == 0.0f ? 0.0f : 1.0f / total;

  for_each_vector(x_row, x_step, width, [&](int column, float(&values)[kVectorSize]) {
    hide(column, values);
#pragma unroll
    for (int i = 0; i < kVectorSize; ++i) values[i] = weight(values[i], row_largest) * reciprocal;
    store_floats(y_row + column_offset(column, y_step), values);
  });
}
