// Of linear_tokens_e4m3.cu: rows of no token, and the finish of a tile, parts added in the order of the blocks, then norm, bias,
// activation, gates, residual. For that kernel's prelude, behind its stages.
#pragma once

#include "common/convert_element.cuh"
#include "common/types.cuh"
#include "gemm/activation.cuh"
#include "gemm/hopper/even_work.cuh"
#include "ptx/fence.cuh"

namespace cki::gemm {

// All threads: zeros in the rows of x that no box fills: TMA takes long over rows that do not exist, so boxes have none. What
// they are multiplied to is of no token, but numbers they should be.
__device__ __forceinline__ void clear_rows(unsigned char* stages, int tokens) {
  const int units = (kTokens - tokens) * (kSpan / 16);
  for (int i = static_cast<int>(threadIdx.x); i < kStages * (kDepth / 64) * units; i += kThreads) {
    const int box = i / units, stage = box / (kDepth / 64);
    unsigned char* x = stages + stage * kStageBytes + kBytesW + box % (kDepth / 64) * kBox;
    reinterpret_cast<uint4*>(x + tokens * kSpan)[i % units] = make_uint4(0, 0, 0, 0);
  }
  ptx::fence_proxy_async_shared();
}

// A consumer's thread: two rows of a tile's w, eight apart, and the tokens of its sums.
struct Place {
  int thread, row;
  int column;  // of y in a tile, of the upper row
  __device__ __forceinline__ Place()
      : thread(static_cast<int>(threadIdx.x)),
        row(thread / 32 * 16 + lane() / 4),
        column(kGated ? thread / 32 * 8 + lane() / 4 : row) {}
  static __device__ __forceinline__ int token(int j, int e) { return j * 8 + lane() % 4 * 2 + e; }
};

struct Output {
  const Bias* bias;
  const bf16* residual;
  bf16* y;
  float* parts;
  u32* counters;
  i64 bias_stride, residual_stride, y_stride;
  int tokens, columns, depth;
  float epsilon;
};

// A warp's share of a part of a tile that several blocks share, into its place. squares: of the token of this lane.
__device__ __forceinline__ void store_part(const float (&sum)[kSums], float squares, float* to) {
#pragma unroll
  for (int j = 0; j < kTokens / 8; ++j)
    *reinterpret_cast<float4*>(to + (j * 32 + lane()) * 4) =
        make_float4(sum[j * 4], sum[j * 4 + 1], sum[j * 4 + 2], sum[j * 4 + 3]);
  if (kNorm && lane() < kTokens) to[kSums * 32 + lane()] = squares;
}

// The sums of a warp's shares of all parts in place of its own.
__device__ __forceinline__ void add_parts(float (&sum)[kSums], float& squares, const EvenWork& work, const Output& out,
                                          int tile, int first, int last, int warp) {
  constexpr int kTogether = 8;  // parts whose loads are under way
#pragma unroll
  for (int i = 0; i < kSums; ++i) sum[i] = 0.0f;
  squares = 0.0f;
#pragma unroll 1
  for (int begin = first; begin <= last; begin += kTogether) {
    float4 parts[kTogether][kTokens / 8];
    float part_squares[kTogether];
#pragma unroll
    for (int p = 0; p < kTogether; ++p) {
      const float* from =
          out.parts + (static_cast<i64>(work.slot(min(begin + p, last), tile)) * kPartFloats + warp * kWarpPart);
      const bool there = begin + p <= last;
#pragma unroll
      for (int j = 0; j < kTokens / 8; ++j)
        parts[p][j] = there ? *reinterpret_cast<const float4*>(from + (j * 32 + lane()) * 4)
                            : make_float4(0.0f, 0.0f, 0.0f, 0.0f);
      if constexpr (kNorm) part_squares[p] = there && lane() < kTokens ? from[kSums * 32 + lane()] : 0.0f;
    }
#pragma unroll
    for (int p = 0; p < kTogether; ++p) {
#pragma unroll
      for (int j = 0; j < kTokens / 8; ++j) {
        sum[j * 4] += parts[p][j].x;
        sum[j * 4 + 1] += parts[p][j].y;
        sum[j * 4 + 2] += parts[p][j].z;
        sum[j * 4 + 3] += parts[p][j].w;
      }
      if constexpr (kNorm) squares += part_squares[p];
    }
  }
}

// Calls visit(index, token, column of y) for each of a thread's results: (j, e, which row) in sums of four.
template <class Visit>
__device__ __forceinline__ void for_each_result(const Output& out, int tile, const Place& place, const Visit& visit) {
  const int column = tile * kTileColumns + place.column;
#pragma unroll
  for (int j = 0; j < kTokens / 8; ++j) {
#pragma unroll
    for (int e = 0; e < 2; ++e) {
      const int token = Place::token(j, e);
#pragma unroll
      for (int half = 0; half < (kGated ? 1 : 2); ++half) {
        const int at = column + half * 8;
        if (token < out.tokens && at < out.columns) visit(j * 4 + half * 2 + e, token, at);
      }
    }
  }
}

// residual: of each result, loaded before the parts are added, for it takes as long.
__device__ __forceinline__ void write(const float (&sum)[kSums], const float (&residual)[kSums], const Output& out, int tile,
                                      const Place& place, const float* squares) {
  constexpr auto kAct = static_cast<Activation>(kActivation);
  for_each_result(out, tile, place, [&](int index, int token, int at) {
    float factor = 1.0f;
    if constexpr (kNorm) factor = rsqrtf(squares[token] / static_cast<float>(out.depth) + out.epsilon);
    float value = sum[index] * factor;
    if constexpr (kHasBias) value += to_float(out.bias[at * out.bias_stride]);
    value = activate<kAct>(value);
    if constexpr (kGated) {
      float up = sum[index + 2] * factor;
      if constexpr (kHasBias) up += to_float(out.bias[(out.columns + at) * out.bias_stride]);
      value *= up;
    }
    if constexpr (kHasResidual) value += residual[index];
    out.y[token * out.y_stride + at] = from_float<bf16>(value);
  });
}

// A part of a tile: finished where it is the whole tile, or the last of several to be stored. sum, squares: a warp's share.
__device__ __forceinline__ void finish_part(float (&sum)[kSums], float squares, float* own_squares, const EvenWork& work,
                                            const Output& out, int block, int tile, const Place& place) {
  const int warp = place.thread / 32;
  const int first = work.first_block(tile), last = work.last_block(tile);
  if (first < last) {
    store_part(sum, squares, out.parts + (static_cast<i64>(work.slot(block, tile)) * kPartFloats + warp * kWarpPart));
    if (!is_last_part(out.counters + (tile * kConsumerWarps + warp), last - first + 1)) return;
  }
  float residual[kSums];
  if constexpr (kHasResidual) {
    for_each_result(out, tile, place, [&](int index, int token, int at) {
      residual[index] = to_float(out.residual[token * out.residual_stride + at]);
    });
  }
  if (first < last) add_parts(sum, squares, work, out, tile, first, last, warp);
  if constexpr (kNorm) {
    if (lane() < kTokens) own_squares[lane()] = squares;
    __syncwarp();
  }
  write(sum, residual, out, tile, place, own_squares);
  if constexpr (kNorm) __syncwarp();
}

}  // namespace cki::gemm
