// Norms of x's rows for tiles whose sums leave no registers: a warp leaves the rows' moments, and the bias of its columns, in
// shared memory while it multiplies, and computes rows in which too much cancels (row_norm.cuh) when its sums have been stored.
#pragma once

#include "common/convert_element.cuh"
#include "common/types.cuh"
#include "gemm/activation.cuh"
#include "gemm/hopper/epilogue.cuh"
#include "gemm/hopper/row_norm.cuh"
#include "ptx/bulk.cuh"

namespace cki::gemm {

// Of a warp's part of a tile: rows [0, 16) of each 64, kColumns columns.
template <int kRowTiles, int kColumns, class Bias>
struct ParkedRows {
  static constexpr int kRows = kRowTiles * 16;
  static constexpr int kBytes = kRows * static_cast<int>(sizeof(float2)) + kColumns * 4;  // of a warp

  unsigned char* memory;

  __device__ __forceinline__ float2* moments() const { return reinterpret_cast<float2*>(memory); }
  __device__ __forceinline__ Bias* bias() const { return reinterpret_cast<Bias*>(moments() + kRows); }

  // (mean, rstd) of the lane's i-th row: rows lane / 4 and lane / 4 + 8 of each 16.
  __device__ __forceinline__ float2 of(int i) const { return moments()[i * 8 + static_cast<int>(threadIdx.x) % 32 / 4]; }

  // The lane's share of the bias, asked for before what else a tile begins with.
  struct Share {
    Bias bias[kColumns / 32];
  };
  template <class Element>
  static __device__ __forceinline__ Share load(const Result<Element, Bias>& result, int first_column) {
    Share found;
#pragma unroll
    for (int i = 0; i < kColumns / 32; ++i) {
      const int column = first_column + i * 32 + static_cast<int>(threadIdx.x) % 32;
      found.bias[i] = result.bias[min(column, result.columns - 1) * result.bias_stride];
    }
    return found;
  }

  // All lanes, before a tile's products, when all have read what belonged to the tile before.
  __device__ __forceinline__ void park(const RowMoments<kRowTiles>& found) const {
    __syncwarp();
#pragma unroll
    for (int i = 0; i < kRowTiles * 2; ++i) {
      if (threadIdx.x % 4 == 0) moments()[i * 8 + static_cast<int>(threadIdx.x) % 32 / 4] = found.of(i);
    }
    __syncwarp();
  }
  __device__ __forceinline__ void park(const RowMoments<kRowTiles>& found, const Share& share) const {
    __syncwarp();
#pragma unroll
    for (int i = 0; i < kColumns / 32; ++i) bias()[i * 32 + static_cast<int>(threadIdx.x) % 32] = share.bias[i];
    park(found);
  }

  // All lanes, behind the stores of a tile with rows in which too much has cancelled: these are act((x - mean) w rstd + bias),
  // in fp32. (first_row, first_column): of the warp's part of the tile.
  template <class Rules, class Element>
  __device__ __forceinline__ void repair(const Operands<Element>& operands, const Result<Element, Bias>& result,
                                         float epsilon, int first_row, int first_column) const {
    ptx::bulk_wait_group<0>();  // of the lane that stores: then what is written here comes later
    __syncwarp();
#pragma unroll 1
    for (int i = 0; i < kRows; ++i) {
      const int row = first_row + i / 16 * 64 + i % 16;
      if (row >= result.rows || !have_cancelled(moments()[i])) continue;
      const Element* const x = operands.x + row * operands.x_row;
      const float2 found = computed_moments(x, static_cast<int>(threadIdx.x) % 4, operands.depth, epsilon);
      const int end = min(first_column + kColumns, result.columns);
#pragma unroll 1
      for (int column = first_column + static_cast<int>(threadIdx.x) % 32; column < end; column += 32) {
        float value = 0.0f;
#pragma unroll 1
        for (int k = 0; k < operands.depth; ++k) {
          const float factor = to_float(operands.w[k * operands.w_k + column * operands.w_n]);
          value = fmaf(to_float(x[k]) - found.x, factor, value);
        }
        value *= found.y;
        if constexpr (Rules::kHasBias) value += to_float(bias()[column - first_column]);
        result.y.data[result.y.row_offset(row) + column * result.y.column_stride] = finished<Rules, Element>(value);
      }
    }
  }

 private:
  template <class Rules, class Element>
  static __device__ __forceinline__ Element finished(float value) {
    if constexpr (Rules::kActivation == Activation::kGelu) {
      return from_float<Element>(gelu_for(value, ElementTag<Element>{}));
    } else if constexpr (Rules::kActivation == Activation::kGeluPairs) {
      return Element{static_cast<u16>(gelu_pair(pack_pair<Element>(value, value)))};
    } else {
      return from_float<Element>(activate<Rules::kActivation>(value));
    }
  }
};

}  // namespace cki::gemm
