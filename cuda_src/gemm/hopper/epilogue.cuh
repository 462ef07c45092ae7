// y = act(sum + bias) + residual from wgmma accumulators to global memory, 16 rows x 64 columns of a warp at a time;
// gated, y = act(gate + bias) (up + bias), where the second half of a tile's sums are the ups of the first. A norm of
// x's rows is a factor of the sums, one of the residual's rows applies to the residual (row_norm.cuh).
//
// Rules is a struct of constants: kActivation, kHasBias, kBiasInSums (the sums have started from it), kBiasParked
// (parked_rows.cuh), kHasResidual, kGated, kTmaStore, kTmaResidual, kVectorY, kVectorBias, kVectorResidual, kRowNorm,
// kStatistics (those of y's rows are stored too, which takes kTmaStore).
//
// With kTmaStore a warp packs such a slab into one of its two buffers in shared memory (stmatrix, swizzled), and one lane
// starts a TMA store, which skips rows and columns past the end; the next slab is computed meanwhile. No warp waits for
// another. TMA writes whole units of 16 bytes, so the planner asks for it only where a row of y is a multiple of them.
// Otherwise the lanes store pairs or single elements themselves.
//
// What a slab adds is loaded a slab ahead, the first slab's beside the last products, all from L2, where it was asked for
// before the products; what belongs to the columns before the products, where registers allow.
//
// With kTmaResidual a warp has a buffer for each of its slabs, into which it asks for the residual before the products, or
// behind the first of them (TMA), and out of which it stores the result: the finish then waits for no memory.
//
// The residual is read by the warp that writes the same elements afterwards, so it may be y itself.
#pragma once

#include "common/convert_element.cuh"
#include "common/swizzle.cuh"
#include "common/types.cuh"
#include "gemm/activation.cuh"
#include "gemm/epilogue.cuh"
#include "gemm/hopper/output_buffers.cuh"
#include "gemm/hopper/row_norm.cuh"
#include "gemm/hopper/tiles.cuh"
#include "ptx/ldmatrix.cuh"
#include "ptx/memory.cuh"
#include "ptx/stmatrix.cuh"
#include "ptx/wgmma.cuh"

namespace cki::gemm {

__device__ __forceinline__ float gelu_for(float x, ElementTag<f16>) { return gelu_for_16_bits(x); }
__device__ __forceinline__ float gelu_for(float x, ElementTag<bf16>) { return gelu_for_bf16(x); }

// Row offsets of a matrix whose rows are evenly spaced.
struct EvenRows {
  i64 stride;
  __device__ __forceinline__ i64 operator()(int row) const { return row * stride; }
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
  __device__ __forceinline__ void to_floats(float (&values)[2]) const { unpack_pair<T>(word, values[0], values[1]); }
  __device__ __forceinline__ void add_to(float (&sums)[2]) const {
    float values[2];
    to_floats(values);
    sums[0] += values[0];
    sums[1] += values[1];
  }
};

template <>
struct Pair<float> {
  float values[2] = {};

  template <int kVector>
  __device__ __forceinline__ void load(const float* p, i64 column_stride, int inside) {
    load_pair<kVector>(values, p, column_stride, inside);
  }
  __device__ __forceinline__ void to_floats(float (&copy)[2]) const {
    copy[0] = values[0];
    copy[1] = values[1];
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
  const TensorMap* residual_map;
  int rows;
  int columns;
  int gate_column;  // where the bias begins, and that of the ups
  int up_column;
  const Bias* gamma;  // of the residual's norm
  float* statistics;  // of y's rows
};

// How many of a lane's two columns of block j exist, eight to a block from first_column on. What TMA stores has whole blocks
// only.
template <class Rules>
__device__ __forceinline__ int columns_inside(int columns, int first_column, int lane, int j) {
  if constexpr (Rules::kTmaStore) return first_column + j * 8 < columns ? 2 : 0;
  return min(columns - first_column - lane % 4 * 2 - j * 8, 2);
}

// What belongs to a lane's columns of a slab.
template <class Rules, class Bias>
struct SlabColumns {
  static constexpr int kBlocks = kSlabColumns / 8;  // of eight columns, two of them this lane's
  // What the finish adds, and whether any of it is in registers.
  static constexpr bool kAddsBias = Rules::kHasBias && !Rules::kBiasInSums;
  static constexpr bool kIsLoaded = (kAddsBias && !Rules::kBiasParked) || Rules::kRowNorm == RowNorm::kResidual;

  Pair<Bias> bias[kBlocks];
  Pair<Bias> up_bias[Rules::kGated ? kBlocks : 1];
  Pair<Bias> gamma[Rules::kRowNorm == RowNorm::kResidual ? kBlocks : 1];
  const Bias* parked;  // the lane's first column of the slab

  // Of block j.
  __device__ __forceinline__ Pair<Bias> bias_of(int j) const {
    Pair<Bias> found = bias[j];
    if constexpr (Rules::kBiasParked) found.template load<2>(parked + j * 8, 1, 2);
    return found;
  }

  template <class Element>
  __device__ __forceinline__ void load(const Result<Element, Bias>& result, int first_column) {
    if (first_column + kSlabColumns <= result.columns) {
      load_blocks<true>(result, first_column);
    } else {
      load_blocks<false>(result, first_column);
    }
  }

  // kWhole: all columns of the slab exist, and no load needs a condition of its own.
  template <bool kWhole, class Element>
  __device__ __forceinline__ void load_blocks(const Result<Element, Bias>& result, int first_column) {
    const int lane = opaque_lane();
    const int column = first_column + lane % 4 * 2;
#pragma unroll
    for (int j = 0; j < kBlocks; ++j) {
      const int at = column + j * 8;
      const int there = kWhole ? 2 : columns_inside<Rules>(result.columns, first_column, lane, j);
      if (there <= 0) continue;
      if constexpr (Rules::kHasBias) {
        const Bias* from = result.bias + (result.gate_column + at) * result.bias_stride;
        bias[j].template load<Rules::kVectorBias>(from, result.bias_stride, there);
        if constexpr (Rules::kGated) {
          from = result.bias + (result.up_column + at) * result.bias_stride;
          up_bias[j].template load<Rules::kVectorBias>(from, result.bias_stride, there);
        }
      }
      if constexpr (Rules::kRowNorm == RowNorm::kResidual) {
        gamma[j].template load<Rules::kVectorBias>(result.gamma + at, 1, there);
      }
    }
  }
};

// What a lane adds to its sums of a slab, which begins at (first_row, first_column). Loaded a slab ahead of its use, or more.
template <class Rules, class Element, class Bias>
struct SlabInputs {
  static constexpr int kBlocks = SlabColumns<Rules, Bias>::kBlocks;

  SlabColumns<Rules, Bias> columns;
  Pair<Element> added[kBlocks][2];

  // The residual, where TMA does not bring it.
  __device__ __forceinline__ void load_rows(const Result<Element, Bias>& result, int first_row, int first_column) {
    if constexpr (!Rules::kHasResidual || Rules::kTmaResidual) return;
    if (first_column + kSlabColumns <= result.columns) {
      load_row_blocks<true>(result, first_row, first_column);
    } else {
      load_row_blocks<false>(result, first_row, first_column);
    }
  }

  template <bool kWhole>
  __device__ __forceinline__ void load_row_blocks(const Result<Element, Bias>& result, int first_row, int first_column) {
    const int lane = opaque_lane();
    const int row = first_row + lane / 4, column = first_column + lane % 4 * 2;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      if (row + half * 8 >= result.rows) continue;
      const Element* source = result.residual.data + result.residual.row_offset(row + half * 8);
#pragma unroll
      for (int j = 0; j < kBlocks; ++j) {
        const int at = column + j * 8;
        const int there = kWhole ? 2 : columns_inside<Rules>(result.columns, first_column, lane, j);
        if (there <= 0) continue;
        added[j][half].template load<Rules::kVectorResidual>(source + at * result.residual.column_stride,
                                                             result.residual.column_stride, there);
      }
    }
  }

  // The residual of blocks j and j + 1, from where the lanes will store the result.
  __device__ __forceinline__ void take_residual(const unsigned char* row_pointer, int j) {
    u32 words[4];
    ptx::ldmatrix_x4(words, row_pointer);
#pragma unroll
    for (int i = 0; i < 4; ++i) added[j + i / 2][i % 2].word = words[i];
  }

  // values = act(sums + bias) + residual, for two sums of block j and the upper or lower eight rows; gated, times ups.
  // mean, rstd: of the row that is normalised.
  __device__ __forceinline__ void finish(float (&values)[2], float (&ups)[2], int j, int half, float mean,
                                         float rstd) const {
    if constexpr (Rules::kRowNorm == RowNorm::kLayerNorm || Rules::kRowNorm == RowNorm::kRmsNorm) {
#pragma unroll
      for (int e = 0; e < 2; ++e) {
        values[e] *= rstd;
        ups[e] *= rstd;
      }
    }
    if constexpr (SlabColumns<Rules, Bias>::kAddsBias) columns.bias_of(j).add_to(values);
#pragma unroll
    for (int e = 0; e < 2; ++e) {
      if constexpr (Rules::kActivation == Activation::kGelu) {
        values[e] = gelu_for(values[e], ElementTag<Element>{});
      } else if constexpr (Rules::kActivation != Activation::kGeluPairs) {
        values[e] = activate<Rules::kActivation>(values[e]);
      }
    }
    if constexpr (Rules::kGated) {
      if constexpr (SlabColumns<Rules, Bias>::kAddsBias) columns.up_bias[j].add_to(ups);
#pragma unroll
      for (int e = 0; e < 2; ++e) values[e] *= ups[e];
    }
    if constexpr (Rules::kRowNorm == RowNorm::kResidual) {
      float normal[2] = {-mean, -mean}, weights[2] = {};
      added[j][half].add_to(normal);
      columns.gamma[j].add_to(weights);
#pragma unroll
      for (int e = 0; e < 2; ++e) values[e] = fmaf(normal[e] * rstd, weights[e], values[e]);
    } else if constexpr (Rules::kHasResidual) {
      added[j][half].add_to(values);
    }
  }
};

// All lanes of a warp, before a tile's products: its sums start from the bias, and the finish adds none.
template <class Rules, int kRowTiles, int kCount, class Element, class Bias>
__device__ __forceinline__ void start_from_bias(float (&sum)[kRowTiles][kCount], const Result<Element, Bias>& result,
                                                int first_column) {
  constexpr int kAcross = kCount * 2 / kSlabColumns / (Rules::kGated ? 2 : 1);
#pragma unroll
  for (int across = 0; across < kAcross; ++across) {
    SlabColumns<Rules, Bias> columns;
    columns.load(result, first_column + across * kSlabColumns);
    const int first = across * (kSlabColumns / 2), first_up = first + kAcross * (kSlabColumns / 2);
#pragma unroll
    for (int j = 0; j < kSlabColumns / 8; ++j) {
      float values[2], ups[2];
      columns.bias[j].to_floats(values);
      if constexpr (Rules::kGated) columns.up_bias[j].to_floats(ups);
#pragma unroll
      for (int i = 0; i < kRowTiles * 4; ++i) {
        sum[i / 4][first + j * 4 + i % 4] = values[i % 2];
        if constexpr (Rules::kGated) sum[i / 4][first_up + j * 4 + i % 4] = ups[i % 2];
      }
    }
  }
}

// The `slab`th: sum[first..] are its accumulators, sum[first_up..] its ups'; it begins at (first_row, first_column). place:
// of the lane's first row of 16 bytes in a buffer. upper, lower: moments of the lane's two rows, where they are normalised.
template <class Rules, int kCount, class Element, class Bias>
__device__ __forceinline__ void write_slab(const float (&sum)[kCount], int first, int first_up,
                                           SlabInputs<Rules, Element, Bias>& inputs,
                                           const Result<Element, Bias>& result, const OutputBuffers& buffers, int slab,
                                           u32 place, int first_row, int first_column, float2 upper, float2 lower) {
  constexpr int kBlocks = kSlabColumns / 8;
  if (first_row >= result.rows || first_column >= result.columns) {
    if constexpr (Rules::kTmaStore) buffers.skip();
    return;
  }
  const auto finish = [&](int j, int half, float(&values)[2]) {
    float ups[2] = {};
#pragma unroll
    for (int e = 0; e < 2; ++e) {
      values[e] = sum[first + j * 4 + half * 2 + e];
      if constexpr (Rules::kGated) ups[e] = sum[first_up + j * 4 + half * 2 + e];
    }
    inputs.finish(values, ups, j, half, half == 0 ? upper.x : lower.x, half == 0 ? upper.y : lower.y);
  };
  if constexpr (Rules::kTmaStore) {
    const int index = slab % Rules::kBuffers;
    if constexpr (!Rules::kTmaResidual) buffers.acquire(slab);
    unsigned char* const buffer = buffers.buffer(index);
    const auto place_of = [&](int j) { return buffer + (place ^ static_cast<u32>(j * 16)); };  // of blocks j and j + 1
    if constexpr (Rules::kTmaResidual) {
#pragma unroll
      for (int j = 0; j < kBlocks; j += 2) inputs.take_residual(place_of(j), j);
      __syncwarp();  // all lanes have read what others overwrite
    }
    u32 stored[kBlocks][2];
#pragma unroll
    for (int j = 0; j < kBlocks; j += 2) {
      u32 words[4];  // blocks j and j + 1, each with its upper and lower eight rows
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        float values[2];
        finish(j + i / 2, i % 2, values);
        words[i] = pack_pair<Element>(values[0], values[1]);
        if constexpr (Rules::kActivation == Activation::kGeluPairs) words[i] = gelu_pair(words[i]);
        stored[j + i / 2][i % 2] = words[i];
      }
      ptx::stmatrix_x4(place_of(j), words);
    }
    buffers.store(index, result.y_map, first_column, first_row);
    if constexpr (Rules::kStatistics) {
      float2 found[2];
      add_up<Element>(stored, min(result.columns - first_column, kSlabColumns) / 8, found);
      const int late = opaque_lane(), slots = (result.columns + kSlabColumns - 1) / kSlabColumns;
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const int row = first_row + late / 4 + half * 8;
        if (late % 4 != 0 || row >= result.rows) continue;
        const i64 slot = static_cast<i64>(row) * slots + first_column / kSlabColumns;
        reinterpret_cast<float2*>(result.statistics)[slot] = found[half];
      }
    }
  } else {
    const int lane = opaque_lane();
    const int row = first_row + lane / 4, column = first_column + lane % 4 * 2;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      if (row + half * 8 >= result.rows) continue;
      Element* target = result.y.data + result.y.row_offset(row + half * 8);
#pragma unroll
      for (int j = 0; j < kBlocks; ++j) {
        const int at = column + j * 8, there = columns_inside<Rules>(result.columns, first_column, lane, j);
        if (there <= 0) continue;
        float values[2];
        finish(j, half, values);
        store_pair<Rules::kVectorY>(target + at * result.y.column_stride, result.y.column_stride, there, values);
      }
    }
  }
}

// The warp's part of a tile: rows [first_row, +16) of each 64, kCount * 2 columns. inputs: of the first slab; held: what
// belongs to the columns of all slabs, or of the first ones. parked: the bias of the tile's columns, with kBiasParked. moments: of
// rows that are normalised.
template <class Rules, int kRowTiles, int kCount, int kHeld, class Moments, class Element, class Bias>
__device__ __forceinline__ void write_tile(const float (&sum)[kRowTiles][kCount],
                                           SlabInputs<Rules, Element, Bias> inputs,
                                           const SlabColumns<Rules, Bias> (&held)[kHeld], const Bias* parked,
                                           const Result<Element, Bias>& result, OutputBuffers& buffers, int first_row,
                                           int first_column, const Moments& moments) {
  constexpr int kAcross = kCount * 2 / kSlabColumns / (Rules::kGated ? 2 : 1), kSlabs = kRowTiles * kAcross;
  if constexpr (Rules::kTmaResidual) buffers.wait_fetched();
  const u32 lane = static_cast<u32>(opaque_lane());
  // A lane's two blocks of eight columns; those of the slab are at a distance that no carry leaves, so an XOR finds them.
  const u32 place = swizzle<kSpan>(lane % 16 * kSpan + lane / 16 * 16);
#pragma unroll
  for (int slab = 0; slab < kSlabs; ++slab) {
    const int row_tile = slab % kRowTiles, across = slab / kRowTiles, next = slab + 1;
    if constexpr (Rules::kTmaResidual && kSlabs > Rules::kBuffers) {
      if (slab == kSlabs - Rules::kBuffers) {
        buffers.template fetch<kRowTiles, Rules::kBuffers, Rules::kBuffers, kSlabs>(
            result.residual_map, first_row, first_column, result.rows, result.columns);
      }
      if (slab == Rules::kBuffers) buffers.wait_fetched();
    }
    SlabInputs<Rules, Element, Bias> ahead;
    if (next < kSlabs) {
      const int row = first_row + next % kRowTiles * 64, column = first_column + next / kRowTiles * kSlabColumns;
      if constexpr (SlabColumns<Rules, Bias>::kIsLoaded) {
        if (next % kRowTiles != 0) {
          ahead.columns = inputs.columns;
        } else if (next / kRowTiles < kHeld) {
          ahead.columns = held[next / kRowTiles];
        } else {
          ahead.columns.load(result, column);
        }
      }
      ahead.load_rows(result, row, column);
    }
    const int first = across * (kSlabColumns / 2), first_up = first + kAcross * (kSlabColumns / 2);
    if constexpr (Rules::kBiasParked) inputs.columns.parked = parked + across * kSlabColumns + lane % 4 * 2;
    write_slab(sum[row_tile], first, first_up, inputs, result, buffers, slab, place, first_row + row_tile * 64,
               first_column + across * kSlabColumns, moments.of(row_tile * 2), moments.of(row_tile * 2 + 1));
    inputs = ahead;
  }
}

// All lanes of a warp, before a tile's products: what its finish will read, on its way to L2. The warp's part of the
// tile: rows [first_row, +16) of each of kRowTiles times 64, kColumns columns.
template <class Rules, int kRowTiles, int kColumns, class Element, class Bias>
__device__ __forceinline__ void prefetch_inputs(const Result<Element, Bias>& result, int first_row, int first_column) {
  constexpr int kLine = 128;  // bytes
  const int lane = opaque_lane();
  if constexpr (Rules::kHasBias && !Rules::kBiasInSums && Rules::kVectorBias == 2) {
    const int at = lane * (kLine / static_cast<int>(sizeof(Bias)));
    if (at < kColumns && first_column + at < result.columns) {
      ptx::prefetch_global_l2(result.bias + result.gate_column + first_column + at);
      if constexpr (Rules::kGated) ptx::prefetch_global_l2(result.bias + result.up_column + first_column + at);
    }
  }
  if constexpr (Rules::kHasResidual && !Rules::kTmaResidual && Rules::kVectorResidual == 2) {
    constexpr int kLines = kColumns / kSlabColumns;  // of a row: a slab's columns are a line
#pragma unroll 1
    for (int i = lane; i < kRowTiles * 16 * kLines; i += 32) {
      const int row = first_row + i / kLines / 16 * 64 + i / kLines % 16;
      const int column = first_column + i % kLines * kSlabColumns;
      if (row >= result.rows || column >= result.columns) continue;
      ptx::prefetch_global_l2(result.residual.data + result.residual.row_offset(row) + column);
    }
  }
}

}  // namespace cki::gemm
