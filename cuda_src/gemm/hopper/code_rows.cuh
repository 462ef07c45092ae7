// Rows of e4m3 codes and their scales, as few_rows_fp8.cu writes and reads them: a warp has 128 neighbours of a row, four a lane.
//
//   scale = the largest |value| of the 128 / 448, code = e4m3(value / scale)                       (e4m3_codes.cuh)
//   or, kTwoParts, a power of two, and codes of two parts, eight rows apart                        (e4m3_parts.cuh)
#pragma once

#include "common/e4m3_codes.cuh"
#include "common/e4m3_parts.cuh"
#include "common/reduce.cuh"
#include "common/types.cuh"

namespace cki::gemm {

// Dense: codes of `columns`, scales of one in 128.
template <bool kTwoParts>
struct CodeRows {
  u8* codes;
  float* scales;
  int columns;

  // By whole warps. stored: whether there is such a row.
  __device__ __forceinline__ void write(int lane, const float (&values)[4], int row, int group, bool stored) const {
    const float largest = warp_max(largest_finite(0.0f, values));
    const i64 first_row = kTwoParts ? row / 8 * 16 + row % 8 : row;
    u8* to = codes + first_row * columns + group * 128 + lane * 4;
    float scale;
    if constexpr (kTwoParts) {
      float up;
      power_of(largest, up, scale);
      u16 high[2], low[2];
      split_pair(values[0] * up, values[1] * up, high[0], low[0]);
      split_pair(values[2] * up, values[3] * up, high[1], low[1]);
      if (stored) {
        *reinterpret_cast<u32*>(to) = high[0] | static_cast<u32>(high[1]) << 16;
        *reinterpret_cast<u32*>(to + 8 * static_cast<i64>(columns)) = low[0] | static_cast<u32>(low[1]) << 16;
      }
    } else {
      scale = e4m3_scale(largest);
      if (stored) store_e4m3<4>(to, values, inverse_of_scale(scale));
    }
    if (stored && lane == 0) scales[row * static_cast<i64>(columns / 128) + group] = scale;
  }
};

}  // namespace cki::gemm
