// Attention over a set of keys from attention over its parts: the exact softmax of the union.
//
//   lse[r]    = ln sum_i e^lses[i, r]
//   out[r, :] = sum_i e^(lses[i, r] - lse[r]) outs[i, r, :]                    i = 0 .. states - 1
//
// outs: [states, rows, dim], rows as three axes of any strides. lses: [states, rows] fp32, any strides, natural
// logarithms. out, lse: likewise without the first axis; lse may be null.
// Bytes moved: (states + 1) * rows * (dim * sizeof(Element) + 4).
//
// kProgrammatic (sm_90): the launch begins while the one before it ends, which writes outs and lses.
//
// A state that saw no key has lse -inf; its weight is 0 and its output is not used, whatever it holds. A row of empty
// states only gives 0 and -inf: from a maximum of -inf nothing is subtracted. Sums are fp32, in the order of the
// states.
//
// A thread owns kVectorSize neighbouring columns of one row and walks over the states twice: the largest lse first,
// then weights and values. The second reading of the lses comes from L1.
#include "common/online_softmax.cuh"
#include "common/types.cuh"
#include "common/vec.cuh"
#include "ptx/grid_dependency.cuh"

using namespace cki;

constexpr int kPieces = kDim / kVectorSize;  // threads of a row

extern "C" __global__ void __launch_bounds__(kThreads, 8)
    merge_states(const Element* __restrict__ outs, const float* __restrict__ lses, Result* out, float* lse, int states,
                 i64 rows, int extent1, int extent2,                                                    //
                 i64 outs_state, i64 outs_stride0, i64 outs_stride1, i64 outs_stride2, i64 outs_step,  //
                 i64 lses_state, i64 lses_stride0, i64 lses_stride1, i64 lses_stride2,                 //
                 i64 out_stride0, i64 out_stride1, i64 out_stride2, i64 out_step,                      //
                 i64 lse_stride0, i64 lse_stride1, i64 lse_stride2) {
  const i64 index = static_cast<i64>(blockIdx.x) * kThreads + threadIdx.x;
  const i64 row = index / kPieces;
  if (row >= rows) return;
  const int column = static_cast<int>(index - row * kPieces) * kVectorSize;
  const i64 row01 = row / extent2;
  const i64 r0 = row01 / extent1, r1 = row01 - r0 * extent1, r2 = row - row01 * extent2;

  if constexpr (kProgrammatic) ptx::griddepcontrol_wait();
  const float* row_lses = lses + r0 * lses_stride0 + r1 * lses_stride1 + r2 * lses_stride2;
  float largest = negative_infinity();
#pragma unroll 8
  for (int i = 0; i < states; ++i) largest = fmaxf(largest, row_lses[i * lses_state]);
  const float subtract = largest == negative_infinity() ? 0.0f : largest;

  const Element* values = outs + r0 * outs_stride0 + r1 * outs_stride1 + r2 * outs_stride2 + column * outs_step;
  float total = 0.0f;
  float sums[kVectorSize] = {};
#pragma unroll 4  // without a branch, so that the loads of several states are under way together
  for (int i = 0; i < states; ++i) {
    const float state_lse = row_lses[i * lses_state];
    const bool is_empty = state_lse == negative_infinity();  // its values may be anything
    const float weight = is_empty ? 0.0f : expf(state_lse - subtract);
    total += weight;
    float state_values[kVectorSize];
    load_floats(values + i * outs_state, state_values);
#pragma unroll
    for (int e = 0; e < kVectorSize; ++e) sums[e] = fmaf(weight, is_empty ? 0.0f : state_values[e], sums[e]);
  }
  const float inverse = total == 0.0f ? 0.0f : 1.0f / total;
#pragma unroll
  for (int e = 0; e < kVectorSize; ++e) sums[e] *= inverse;
  store_floats(out + r0 * out_stride0 + r1 * out_stride1 + r2 * out_stride2 + column * out_step, sums);
  if (column == 0 && lse != nullptr)
    lse[r0 * lse_stride0 + r1 * lse_stride1 + r2 * lse_stride2] =
        total == 0.0f ? negative_infinity() : subtract + logf(total);
}
