// Where the tiles of queries, keys and values and the barriers lie in dynamic shared memory, and their copies by TMA.
//
// A tile is slabs of kSpan bytes a row: [slab][row][kSpan], swizzled by kSpan bytes (128, 64 or 32), which is what TMA writes
// and wgmma reads without bank conflicts. Columns past the head dimension and rows past the last are filled with zeros by
// TMA, so head dimensions need no padding in memory, and a key that does not exist has finite values.
#pragma once

#include "attention/paged_tile.cuh"
#include "common/stage_ring.cuh"
#include "common/types.cuh"
#include "ptx/fence.cuh"
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

// The same of queries: kRows of one head, or kRows / kHeads of kHeads heads, all of a query one after the other; the map's
// second axis is the heads then, its third the tokens. Rows that are left over stay as they are.
template <class Tile, int kHeads>
__device__ __forceinline__ void load_queries(unsigned char* tile, const TensorMap* map, u64* full, int query,
                                             int first_head, int batch) {
  if constexpr (kHeads == 1) {
    load_tile<Tile>(tile, map, full, query, first_head, batch);
    return;
  }
  ptx::mbarrier_arrive_expect_tx(full, Tile::kRows / kHeads * kHeads * Tile::kSpan * Tile::kSlabs);
#pragma unroll
  for (int slab = 0; slab < Tile::kSlabs; ++slab) {
    ptx::tma_load_4d(tile + slab * Tile::kSlabBytes, map, full, slab * Tile::kSlabColumns, first_head, query, batch);
  }
}

// The same of keys or values in a cache of blocks. A block outside the cache gives zeros, and no traffic.
template <class Tile, int kBoxRows, class Boxes>
__device__ __forceinline__ void load_paged_tile(unsigned char* tile, const TensorMap* map, u64* full, const Boxes& boxes,
                                                int head, int block_size) {
  ptx::mbarrier_arrive_expect_tx(full, Tile::kBytes);
  boxes.for_each(block_size, [&](int box, const KeyPlace& place) {
#pragma unroll
    for (int slab = 0; slab < Tile::kSlabs; ++slab) {
      ptx::tma_load_4d(tile + slab * Tile::kSlabBytes + box * kBoxRows * Tile::kSpan, map, full,
                       slab * Tile::kSlabColumns, place.slot, head, place.block);
    }
  });
}

// Rows [first, end) of a tile that a copy has filled become zero, for wgmma to read. All lanes of a warp together.
template <class Tile>
__device__ __forceinline__ void clear_rows(unsigned char* tile, int first, int end) {
  constexpr int kRowPieces = Tile::kSpan / 16;  // a swizzle permutes pieces within a row
  const int lane = static_cast<int>(threadIdx.x) % 32;
#pragma unroll 1
  for (int slab = 0; slab < Tile::kSlabs; ++slab) {
#pragma unroll 1
    for (int piece = first * kRowPieces + lane; piece < end * kRowPieces; piece += 32) {
      *reinterpret_cast<uint4*>(tile + slab * Tile::kSlabBytes + piece * 16) = make_uint4(0, 0, 0, 0);
    }
  }
  ptx::fence_proxy_async_shared();
  __syncwarp();
}

constexpr int round_to_pattern(int bytes) { return (bytes + 1023) / 1024 * 1024; }

// Offsets in bytes. kWorkBytes: what a stage of the work ring holds. Tiles begin at multiples of 1024, the largest swizzle
// pattern; a stage's size is a multiple of its own.
template <int kConsumers, class QueryTile, class KeyTile, class ValueTile, int kStages, int kWorkBytes>
struct SharedLayout {
  static constexpr int kQueries = 0;
  static constexpr int kKeys = round_to_pattern(kConsumers * QueryTile::kBytes);
  static constexpr int kValues = kKeys + round_to_pattern(kStages * KeyTile::kBytes);
  static constexpr int kQueryRing = kValues + kStages * ValueTile::kBytes;
  static constexpr int kKeyRing = kQueryRing + StageRing<kConsumers>::kBytes;
  static constexpr int kValueRing = kKeyRing + StageRing<kStages>::kBytes;
  static constexpr int kWorkRing = kValueRing + StageRing<kStages>::kBytes;
  static constexpr int kWorkNumbers = kWorkRing + StageRing<2>::kBytes;
  static constexpr int kTails = kWorkNumbers + 2 * kWorkBytes;  // a barrier a stage, for values of which some become zero
  static constexpr int kWishRing = kTails + kStages * static_cast<int>(sizeof(u64));  // for the next tile (scheduler.cuh)
  static constexpr int kBytes = kWishRing + StageRing<1>::kBytes;
};

}  // namespace cki::attention
