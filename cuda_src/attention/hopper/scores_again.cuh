// Scores of a tile once more, of some rows, without wgmma: by each warp alone, from the tiles in shared memory.
//
// A wgmma takes all warps of a warpgroup; one that must see its rows' scores again (checked_softmax.cuh) takes mma.sync,
// whose accumulators lie in the lanes as wgmma's do. Rare, so short code counts, not speed.
#pragma once

#include "attention/hopper/shared_tiles.cuh"
#include "attention/product.cuh"
#include "common/swizzle.cuh"
#include "common/types.cuh"
#include "ptx/ldmatrix.cuh"
#include "ptx/wgmma.cuh"

namespace cki::attention {

// Where the 16 bytes at `column` (a multiple of 8) of a row lie.
template <class Tile>
__device__ __forceinline__ const unsigned char* piece_of(const unsigned char* tile, int row, int column) {
  const u32 within = static_cast<u32>(row * Tile::kSpan + column % Tile::kSlabColumns * 2);
  return tile + column / Tile::kSlabColumns * Tile::kSlabBytes + swizzle<Tile::kSpan>(within);
}

// scores[i] of the rows r that are wanted, i / 2 % 2 == r, of `keys`: those of queries 16 w .. 16 w + 15 for warp w of the
// warpgroup. All lanes of a warp together.
template <class Element, class QueryTile, class KeyTile, int kHeadDim, int kCount>
__device__ __forceinline__ void multiply_keys_again(float (&scores)[kCount], const bool (&wanted)[2],
                                                    const unsigned char* queries, const unsigned char* keys) {
  // An opaque copy: else what depends on the lane is kept in registers through the main loop, which has none to spare.
  u32 opaque[1] = {threadIdx.x % 128};
  ptx::wgmma_fence_registers(opaque);
  const int lane = static_cast<int>(opaque[0]) % 32, warp = static_cast<int>(opaque[0]) / 32;
#pragma unroll
  for (int block = 0; block < kCount / 4; ++block) {  // of eight keys
    float sums[4] = {};
#pragma unroll 1
    for (int column = 0; column < kHeadDim; column += 16) {
      Left<Element> a;
      Right<Element> b;
      ptx::ldmatrix_x4(a.words, piece_of<QueryTile>(queries, 16 * warp + lane % 16, column + lane / 16 * 8));
      ptx::ldmatrix_x2(b.words, piece_of<KeyTile>(keys, 8 * block + lane % 8, column + lane / 8 % 2 * 8));
      multiply_add(sums, a, b);
    }
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      if (wanted[i / 2]) scores[4 * block + i] = sums[i];
    }
  }
  __syncwarp();  // one lane says for all that the tiles have been read
}

}  // namespace cki::attention
