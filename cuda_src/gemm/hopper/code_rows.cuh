// Rows of e4m3 codes and their scales, as few_rows_fp8.cu writes and reads them: eight lanes have 128 neighbours of a row (RowPart).
//
//   scale = the largest |value| of the 128 / 448, code = e4m3(value / scale)                       (e4m3_codes.cuh)
//   or, kTwoParts, a power of two, and codes of two parts, eight rows apart                        (e4m3_parts.cuh)
#pragma once

#include "common/e4m3_codes.cuh"
#include "common/e4m3_parts.cuh"
#include "common/reduce.cuh"
#include "common/types.cuh"
#include "gemm/hopper/row_slabs.cuh"

namespace cki::gemm {

// Dense: codes of `columns`, scales of one in 128.
template <bool kTwoParts>
struct CodeRows {
  u8* codes;
  float* scales;
  int columns;

  // By whole warps. stored: whether there is such a row.
  __device__ __forceinline__ void write(int lane, const RowPart& values, int row, int group, bool stored) const {
    float largest = 0.0f;
#pragma unroll
    for (int i = 0; i < 4; ++i) largest = largest_finite(largest, values[i]);
    largest = warp_max<8>(largest);
    float scale, inverse;
    if constexpr (kTwoParts) {
      power_of(largest, inverse, scale);
    } else {
      scale = e4m3_scale(largest);
      inverse = inverse_of_scale(scale);
    }
    if (!stored) return;
    u8* to = codes + static_cast<i64>(kTwoParts ? row / 8 * 16 + row % 8 : row) * columns + group * 128 + first_column(lane);
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      if constexpr (kTwoParts) {
        u16 high[2], low[2];
        split_pair(values[i][0] * inverse, values[i][1] * inverse, high[0], low[0]);
        split_pair(values[i][2] * inverse, values[i][3] * inverse, high[1], low[1]);
        *reinterpret_cast<u32*>(to + i * 32) = high[0] | static_cast<u32>(high[1]) << 16;
        *reinterpret_cast<u32*>(to + i * 32 + 8 * static_cast<i64>(columns)) = low[0] | static_cast<u32>(low[1]) << 16;
      } else {
        store_e4m3<4>(to + i * 32, values[i], inverse);
      }
    }
    if (lane % 8 == 0) scales[row * static_cast<i64>(columns / 128) + group] = scale;
  }
};

}  // namespace cki::gemm
