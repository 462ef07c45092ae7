// Norms of rows inside a product: statistics of the rows that it writes, and what it does with those of rows it reads.
//
// Statistics of a row are the mean and the sum of squared deviations of each 64 columns, in places of their own: the
// same bits in every run, and no cancellation where the mean is large (Chan, Golub, LeVeque 1983). Then
//
//   LN(x) w = rstd (x - mean) w = rstd x w,  where every column of w sums to zero, as `cki.prepare` makes it
//   RMS(x) w = rstd x w
//
// so that a norm costs the product one factor for each row. Weights of the norm are in w, its bias in the product's.
// Rows with |mean| > kLargestMean standard deviations are multiplied again, as (x - mean) w in fp32: too much of their
// sums on the tensor cores, which truncate, has cancelled.
#pragma once

#include "common/convert_element.cuh"
#include "common/types.cuh"
#include "gemm/hopper/tiles.cuh"

namespace cki::gemm {

// What the product does with norms of rows. The numbers are those of cki/ops/linear_hopper.py.
enum class RowNorm { kNone = 0, kLayerNorm = 1, kRmsNorm = 2, kResidual = 3 };

constexpr float kLargestMean = 32.0f;

// Over the four lanes that have a row of wgmma's accumulators between them.
__device__ __forceinline__ float quad_sum(float value) {
  value += __shfl_xor_sync(0xffffffffu, value, 1);
  return value + __shfl_xor_sync(0xffffffffu, value, 2);
}

// Of the two rows of a lane in each 16 x 64 part of a warp: rows lane / 4 and lane / 4 + 8.
template <int kRowTiles>
struct RowMoments {
  float mean[kRowTiles][2], rstd[kRowTiles][2];

  // statistics: [rows, ceil(columns / 64), 2]. first_row: of the warp's first row tile; the next is 64 rows below. All
  // lanes take part. centred: deviations from the mean, else from zero.
  __device__ __forceinline__ void load(const float* statistics, int first_row, int rows, int columns, float epsilon,
                                       bool centred) {
    const int lane = static_cast<int>(threadIdx.x) % 32, slots = (columns + kSlabColumns - 1) / kSlabColumns;
    const float2* row_slots[kRowTiles][2];
    float squares[kRowTiles][2];
#pragma unroll
    for (int i = 0; i < kRowTiles * 2; ++i) {
      const int row = min(first_row + i / 2 * 64 + i % 2 * 8 + lane / 4, rows - 1);
      row_slots[i / 2][i % 2] = reinterpret_cast<const float2*>(statistics) + static_cast<i64>(row) * slots;
      mean[i / 2][i % 2] = squares[i / 2][i % 2] = 0.0f;
    }
    const float inverse = 1.0f / static_cast<float>(columns);
    for (int slot = lane % 4; centred && slot < slots; slot += 4) {
      const float share = inverse * static_cast<float>(min(columns - slot * kSlabColumns, kSlabColumns));
#pragma unroll
      for (int i = 0; i < kRowTiles * 2; ++i) mean[i / 2][i % 2] += row_slots[i / 2][i % 2][slot].x * share;
    }
#pragma unroll
    for (int i = 0; i < kRowTiles * 2; ++i) mean[i / 2][i % 2] = quad_sum(mean[i / 2][i % 2]);
    for (int slot = lane % 4; slot < slots; slot += 4) {
      const float count = static_cast<float>(min(columns - slot * kSlabColumns, kSlabColumns));
#pragma unroll
      for (int i = 0; i < kRowTiles * 2; ++i) {
        const float2 part = row_slots[i / 2][i % 2][slot];
        const float apart = part.x - mean[i / 2][i % 2];
        squares[i / 2][i % 2] += fmaf(count * apart, apart, part.y);
      }
    }
#pragma unroll
    for (int i = 0; i < kRowTiles * 2; ++i) {
      rstd[i / 2][i % 2] = rsqrtf(quad_sum(squares[i / 2][i % 2]) * inverse + epsilon);
    }
  }

  __device__ __forceinline__ bool is_cancelled(int i, int half) const {
    return fabsf(mean[i][half]) * rstd[i][half] > kLargestMean;
  }

  // Of any of the lane's rows.
  __device__ __forceinline__ bool any_cancelled() const {
    bool any = false;
#pragma unroll
    for (int i = 0; i < kRowTiles * 2; ++i) any = any || is_cancelled(i / 2, i % 2);
    return any;
  }
};

// The operands of a product where they lie: x[row, k] at x + row * x_row + k, w[k, n] at w + k * w_k + n * w_n.
template <class Element>
struct Operands {
  const Element* x;
  const Element* w;
  i64 x_row, w_k, w_n;
  int rows, columns, depth;
};

// sum = (x - mean) w for the lane's rows that have cancelled; the others keep theirs. (first_row, first_column): of the
// warp's part of the tile.
template <int kRowTiles, int kCount, class Element>
__device__ __forceinline__ void multiply_again(float (&sum)[kRowTiles][kCount], const RowMoments<kRowTiles>& moments,
                                               const Operands<Element>& operands, int first_row, int first_column) {
  const int lane = static_cast<int>(threadIdx.x) % 32;
  const Element* x[kRowTiles][2];
#pragma unroll
  for (int i = 0; i < kRowTiles * 2; ++i) {
    const int row = min(first_row + i / 2 * 64 + i % 2 * 8 + lane / 4, operands.rows - 1);
    x[i / 2][i % 2] = operands.x + row * operands.x_row;
    if (!moments.is_cancelled(i / 2, i % 2)) continue;
#pragma unroll
    for (int at = i % 2 * 2; at < kCount; at += 4) sum[i / 2][at] = sum[i / 2][at + 1] = 0.0f;
  }
#pragma unroll 1
  for (int k = 0; k < operands.depth; ++k) {
    float value[kRowTiles][2];
#pragma unroll
    for (int i = 0; i < kRowTiles * 2; ++i) {
      const bool again = moments.is_cancelled(i / 2, i % 2);
      value[i / 2][i % 2] = again ? to_float(x[i / 2][i % 2][k]) - moments.mean[i / 2][i % 2] : 0.0f;
    }
#pragma unroll
    for (int at = 0; at < kCount; at += 4) {
#pragma unroll
      for (int e = 0; e < 2; ++e) {
        const int column = min(first_column + at * 2 + lane % 4 * 2 + e, operands.columns - 1);
        const float factor = to_float(operands.w[k * operands.w_k + column * operands.w_n]);
#pragma unroll
        for (int i = 0; i < kRowTiles * 2; ++i) {
          float& total = sum[i / 2][at + i % 2 * 2 + e];
          total = moments.is_cancelled(i / 2, i % 2) ? fmaf(value[i / 2][i % 2], factor, total) : total;
        }
      }
    }
  }
}

// Statistics of a slab of 16 rows x 64 columns as it is stored: words[j][half] are columns 8 j + lane % 4 * 2 and the
// next, of row lane / 4 + 8 half. statistics: of the lane's upper row, in this slab; row_stride: floats between rows.
// `blocks` eights of columns exist, and rows_left rows from the lane's upper one on.
template <class Element>
__device__ __forceinline__ void store_statistics(const u32 (&words)[kSlabColumns / 8][2], float* statistics,
                                                 i64 row_stride, int blocks, int rows_left) {
  const float inverse = 1.0f / static_cast<float>(blocks * 8);
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    float sum = 0.0f, squares = 0.0f;
#pragma unroll
    for (int j = 0; j < kSlabColumns / 8; ++j) {
      float first, second;
      unpack_pair<Element>(words[j][half], first, second);
      if (j < blocks) sum += first + second;
    }
    const float mean = quad_sum(sum) * inverse;
#pragma unroll
    for (int j = 0; j < kSlabColumns / 8; ++j) {
      float first, second;
      unpack_pair<Element>(words[j][half], first, second);
      first -= mean;
      second -= mean;
      if (j < blocks) squares = fmaf(first, first, fmaf(second, second, squares));
    }
    squares = quad_sum(squares);
    if (threadIdx.x % 4 == 0 && half * 8 < rows_left) {
      *reinterpret_cast<float2*>(statistics + half * 8 * row_stride) = make_float2(mean, squares);
    }
  }
}

}  // namespace cki::gemm
