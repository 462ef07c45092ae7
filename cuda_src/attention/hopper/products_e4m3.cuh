// The second product of attention in e4m3, output = P V for 64 query rows, and the weights that go into it.
//
// Both operands are K-major, which for values means that keys are contiguous: transpose_e4m3_values.cu wrote them so, and
// within 16 keys in the order in which a lane holds their weights. Accumulators of the first product, four of a row at a
// time, are then one word of the left operand without leaving their lane. (Q K^T is products.cuh's multiply_keys, for which
// two elements of e4m3 are one of 16 bits.)
#pragma once

#include "common/types.cuh"
#include "common/wgmma_descriptor.cuh"
#include "ptx/convert.cuh"
#include "ptx/wgmma.cuh"

namespace cki::attention {

constexpr int kE4m3StepKeys = 32;  // contracted keys of one wgmma

// Starts output (+)= P V. ValueTile: a row a column of V and of the ones beside it.
template <class ValueTile, int kCount, int kSteps>
__device__ __forceinline__ void multiply_e4m3_values(float (&output)[kCount], const u32 (&weights)[kSteps][4],
                                                     u64 values, bool accumulate) {
  constexpr int kSlabSteps = ValueTile::kSpan / kE4m3StepKeys;
#pragma unroll
  for (int step = 0; step < kSteps; ++step) {
    const int at = step / kSlabSteps * ValueTile::kSlabBytes + step % kSlabSteps * kE4m3StepKeys;
    ptx::wgmma<ValueTile::kRows, e4m3>(output, weights[step], wgmma_descriptor_advance(values, at),
                                       accumulate || step != 0);
  }
}

// Weights to the left operand. Only while no product that reads `weights` is in flight (note C7513).
template <int kCount, int kSteps>
__device__ __forceinline__ void pack_e4m3_weights(u32 (&weights)[kSteps][4], const float (&scores)[kCount]) {
  static_assert(kSteps * 16 == kCount, "a step is 32 keys");
#pragma unroll
  for (int step = 0; step < kSteps; ++step) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {  // word i: row i % 2, keys of two neighbouring blocks of eight
      const float* pair = scores + step * 16 + i / 2 * 8 + i % 2 * 2;
      weights[step][i] = ptx::f32x2_to_e4m3x2(pair[0], pair[1]) |
                         static_cast<u32>(ptx::f32x2_to_e4m3x2(pair[4], pair[5])) << 16;
    }
  }
}

}  // namespace cki::attention
