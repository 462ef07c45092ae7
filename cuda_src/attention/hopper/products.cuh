// The two products of a consumer warpgroup, 64 query rows each: scores = Q K^T and output += P V, by wgmma.
//
// Q and K lie K-major in shared memory, V MN-major as it is stored (its row is the contracted index). The weights P come
// from registers: the accumulators of the first product, packed to 16 bits, are the left operand of the second without
// leaving their lane (ptx/wgmma.cuh). Products are asynchronous; callers fence, commit and wait.
#pragma once

#include "attention/hopper/shared_tiles.cuh"
#include "common/convert_element.cuh"
#include "common/wgmma_descriptor.cuh"
#include "ptx/wgmma.cuh"

namespace cki::attention {

constexpr int kStepColumns = 16;              // contracted elements of one wgmma of a 16-bit type
constexpr int kStepBytes = kStepColumns * 2;  // of a K-major row

// Starts scores = Q K^T over kHeadDim columns, a multiple of 16: of the first 2 * kCount keys of the tile.
template <class Element, class QueryTile, class KeyTile, int kHeadDim, int kCount>
__device__ __forceinline__ void multiply_keys(float (&scores)[kCount], u64 queries, u64 keys) {
  constexpr int kSlabSteps = KeyTile::kSlabColumns / kStepColumns;
#pragma unroll
  for (int step = 0; step < kHeadDim / kStepColumns; ++step) {
    const int slab = step / kSlabSteps, within = step % kSlabSteps * kStepBytes;
    ptx::wgmma<2 * kCount, Element>(scores, wgmma_descriptor_advance(queries, slab * QueryTile::kSlabBytes + within),
                                    wgmma_descriptor_advance(keys, slab * KeyTile::kSlabBytes + within), step != 0);
  }
}

// Starts output += P V over the first 16 kUsed keys of the tile. The width of V is a multiple of the columns of its slabs.
template <class Element, class ValueTile, int kValueDim, int kUsed, int kCount, int kSteps>
__device__ __forceinline__ void multiply_values(float (&output)[kCount], const u32 (&weights)[kSteps][4], u64 values) {
  static_assert(kSteps * kStepColumns == ValueTile::kRows, "a step is 16 keys");
  static_assert(kValueDim == ValueTile::kSlabs * ValueTile::kSlabColumns, "whole slabs");
#pragma unroll
  for (int step = 0; step < kUsed; ++step) {
    ptx::wgmma<kValueDim, Element, Major::mn>(
        output, weights[step], wgmma_descriptor_advance(values, step * kStepColumns * ValueTile::kSpan), true);
  }
}

// Weights to the left operand of multiply_values, of the first kPacked steps: weight_at(i) is what replaces score i. Only
// while no product that reads `weights` is in flight: ptxas would serialise the products (note C7513).
template <class Element, int kPacked, int kSteps, class WeightAt>
__device__ __forceinline__ void pack_weights(u32 (&weights)[kSteps][4], WeightAt weight_at) {
#pragma unroll
  for (int i = 0; i < kPacked * 4; ++i) weights[i / 4][i % 4] = pack_pair<Element>(weight_at(2 * i), weight_at(2 * i + 1));
}

}  // namespace cki::attention
