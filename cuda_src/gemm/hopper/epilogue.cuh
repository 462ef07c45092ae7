// y = act(sum + bias) + residual from wgmma accumulators to global memory, 16 rows x 64 columns of a warp at a time.
//
// Rules is a struct of constants: kActivation, kHasBias, kHasResidual, kTmaStore, kVectorY, kVectorBias,
// kVectorResidual. With kTmaStore a warp packs such a slab into one of its two buffers in shared memory (stmatrix,
// swizzled), and one lane starts a TMA store, which skips rows and columns past the end; the next slab is computed
// meanwhile. No warp waits for another. TMA writes whole units of 16 bytes, so the planner asks for it only where a row
// of y is a multiple of them. Otherwise the lanes store pairs or single elements themselves.
//
// The residual is read by the warp that writes the same elements afterwards, so it may be y itself.
#pragma once

#include "common/convert_element.cuh"
#include "common/swizzle.cuh"
#include "common/types.cuh"
#include "gemm/activation.cuh"
#include "gemm/epilogue.cuh"
#include "gemm/hopper/tiles.cuh"
#include "ptx/bulk.cuh"
#include "ptx/fence.cuh"
#include "ptx/stmatrix.cuh"
#include "ptx/tma.cuh"
#include "ptx/wgmma.cuh"

namespace cki::gemm {

// Row offsets of a matrix whose rows are evenly spaced.
struct EvenRows {
  i64 stride;
  __device__ __forceinline__ i64 operator()(int row) const { return row * stride; }
};

// A warp's buffers for what it stores. One lane issues and waits, because bulk groups belong to a thread.
struct OutputBuffers {
  unsigned char* memory;
  int next = 0;

  // All lanes: the buffer to fill next; its last store has been read.
  __device__ __forceinline__ unsigned char* acquire() const {
    if (threadIdx.x % 32 == 0) ptx::bulk_wait_group_read<kOutputBuffers - 1>();
    __syncwarp();
    return memory + next * kWarpSlabBytes;
  }

  // All lanes: the buffer has been written; store it.
  __device__ __forceinline__ void store(const TensorMap* y_map, int column, int row) {
    ptx::fence_proxy_async_shared();
    __syncwarp();
    if (threadIdx.x % 32 == 0) {
      ptx::tma_store_2d(y_map, memory + next * kWarpSlabBytes, column, row);
      ptx::bulk_commit_group();
    }
    next = (next + 1) % kOutputBuffers;
  }

  // Before the thread exits: shared memory must outlive the reads of the last stores.
  __device__ __forceinline__ void drain() const {
    if (threadIdx.x % 32 == 0) ptx::bulk_wait_group_read<0>();
  }
};

// Two neighbouring elements as they lie in memory: 16-bit ones take half the registers of two floats.
template <class T>
struct Pair {
  u32 word = 0;

  // From p; the second is zero where only one is inside.
  template <int kVector>
  __device__ __forceinline__ void load(const T* p, i64 column_stride, int inside) {
    if (kVector == 2 && inside == 2) {
      word = *reinterpret_cast<const u32*>(p);
    } else {
      word = p[0].bits | (inside == 2 ? static_cast<u32>(p[column_stride].bits) << 16 : 0u);
    }
  }
  __device__ __forceinline__ void add_to(float (&values)[2]) const {
    float first, second;
    unpack_pair<T>(word, first, second);
    values[0] += first;
    values[1] += second;
  }
};

template <>
struct Pair<float> {
  float values[2] = {};

  template <int kVector>
  __device__ __forceinline__ void load(const float* p, i64 column_stride, int inside) {
    load_pair<kVector>(values, p, column_stride, inside);
  }
  __device__ __forceinline__ void add_to(float (&sums)[2]) const {
    sums[0] += values[0];
    sums[1] += values[1];
  }
};

// What the sums go through, and where they go. column_strides in elements, row strides in the matrices.
template <class Element, class Bias>
struct Result {
  const Bias* bias;
  i64 bias_stride;
  Matrix<const Element, EvenRows> residual;
  Matrix<Element, EvenRows> y;
  const TensorMap* y_map;
  int rows;
  int columns;
};

// One slab: sum[kFirst..] are its accumulators; it begins at (first_row, first_column), which are inside the result.
template <class Rules, int kFirst, int kCount, class Element, class Bias>
__device__ __forceinline__ void write_slab(const float (&sum)[kCount], const Result<Element, Bias>& result,
                                           OutputBuffers& buffers, int first_row, int first_column) {
  constexpr int kBlocks = kSlabColumns / 8;  // of eight columns, two of them this lane's
  // An opaque copy: else the compiler computes what depends on the lane before the loop over all tiles, and keeps it in
  // registers through the products, which have none to spare.
  u32 opaque[1] = {threadIdx.x % 32};
  ptx::wgmma_fence_registers(opaque);
  const int lane = static_cast<int>(opaque[0]);
  const int row = first_row + lane / 4, column = first_column + lane % 4 * 2;
  // How many of the lane's two columns of block j exist. What TMA stores has whole blocks only.
  const auto inside_of = [&](int j) {
    if constexpr (Rules::kTmaStore) return first_column + j * 8 < result.columns ? 2 : 0;
    return min(result.columns - column - j * 8, 2);
  };

  // All loads of the slab before the first use: one latency.
  Pair<Bias> bias[kBlocks];
  Pair<Element> added[kBlocks][2];
#pragma unroll
  for (int j = 0; j < kBlocks; ++j) {
    const int at = column + j * 8, inside = inside_of(j);
    if (inside <= 0) continue;
    if constexpr (Rules::kHasBias) {
      bias[j].template load<Rules::kVectorBias>(result.bias + at * result.bias_stride, result.bias_stride, inside);
    }
    if constexpr (Rules::kHasResidual) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        if (row + half * 8 >= result.rows) continue;
        const Element* source = result.residual.data + result.residual.row_offset(row + half * 8);
        added[j][half].template load<Rules::kVectorResidual>(source + at * result.residual.column_stride,
                                                      result.residual.column_stride, inside);
      }
    }
  }
  const auto finish = [&](int j, int half, float(&values)[2]) {
#pragma unroll
    for (int e = 0; e < 2; ++e) values[e] = sum[kFirst + j * 4 + half * 2 + e];
    if constexpr (Rules::kHasBias) bias[j].add_to(values);
#pragma unroll
    for (int e = 0; e < 2; ++e) values[e] = activate<Rules::kActivation>(values[e]);
    if constexpr (Rules::kHasResidual) added[j][half].add_to(values);
  };
  if constexpr (Rules::kTmaStore) {
    unsigned char* buffer = buffers.acquire();
#pragma unroll
    for (int j = 0; j < kBlocks; j += 2) {
      u32 words[4];  // blocks j and j + 1, each with its upper and lower eight rows
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        float values[2];
        finish(j + i / 2, i % 2, values);
        words[i] = pack_pair<Element>(values[0], values[1]);
      }
      const u32 offset = static_cast<u32>((lane % 16) * kSpan + (j + lane / 16) * 16);
      ptx::stmatrix_x4(buffer + swizzle<kSpan>(offset), words);
    }
    buffers.store(result.y_map, first_column, first_row);
  } else {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      if (row + half * 8 >= result.rows) continue;
      Element* target = result.y.data + result.y.row_offset(row + half * 8);
#pragma unroll
      for (int j = 0; j < kBlocks; ++j) {
        const int at = column + j * 8, inside = inside_of(j);
        if (inside <= 0) continue;
        float values[2];
        finish(j, half, values);
        store_pair<Rules::kVectorY>(target + at * result.y.column_stride, result.y.column_stride, inside, values);
      }
    }
  }
}

// The warp's part, rows [first_row, +16) of each 64, of a tile of kCount * 2 columns.
template <class Rules, int kFirst = 0, int kCount, class Element, class Bias>
__device__ __forceinline__ void write_rows(const float (&sum)[kCount], const Result<Element, Bias>& result,
                                           OutputBuffers& buffers, int first_row, int first_column) {
  if (first_row >= result.rows || first_column >= result.columns) return;
  write_slab<Rules, kFirst>(sum, result, buffers, first_row, first_column);
  if constexpr (kFirst + kSlabColumns / 2 < kCount) {
    write_rows<Rules, kFirst + kSlabColumns / 2>(sum, result, buffers, first_row, first_column + kSlabColumns);
  }
}

}  // namespace cki::gemm
