// The finish of a product whose K is split over warps and over the blocks of a cluster: parts added in a fixed order, then
// y = act(sum + bias) + residual.
//
// Every warp leaves its part of the tile's sums in its block's shared memory, in planes of kBlockM rows. An item is four
// neighbouring columns of a row, 16 bytes. A block adds its own planes, warp 0 first; then the blocks of the cluster share
// out the items, and each adds the blocks' sums of its items, rank 0 first. Items of rows and columns past the end of the
// result are left out.
#pragma once

#include "common/types.cuh"
#include "gemm/activation.cuh"
#include "gemm/epilogue.cuh"
#include "ptx/cluster.cuh"
#include "ptx/memory.cuh"

namespace cki::gemm {

template <int kBlockM, int kBlockN, int kWarpsK, int kSplit, int kThreads>
struct SkinnyFinish {
  int first_row;
  int rows;  // of the result, as columns
  int first_column;
  int columns;
  int rank;  // of the block in its cluster

  // A row of a plane, in floats: 8 banks past a multiple of 32. Eight rows' pairs of a fragment store then fall into different
  // banks.
  static constexpr int kPitch = (kBlockN + 31) / 32 * 32 + 8;
  static constexpr int kPlane = kBlockM * kPitch;
  static constexpr int kRowItems = kBlockN / 4;

  __device__ __forceinline__ int items() const { return min(rows - first_row, kBlockM) * kRowItems; }
  static __device__ __forceinline__ int offset_of(int item) { return item / kRowItems * kPitch + item % kRowItems * 4; }
  // The items that this block of the cluster finishes: one, or one of every kStep, a thread.
  static constexpr int kStep = kSplit * kThreads;
  __device__ __forceinline__ int first_item() const { return rank * kThreads + static_cast<int>(threadIdx.x); }

  // Towards L2: what `write` will read of bias and residual.
  template <bool kHasBias, bool kHasResidual, class Bias, class Element, class Offset>
  __device__ __forceinline__ void prefetch(const Bias* bias, i64 bias_stride,
                                           const Matrix<const Element, Offset>& residual) const {
    if constexpr (kHasBias || kHasResidual) {
#pragma unroll 1
      for (int item = first_item(); item < items(); item += kStep) {
        const int column = first_column + item % kRowItems * 4;
        if (column >= columns) continue;
        if (kHasBias && item < kRowItems) ptx::prefetch_global_l2(bias + column * bias_stride);
        if constexpr (kHasResidual) {
          const int row = first_row + item / kRowItems;
          ptx::prefetch_global_l2(residual.data + residual.row_offset(row) + column * residual.column_stride);
        }
      }
    }
  }

  // sum: the fragments of warp `plane` of those that split K, for its columns from `column` of the tile on.
  template <int kTilesM, int kTilesN>
  __device__ __forceinline__ void keep_part(const float (&sum)[kTilesM][kTilesN][4], float* parts, int plane,
                                            int column) const {
    const int lane = static_cast<int>(threadIdx.x) % 32;
    float* first = parts + plane * kPlane + lane / 4 * kPitch + column + lane % 4 * 2;
#pragma unroll
    for (int i = 0; i < kTilesM; ++i) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
#pragma unroll
        for (int j = 0; j < kTilesN; ++j) {
          *reinterpret_cast<float2*>(first + (i * 16 + half * 8) * kPitch + j * 8) =
              make_float2(sum[i][j][half * 2], sum[i][j][half * 2 + 1]);
        }
      }
    }
  }

  // Called behind a barrier that follows keep_part. dot(row, column): the plain product, for sums that are NaN (kRepair).
  template <Activation kActivation, bool kHasBias, bool kHasResidual, bool kRepair, int kVectorY, int kVectorResidual,
            class Bias, class Element, class Offset, class Dot>
  __device__ __forceinline__ void write(float* parts, const Bias* bias, i64 bias_stride,
                                        const Matrix<const Element, Offset>& residual, const Matrix<Element, Offset>& y,
                                        const Dot& dot) const {
    if constexpr (kSplit > 1) {
      if constexpr (kWarpsK > 1) {
#pragma unroll 1
        for (int item = static_cast<int>(threadIdx.x); item < items(); item += kThreads)
          *reinterpret_cast<float4*>(parts + offset_of(item)) = sum_of_warps(parts + offset_of(item));
      }
      ptx::cluster_sync();
    }
#pragma unroll 1
    for (int item = first_item(); item < items(); item += kStep) {
      const int row = first_row + item / kRowItems;
      const int column = first_column + item % kRowItems * 4;
      if (column >= columns) continue;
      float4 sum;
      if constexpr (kSplit > 1) {
        sum = sum_of_blocks(parts + offset_of(item));
      } else {
        sum = sum_of_warps(parts + offset_of(item));
      }
      float values[2][2] = {{sum.x, sum.y}, {sum.z, sum.w}};
#pragma unroll
      for (int pair = 0; pair < 2; ++pair) {
        const int pair_column = column + pair * 2;
        if (pair_column >= columns) continue;
        const int inside = min(columns - pair_column, 2);
        if constexpr (kRepair) {
#pragma unroll
          for (int e = 0; e < 2; ++e) {
            if (e < inside && values[pair][e] != values[pair][e]) values[pair][e] = dot(row, pair_column + e);
          }
        }
        float addend[2] = {};
        if constexpr (kHasBias) load_pair<1>(addend, bias + pair_column * bias_stride, bias_stride, inside);
#pragma unroll
        for (int e = 0; e < 2; ++e) values[pair][e] = activate<kActivation>(values[pair][e] + addend[e]);
        if constexpr (kHasResidual) {
          const Element* from = residual.data + residual.row_offset(row) + pair_column * residual.column_stride;
          load_pair<kVectorResidual>(addend, from, residual.column_stride, inside);
          values[pair][0] += addend[0];
          values[pair][1] += addend[1];
        }
        store_pair<kVectorY>(y.data + y.row_offset(row) + pair_column * y.column_stride, y.column_stride, inside,
                             values[pair]);
      }
    }
    if constexpr (kSplit > 1) {
      // A block's shared memory stays while a peer may read it. What this thread has read is in its results, so the arrival
      // has nothing to order, and does not wait until those have reached memory.
      ptx::cluster_arrive_relaxed();
      ptx::cluster_wait();
    }
  }

 private:
  static __device__ __forceinline__ float4 plus(float4 a, float4 b) {
    return make_float4(a.x + b.x, a.y + b.y, a.z + b.z, a.w + b.w);
  }

  static __device__ __forceinline__ float4 sum_of_warps(const float* item) {
    float4 sum = *reinterpret_cast<const float4*>(item);
#pragma unroll
    for (int plane = 1; plane < kWarpsK; ++plane)
      sum = plus(sum, *reinterpret_cast<const float4*>(item + plane * kPlane));
    return sum;
  }

  static __device__ __forceinline__ float4 sum_of_blocks(const float* item) {
    float4 blocks[kSplit];  // all loads before the first addition: a peer's memory is a long way off
#pragma unroll
    for (int peer = 0; peer < kSplit; ++peer)
      blocks[peer] = ptx::load_shared_cluster_f32x4(ptx::map_shared_rank(item, static_cast<u32>(peer)));
    float4 sum = blocks[0];
#pragma unroll
    for (int peer = 1; peer < kSplit; ++peer) sum = plus(sum, blocks[peer]);
    return sum;
  }
};

}  // namespace cki::gemm
