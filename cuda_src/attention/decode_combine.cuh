// Softmax over a set of keys from the states of its parts: of the warps of a block, or of the blocks that share a unit.
//
// A state is, for each row: the reference m and the sum of weights relative to it, both of base 2 (sum = sum_j 2^(x_j
// - m)), and the sum of weighted values relative to it. The whole has M = max m_i, sum = sum_i 2^(m_i - M) sum_i,
// likewise values. A state that saw no key has m = -inf and weight 0. Parts are added in a fixed order, so results
// repeat bit for bit.
//
// One warp adds parts of one row, a lane four neighbouring columns of it. Of several parts the numbers and the values
// are loaded together, so that a batch of them costs one latency.
#pragma once

#include "common/online_softmax.cuh"
#include "common/reduce.cuh"
#include "common/types.cuh"
#include "ptx/math.cuh"

namespace cki::attention {

// A state in memory: rows of values, each followed by its reference and sum and two unused floats, which spread the
// rows over the banks of shared memory. 16-byte aligned.
template <int kRowCount, int kColumnCount>
struct StateLayout {
  static constexpr int kColumns = kColumnCount;
  static constexpr int kPitch = kColumns + 4;
  static constexpr int kFloats = kRowCount * kPitch;
  static constexpr int kVectors = (kColumns + 127) / 128;  // of four columns, a lane
  static_assert(kColumns % 4 == 0, "whole vectors");

  // The first column of a lane's vector; >= kColumns where there is none.
  static __device__ __forceinline__ int column(int vector) {
    return vector * 128 + static_cast<int>(threadIdx.x % 32) * 4;
  }
};

// How a row of a part is read: from shared memory, or from what other blocks wrote (from L2, where their writes are).
struct FromShared {
  static __device__ __forceinline__ float2 numbers(const float* p) { return *reinterpret_cast<const float2*>(p); }
  static __device__ __forceinline__ float4 values(const float* p) { return *reinterpret_cast<const float4*>(p); }
};
struct FromOtherBlocks {
  static __device__ __forceinline__ float2 numbers(const float* p) {
    return __ldcg(reinterpret_cast<const float2*>(p));
  }
  static __device__ __forceinline__ float4 values(const float* p) { return __ldcg(reinterpret_cast<const float4*>(p)); }
};

// One row in one warp.
template <class State>
struct CombinedRow {
  float4 values[State::kVectors];
  float reference = negative_infinity();
  float sum = 0.0f;

  __device__ __forceinline__ CombinedRow() {
#pragma unroll
    for (int i = 0; i < State::kVectors; ++i) values[i] = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
  }

  // Adds the parts first, first + step, ... below `parts`, kBatch at a time. row_of(i): where the row of part i lies.
  template <class From, int kBatch, class RowOf>
  __device__ __forceinline__ void add(int first, int step, int parts, RowOf row_of) {
    constexpr int kLanes = kBatch <= 4 ? 4 : kBatch <= 8 ? 8 : kBatch <= 16 ? 16 : 32;
    static_assert(kBatch <= 32, "a lane holds the numbers of one part");
    const int lane = static_cast<int>(threadIdx.x % 32);
#pragma unroll 1
    for (int begin = first; begin < parts; begin += kBatch * step) {
      // Each kLanes lanes hold all numbers, so that few steps reduce them for all.
      const int own = begin + lane % kLanes * step;
      float2 numbers = make_float2(negative_infinity(), 0.0f);
      if (lane % kLanes < kBatch && own < parts) numbers = From::numbers(row_of(own) + State::kColumns);
      float4 loaded[kBatch][State::kVectors];
#pragma unroll
      for (int i = 0; i < kBatch; ++i) {
        const int part = begin + i * step;
#pragma unroll
        for (int j = 0; j < State::kVectors; ++j) {
          loaded[i][j] = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
          if (part < parts && State::column(j) < State::kColumns)
            loaded[i][j] = From::values(row_of(part) + State::column(j));
        }
      }
      const float largest = fmaxf(reference, warp_max<kLanes>(numbers.x));
      const float subtract = largest == negative_infinity() ? 0.0f : largest;
      const float correction = ptx::ex2_approx(reference - subtract);
      const float weight = ptx::ex2_approx(numbers.x - subtract);
      reference = largest;
      sum = fmaf(sum, correction, warp_sum<kLanes>(weight * numbers.y));
#pragma unroll
      for (int j = 0; j < State::kVectors; ++j) scale(values[j], correction);
#pragma unroll
      for (int i = 0; i < kBatch; ++i) {
        const float of_part = __shfl_sync(kFullWarp, weight, i);
#pragma unroll
        for (int j = 0; j < State::kVectors; ++j) {
          values[j].x = fmaf(of_part, loaded[i][j].x, values[j].x);
          values[j].y = fmaf(of_part, loaded[i][j].y, values[j].y);
          values[j].z = fmaf(of_part, loaded[i][j].z, values[j].z);
          values[j].w = fmaf(of_part, loaded[i][j].w, values[j].w);
        }
      }
    }
  }

  // Writes it as the row of a state.
  __device__ __forceinline__ void store(float* row) const {
#pragma unroll
    for (int j = 0; j < State::kVectors; ++j) {
      if (State::column(j) < State::kColumns) *reinterpret_cast<float4*>(row + State::column(j)) = values[j];
    }
    if (threadIdx.x % 32 == 0) *reinterpret_cast<float2*>(row + State::kColumns) = make_float2(reference, sum);
  }

 private:
  static __device__ __forceinline__ void scale(float4& v, float factor) {
    v.x *= factor;
    v.y *= factor;
    v.z *= factor;
    v.w *= factor;
  }
};

// Where the rows of a unit's parts lie in `partials`.
template <class State>
struct PartsInMemory {
  const float *first, *second;  // of part 0 and 1
  i64 step;                     // from part 1 on

  template <class Division>
  __device__ __forceinline__ PartsInMemory(const float* partials, const Division& schedule, int unit_begin,
                                           int together, int beside) {
    const i64 place_floats = static_cast<i64>(together) * State::kFloats;
    const float* own = partials + beside * State::kFloats;
    first = own + schedule.place(unit_begin, 0) * place_floats;
    second = own + schedule.place(unit_begin, 1) * place_floats;
    step = Division::kPlaceStep * place_floats;
  }
  __device__ __forceinline__ const float* operator()(int part, int row) const {
    return (part == 0 ? first : second + (part - 1) * step) + row * State::kPitch;
  }
};

// The whole of the rows first_row, first_row + row_step, ... below `rows` from their `parts`, by all warps of a block.
// Where there are fewer rows than warps, several warps share the parts of a row if these are many. row_of(part, row):
// where it lies.
// finish(row, combined) is called by one warp a row. scratch: shared memory for a row of State a warp; it begins free
// and ends without a barrier.
template <class State, class From, int kWarps, class RowOf, class Finish>
__device__ __forceinline__ void combine_parts(int parts, int first_row, int row_step, int rows, float* scratch,
                                              RowOf row_of, Finish finish) {
  constexpr int kBatch = 16 / State::kVectors;
  const int warp = static_cast<int>(threadIdx.x / 32);
  if (parts <= kBatch) {
    for (int row = first_row + warp * row_step; row < rows; row += kWarps * row_step) {
      CombinedRow<State> total;
      total.template add<From, kBatch>(0, 1, parts, [&](int part) { return row_of(part, row); });
      finish(row, total);
    }
    return;
  }
  const int count = (rows - first_row + row_step - 1) / row_step;
  if (count <= 0) return;
  const int at_once = min(count, kWarps);
  const int shares = kWarps / at_once;  // 1 where there are more rows than that
  const int share = warp / at_once;
  for (int i = warp - share * at_once; i < count && share < shares; i += at_once) {
    const int row = first_row + i * row_step;
    CombinedRow<State> total;
    total.template add<From, kBatch>(share, shares, parts, [&](int part) { return row_of(part, row); });
    if (shares == 1) {
      finish(row, total);
    } else {
      total.store(scratch + warp * State::kPitch);
    }
  }
  if (shares == 1) return;
  __syncthreads();
  if (warp >= at_once) return;
  CombinedRow<State> total;
  total.template add<FromShared, kWarps>(0, 1, shares, [&](int i) {
    return scratch + (warp + i * at_once) * State::kPitch;
  });
  finish(first_row + warp * row_step, total);
}

// The last step of a row: a sink (one more logit without a value; -inf for none) joins, then factor turns the sum of
// values into their mean and lse is the natural logarithm of all weights. Without any key: factor 0, lse -inf or the
// sink.
struct RowEnd {
  float factor;
  float lse;

  __device__ __forceinline__ RowEnd(float reference, float sum, float sink) {
    constexpr float kLog2e = 1.44269504088896340736f, kLn2 = 0.693147180559945309417f;
    const float largest = fmaxf(reference, sink * kLog2e);
    const float subtract = largest == negative_infinity() ? 0.0f : largest;
    const float correction = ptx::ex2_approx(reference - subtract);
    const float total = fmaf(sum, correction, ptx::ex2_approx(sink * kLog2e - subtract));
    factor = total == 0.0f ? 0.0f : correction * ptx::rcp_approx(total);
    lse = total == 0.0f ? negative_infinity() : fmaf(subtract, kLn2, logf(total));
  }
};

}  // namespace cki::attention
