// Where the tiles of queries, keys and values and the barriers lie in dynamic shared memory, and their copies by TMA.
//
// A tile is slabs of kSpan bytes a row: [slab][row][kSpan], swizzled by kSpan bytes (128, 64 or 32), which is what TMA writes
// and wgmma reads without bank conflicts. Columns past the head dimension and rows past the last are filled with zeros by
// TMA, so head dimensions need no padding in memory, and a key that does not exist has finite values.
#pragma once

#include "common/stage_ring.cuh"
#include "common/types.cuh"
#include "ptx/mbarrier.cuh"
#include "ptx/tma.cuh"

namespace cki::attention {

// 16-bit elements, kDim columns in use.
template <int kRowCount, int kDim, int kSpanBytes>
struct SlabTile {
  static constexpr int kRows = kRowCount;
  static constexpr int kSpan = kSpanBytes;
  static constexpr int kSlabColumns = kSpan / 2;
  static constexpr int kSlabs = (kDim + kSlabColumns - 1) / kSlabColumns;
  static constexpr int kSlabBytes = kRows * kSpan;
  static constexpr int kBytes = kSlabs * kSlabBytes;
  static_assert(kRows % 16 == 0 && kRows <= 256, "whole swizzle patterns, and one TMA box a slab");
};

// One thread: starts the copy of a tile, rows [row, +kRows) of (head, batch), which completes on `full`.
template <class Tile>
__device__ __forceinline__ void load_tile(unsigned char* tile, const TensorMap* map, u64* full, int row, int head,
                                          int batch) {
  ptx::mbarrier_arrive_expect_tx(full, Tile::kBytes);
#pragma unroll
  for (int slab = 0; slab < Tile::kSlabs; ++slab) {
    ptx::tma_load_4d(tile + slab * Tile::kSlabBytes, map, full, slab * Tile::kSlabColumns, row, head, batch);
  }
}

constexpr int round_to_pattern(int bytes) { return (bytes + 1023) / 1024 * 1024; }

// Offsets in bytes. Tiles begin at multiples of 1024, the largest swizzle pattern; a stage's size is a multiple of its own.
template <class QueryTile, class KeyTile, class ValueTile, int kStages>
struct SharedLayout {
  static constexpr int kQueries = 0;
  static constexpr int kKeys = round_to_pattern(QueryTile::kBytes);
  static constexpr int kValues = kKeys + round_to_pattern(kStages * KeyTile::kBytes);
  static constexpr int kQueryRing = kValues + kStages * ValueTile::kBytes;
  static constexpr int kKeyRing = kQueryRing + StageRing<1>::kBytes;
  static constexpr int kValueRing = kKeyRing + StageRing<kStages>::kBytes;
  static constexpr int kWorkRing = kValueRing + StageRing<kStages>::kBytes;
  static constexpr int kWorkNumbers = kWorkRing + StageRing<2>::kBytes;
  static constexpr int kBytes = kWorkNumbers + 2 * static_cast<int>(sizeof(int));
};

}  // namespace cki::attention
