// The order in which blocks take the tiles of the result.
#pragma once

namespace cki::gemm {

struct TileIndex {
  int m;
  int n;
};

// Blocks with neighbouring indices run at the same time. Walking kGroup tile rows column by column, instead of whole rows
// one after the other, makes those that run together share kGroup row panels of x and few column panels of the weight:
// about 2 sqrt(blocks) panels pass through the L2 cache instead of blocks + 1.
__device__ __forceinline__ TileIndex tile_of_block(int block, int tiles_m, int tiles_n) {
  constexpr int kGroup = 8;
  const int per_group = kGroup * tiles_n;
  const int first_m = block / per_group * kGroup;
  const int rows = min(kGroup, tiles_m - first_m);  // the last group may be lower
  const int within = block % per_group;
  return {first_m + within % rows, within / rows};
}

}  // namespace cki::gemm
