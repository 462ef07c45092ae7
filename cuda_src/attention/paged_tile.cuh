// Tiles of keys and values out of a paged cache: where each key of a tile lies, and the copy from there.
//
// The places of a tile's keys are found by the block together, each thread for its own keys, and handed over in shared
// memory: one look into the block table and one division a key, however many threads copy pieces of its row. The table
// is read a whole tile ahead of the copy that needs it, so that its latency lies behind the products.
#pragma once

#include "attention/tile.cuh"
#include "common/types.cuh"

namespace cki::attention {

// A key's place in the cache. block < 0: there is none, and zeros stand for it.
struct KeyPlace {
  int block;
  int slot;
};

// A key's entry in the table, as it was read: what follows from it is computed where it is used, so that the load can wait.
template <class TableIndex>
struct BoxEntry {
  TableIndex block{-1};
  int slot = 0;

  // A lane's box of tile j of a sequence of `keys` keys.
  template <int kBoxKeys, bool, int kTileKeys, class Row>
  __device__ __forceinline__ void find_own(const Row& row, int j, int keys) {
    const int lane = static_cast<int>(threadIdx.x) % 32, key = j * kTileKeys + lane * kBoxKeys;
    if (j >= 0 && lane * kBoxKeys < kTileKeys && key < keys) *this = row.entry(key);
  }

  // blocks: of the cache. Entries outside it stand for zeros.
  __device__ __forceinline__ KeyPlace place(int blocks) const {
    const i64 entry = static_cast<i64>(block);
    return {entry >= 0 && entry < blocks ? static_cast<int>(entry) : -1, slot};
  }
};

// One sequence's row of the block table.
template <class TableIndex>
struct BlockRow {
  const TableIndex* entries;
  i64 entry_stride;
  int blocks;  // of the cache
  int block_size;

  __device__ __forceinline__ BoxEntry<TableIndex> entry(int key) const {
    const int column = key / block_size;
    return {entries[column * entry_stride], key - column * block_size};
  }
  __device__ __forceinline__ KeyPlace find(int key) const { return entry(key).place(blocks); }
};

// The entries of a tile's boxes, for one thread that copies them all. Slots follow from the tile where they are used.
template <class TableIndex, int kBoxes>
struct TileEntries {
  TableIndex blocks[kBoxes];
  int first_key = 0, block_size = 0;

  // Of tile j of a sequence of `keys` keys; kIsBlock: a box is a whole block.
  template <int kBoxKeys, bool kIsBlock, int kTileKeys>
  __device__ __forceinline__ void find_own(const BlockRow<TableIndex>& row, int j, int keys) {
    first_key = j * kBoxes * kBoxKeys;
    block_size = row.block_size;
#pragma unroll
    for (int i = 0; i < kBoxes; ++i) {
      const int key = first_key + i * kBoxKeys;
      blocks[i] = TableIndex(-1);
      if (j >= 0 && key < keys) blocks[i] = row.entries[(kIsBlock ? j * kBoxes + i : key / block_size) * row.entry_stride];
    }
  }
  template <int kBoxKeys, bool kIsBlock>
  __device__ __forceinline__ KeyPlace place(int box, int count) const {
    const i64 entry = static_cast<i64>(blocks[box]);
    return {entry >= 0 && entry < count ? static_cast<int>(entry) : -1,
            kIsBlock ? 0 : (first_key + box * kBoxKeys) % block_size};
  }
};

// What a thread that copies knows of a tile: the entries of all boxes, or its own.
template <class TableIndex, int kBoxes, bool kAll>
struct TileBoxes {
  using Type = BoxEntry<TableIndex>;
};
template <class TableIndex, int kBoxes>
struct TileBoxes<TableIndex, kBoxes, true> {
  using Type = TileEntries<TableIndex, kBoxes>;
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
