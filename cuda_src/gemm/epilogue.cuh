// y = act(sum + bias) + residual, from the accumulators to global memory without a detour through shared memory.
//
// A lane holds pairs of neighbouring columns (2t, 2t+1), t = lane % 4, of rows g and g + 8, g = lane / 4. Where y and the
// residual allow it (kVector = 2) a pair is one access; the four lanes of a row then fill 16 bytes (16-bit types).
// The residual is read by the thread that writes the same element afterwards, so it may be y itself.
#pragma once

#include "common/convert_element.cuh"
#include "common/types.cuh"
#include "common/vec.cuh"
#include "gemm/activation.cuh"

namespace cki::gemm {

// A rows x columns matrix in global memory.
template <class T, class Offset>
struct Matrix {
  T* data;
  Offset row_offset;
  i64 column_stride;
};

// values = elements (0, 1) from p, those of them that are inside the matrix (`inside`: 1 or 2); else zero.
template <int kVector, class Element>
__device__ __forceinline__ void load_pair(float (&values)[2], const Element* p, i64 column_stride, int inside) {
  values[1] = 0.0f;
  if constexpr (kVector == 2) {
    if (inside == 2) {
      load_floats(p, values);
      return;
    }
  }
  values[0] = to_float(p[0]);
  if (inside == 2) values[1] = to_float(p[column_stride]);
}

template <int kVector, class Element>
__device__ __forceinline__ void store_pair(Element* p, i64 column_stride, int inside, const float (&values)[2]) {
  if constexpr (kVector == 2) {
    if (inside == 2) {
      store_floats(p, values);
      return;
    }
  }
  p[0] = from_float<Element>(values[0]);
  if (inside == 2) p[column_stride] = from_float<Element>(values[1]);
}

// sum: the warp's tiles, from row `first_row` and column `first_column` of the rows x columns result.
// bias: null where there is none, else one value a column.  residual.data: null where there is none.
template <Activation kActivation, bool kHasBias, bool kHasResidual, int kVectorY, int kVectorResidual, int kTilesM,
          int kTilesN, class Element, class Bias, class Offset>
__device__ __forceinline__ void write_result(const float (&sum)[kTilesM][kTilesN][4], const Bias* bias,
                                             i64 bias_stride, const Matrix<const Element, Offset>& residual,
                                             const Matrix<Element, Offset>& y, int first_row, int rows, int first_column,
                                             int columns) {
  const int lane = static_cast<int>(threadIdx.x) % 32;
  const int first_lane_column = first_column + lane % 4 * 2;
  float bias_pair[kTilesN][2] = {};
  if constexpr (kHasBias) {
#pragma unroll
    for (int j = 0; j < kTilesN; ++j) {
      const int column = first_lane_column + j * 8;
      if (column < columns) load_pair<1>(bias_pair[j], bias + column * bias_stride, bias_stride, min(columns - column, 2));
    }
  }
#pragma unroll
  for (int i = 0; i < kTilesM; ++i) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int row = first_row + i * 16 + half * 8 + lane / 4;
      if (row >= rows) continue;
      Element* y_row = y.data + y.row_offset(row);
      const Element* residual_row = kHasResidual ? residual.data + residual.row_offset(row) : nullptr;
#pragma unroll
      for (int j = 0; j < kTilesN; ++j) {
        const int column = first_lane_column + j * 8;
        if (column >= columns) continue;
        const int inside = min(columns - column, 2);
        float values[2];
#pragma unroll
        for (int e = 0; e < 2; ++e) values[e] = activate<kActivation>(sum[i][j][half * 2 + e] + bias_pair[j][e]);
        if constexpr (kHasResidual) {
          float added[2];
          load_pair<kVectorResidual>(added, residual_row + column * residual.column_stride, residual.column_stride, inside);
          values[0] += added[0];
          values[1] += added[1];
        }
        store_pair<kVectorY>(y_row + column * y.column_stride, y.column_stride, inside, values);
      }
    }
  }
}

}  // namespace cki::gemm
