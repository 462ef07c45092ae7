// fp32 products with infinities, where 3xTF32 (fragments.cuh) has no answer: inf - tf32(inf) is NaN, and so is a value so
// near the largest fp32 that tf32 rounds it to infinity. A sum that came out as NaN is therefore computed once more by
// plain fp32 additions from global memory. If it is NaN again, it is one; that is slow, and no result that anyone wants.
#pragma once

#include "common/types.cuh"

namespace cki::gemm {

// sum: the warp's tiles from row `first_row`, column `first_column` of the rows x columns result.
// dot(row, column): the plain product.
template <int kTilesM, int kTilesN, class Dot>
__device__ __forceinline__ void recompute_nan(float (&sum)[kTilesM][kTilesN][4], int first_row, int rows, int first_column,
                                              int columns, const Dot& dot) {
  constexpr int kSums = kTilesM * kTilesN * 4;
  static_assert(kSums <= 32, "one bit of a word for each sum of a lane");
  u32 nan = 0;
#pragma unroll
  for (int s = 0; s < kSums; ++s) {
    const float value = sum[s / 4 / kTilesN][s / 4 % kTilesN][s % 4];
    nan |= static_cast<u32>(value != value) << s;
  }
  const int lane = static_cast<int>(threadIdx.x) % 32;
#pragma unroll 1
  for (int s = 0; s < kSums; ++s) {
    const int row = first_row + s / 4 / kTilesN * 16 + s % 4 / 2 * 8 + lane / 4;
    const int column = first_column + s / 4 % kTilesN * 8 + lane % 4 * 2 + s % 2;
    if ((nan >> s & 1) == 0 || row >= rows || column >= columns) continue;
    const float again = dot(row, column);
    // Registers have no index: each sum asks whether it is meant.
#pragma unroll
    for (int t = 0; t < kSums; ++t) {
      if (t == s) sum[t / 4 / kTilesN][t / 4 % kTilesN][t % 4] = again;
    }
  }
}

}  // namespace cki::gemm
