// Tiles of keys and values out of a paged cache: where each key of a tile lies, and the copy from there.
//
// The places of a tile's keys are found by the block together, each thread for its own keys, and handed over in shared
// memory: one look into the block table and one division a key, however many threads copy pieces of its row. The table
// is read a whole tile ahead of the copy that needs it, so that its latency lies behind the products.
#pragma once

#include "attention/tile.cuh"
#include "common/types.cuh"
#include "ptx/cp_async.cuh"

namespace cki::attention {

// A key's place in the cache. block < 0: there is none, and zeros stand for it.
struct KeyPlace {
  int block;
  int slot;
};

// An entry of the block table. Entries outside the cache stand for zeros.
__device__ __forceinline__ int block_or_none(i64 entry, int blocks) {
  return entry >= 0 && entry < blocks ? static_cast<int>(entry) : -1;
}

// One sequence's row of the block table.
template <class TableIndex>
struct BlockRow {
  const TableIndex* entries;
  i64 entry_stride;
  int blocks;  // of the cache
  int block_size;

  __device__ __forceinline__ KeyPlace find(int key) const {
    const int column = key / block_size;
    return {block_or_none(static_cast<i64>(entries[column * entry_stride]), blocks), key - column * block_size};
  }
};

// An entry as a TMA coordinate: one outside the cache is outside the tensor map, too, which stands for zeros.
__device__ __forceinline__ int block_coordinate(int entry) { return entry; }
__device__ __forceinline__ int block_coordinate(i64 entry) {
  return entry == static_cast<int>(entry) ? static_cast<int>(entry) : -1;
}

// Where the boxes of a tile lie, for one thread that copies them all: kBoxKeys keys each, within one block. kIsBlock: a box is
// a block. kUnitColumns: a row's entries lie side by side. The entries stay as they were read, so that what waits for the
// loads is their use.
template <class TableIndex, int kBoxes, int kBoxKeys, bool kIsBlock, bool kUnitColumns>
struct TileBoxes {
  TableIndex entries[kBoxes];
  int first_slot;

  // Of the tile from first_key on. Keys outside [0, keys) are not looked up.
  __device__ __forceinline__ void find(const BlockRow<TableIndex>& row, int first_key, int keys) {
    const int column = first_key / (kIsBlock ? kBoxKeys : row.block_size);
    const i64 step = kUnitColumns ? 1 : row.entry_stride;
    const TableIndex* entry = row.entries + column * step;
    int slot = first_slot = kIsBlock ? 0 : first_key - column * row.block_size;
#pragma unroll
    for (int box = 0; box < kBoxes; ++box) {
      const int key = first_key + box * kBoxKeys;
      entries[box] = TableIndex(-1);
      if (key >= 0 && key < keys) entries[box] = *entry;
      slot += kBoxKeys;
      if (kIsBlock || slot == row.block_size) {
        slot = 0;
        entry += step;
      }
    }
  }

  // copy(box, place), in order.
  template <class Copy>
  __device__ __forceinline__ void for_each(int block_size, Copy copy) const {
    int slot = first_slot;
#pragma unroll
    for (int box = 0; box < kBoxes; ++box) {
      copy(box, KeyPlace{block_coordinate(entries[box]), kIsBlock ? 0 : slot});
      slot += kBoxKeys;
      if (slot == block_size) slot = 0;
    }
  }
};

// The places of the keys of a tile that this thread looks up: kTileKeys shared out among kThreads.
template <int kTileKeys, int kThreads>
struct OwnPlaces {
  static constexpr int kCount = (kTileKeys + kThreads - 1) / kThreads;
  KeyPlace places[kCount];

  // Of the tile from first_key on. Keys outside [begin, end) are not looked up.
  template <class TableIndex>
  __device__ __forceinline__ void find(const BlockRow<TableIndex>& row, int first_key, int begin, int end) {
#pragma unroll
    for (int i = 0; i < kCount; ++i) {
      const int key = first_key + static_cast<int>(threadIdx.x) + i * kThreads;
      places[i] = key >= begin && key < end ? row.find(key) : KeyPlace{-1, 0};
    }
  }

  __device__ __forceinline__ void publish(KeyPlace* tile_places) const {
#pragma unroll
    for (int i = 0; i < kCount; ++i) {
      const int key = static_cast<int>(threadIdx.x) + i * kThreads;
      if (kTileKeys % kThreads == 0 || key < kTileKeys) tile_places[key] = places[i];
    }
  }
};

// Starts the copy of a tile whose rows lie at `places`. `head`: the cache's first element of the KV head.
template <class T, int kCopyBytes, int kThreads, class Source>
__device__ __forceinline__ void copy_paged_tile(unsigned char* tile, const KeyPlace* places, const Source* head,
                                                i64 block_stride, i64 slot_stride, int head_dim, i64 dim_stride) {
  using Element = typename T::Element;
  constexpr int kPerPiece = kCopyBytes / static_cast<int>(sizeof(Element));
  const i64 piece_stride = kPerPiece == 1 ? dim_stride : kPerPiece;
  PieceShare<T, kCopyBytes, kThreads>::for_each_own([&](int row, int piece) {
    const KeyPlace place = places[row];
    const Source* source = head + place.block * block_stride + place.slot * slot_stride + piece * piece_stride;
    copy_piece<kCopyBytes>(tile + row * T::kPitch + piece * kCopyBytes, source,
                           place.block >= 0 && piece * kPerPiece < head_dim, head);
  });
}

}  // namespace cki::attention
