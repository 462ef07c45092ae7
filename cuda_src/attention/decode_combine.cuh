// Softmax over a set of keys from the states of its parts: of the warps of a block, or of the blocks that share a unit.
//
// A state is, for each row: the reference m and the sum of weights relative to it, both of base 2 (sum = sum_j 2^(x_j
// - m)), and the sum of weighted values relative to it. The whole has M = max m_i, sum = sum_i 2^(m_i - M) sum_i,
// likewise values. A state that saw no key has m = -inf and weight 0. Parts are added in their order, so results
// repeat bit for bit.
#pragma once

#include "common/online_softmax.cuh"
#include "common/reduce.cuh"
#include "common/types.cuh"
#include "ptx/math.cuh"

namespace cki::attention {

// A state in memory: rows of values, each followed by its reference and sum and two unused floats, which spread the
// rows over the banks of shared memory.
template <int kRowCount, int kColumnCount>
struct StateLayout {
  static constexpr int kRows = kRowCount;
  static constexpr int kColumns = kColumnCount;
  static constexpr int kPitch = kColumns + 4;
  static constexpr int kFloats = kRows * kPitch;

  static __device__ __forceinline__ float& value(float* state, int row, int column) {
    return state[row * kPitch + column];
  }
  static __device__ __forceinline__ void set_numbers(float* state, int row, float reference, float sum) {
    state[row * kPitch + kColumns] = reference;
    state[row * kPitch + kColumns + 1] = sum;
  }
};

// How parts are read: shared memory, or what other blocks wrote (from L2, where their writes are).
struct FromShared {
  static __device__ __forceinline__ float read(const float* p) { return *p; }
};
struct FromOtherBlocks {
  static __device__ __forceinline__ float read(const float* p) { return __ldcg(p); }
};

// All threads of the block call it; it begins with the parts visible to all (after a barrier) and ends without one.
// part_of(i): where part i lies. weights: shared memory [kRows][parts]; totals [kRows][2].
// consume(row, column, value, reference, sum) gets each element of the whole.
template <class State, class From, int kWarps, class PartOf, class Consume>
__device__ __forceinline__ void combine(int parts, int rows, float* weights, float (&totals)[State::kRows][2],
                                        PartOf part_of, Consume consume) {
  const int thread = static_cast<int>(threadIdx.x);
  const int lane = thread % 32;
  const auto number = [&](int part, int row, int i) {
    return From::read(part_of(part) + row * State::kPitch + State::kColumns + i);
  };
  for (int row = thread / 32; row < rows; row += kWarps) {
    float reference = negative_infinity();
    for (int part = lane; part < parts; part += 32) reference = fmaxf(reference, number(part, row, 0));
    reference = warp_max(reference);
    const float subtract = reference == negative_infinity() ? 0.0f : reference;
    float sum = 0.0f;
    for (int part = lane; part < parts; part += 32) {
      const float weight = ptx::ex2_approx(number(part, row, 0) - subtract);
      weights[row * parts + part] = weight;
      sum = fmaf(weight, number(part, row, 1), sum);
    }
    sum = warp_sum(sum);
    if (lane == 0) {
      totals[row][0] = reference;
      totals[row][1] = sum;
    }
  }
  __syncthreads();
  for (int index = thread; index < rows * State::kColumns; index += kWarps * 32) {
    const int row = index / State::kColumns, column = index % State::kColumns;
    float sum = 0.0f;
#pragma unroll 8
    for (int part = 0; part < parts; ++part)
      sum = fmaf(weights[row * parts + part], From::read(part_of(part) + row * State::kPitch + column), sum);
    consume(row, column, sum, totals[row][0], totals[row][1]);
  }
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
    factor = total == 0.0f ? 0.0f : correction / total;
    lse = total == 0.0f ? negative_infinity() : fmaf(subtract, kLn2, logf(total));
  }
};

}  // namespace cki::attention
