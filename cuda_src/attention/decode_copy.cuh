// Where a tile of 16 keys lies in a cache, and its copy into a warp's ring.
//
// A warp's next 32 tiles are found together, one by each lane: its place in the line of work, then the table's entry.
// So finding costs a thirty-second of a tile's time, and a table entry's latency is paid once for 32 tiles. When a tile
// is copied, its lane tells the others.
//
// With kWholeTiles (a multiple of 16 keys a block, or no blocks at all) all keys of a tile follow one another, and what a
// lane tells is where they begin, in elements. Else each lane looks up the block of one key; that entry is asked for one
// tile ahead.
//
// Where a lane's pieces go in a tile is found once, too (CopyTargets).
//
// What is not a key of the sequence is filled with zeros: 0 times NaN is NaN, so a weight of zero would not hide it.
#pragma once

#include "attention/decode_tile.cuh"
#include "common/types.cuh"
#include "ptx/cp_async.cuh"

namespace cki::attention {

// A stage of the ring: keys, values, then for scales of tokens 16 of keys and 16 of values.
template <class KeyTile, class ValueTile, bool kTokenScales>
struct StageLayout {
  using Keys = KeyTile;
  using Values = ValueTile;
  static constexpr bool kScales = kTokenScales;
  static constexpr int kValues = Keys::kBytes;
  static constexpr int kScale = kValues + Values::kBytes;
  static constexpr int kBytes = kScale + (kTokenScales ? 2 * kTileKeys * 4 : 0);
};

// Where a lane's pieces of kCopyBytes go in a tile, when all its trips have the same piece of a row.
template <class T, int kCopyBytes>
struct CopyTargets {
  static constexpr int kPieces = T::kRowBytes / kCopyBytes;  // of a row
  static constexpr bool kRegular = 32 % kPieces == 0;
  static constexpr int kRowsATrip = kRegular ? 32 / kPieces : 1;
  // swizzle(row + 8) = swizzle(row)
  static constexpr int kWays = kRegular && T::kSwizzled && kRowsATrip < 8 ? 8 / kRowsATrip : 1;
  int of[kWays];

  __device__ __forceinline__ CopyTargets() {
    const int lane = static_cast<int>(threadIdx.x % 32), piece = lane % kPieces;
#pragma unroll
    for (int way = 0; way < kWays; ++way)
      of[way] = kept_in_register(T::offset(lane / kPieces + way * kRowsATrip, 0, piece * kCopyBytes / 16) +
                                 piece * kCopyBytes % 16);
  }
  __device__ __forceinline__ int offset_of(int trip) const {
    return of[trip % kWays] + trip / kWays * kWays * kRowsATrip * T::kPitch;
  }
};

// Of a tile's first key (kLookUpKeys: block and place of the lane's own key when copied).
struct TilePlace {
  int block;  // of the cache; dense: the sequence; ragged: the sequence's first token; negative: no such key
  int place;  // in the block
  int sequence;
  int kv_head;
  int valid;   // the tile's keys that are read: [valid % 32, valid / 32); others are zeros
  i64 k, v;    // not kLookUpKeys: where the tile's row of the KV head begins, in elements

  __device__ __forceinline__ int first_valid() const { return valid % 32; }
  __device__ __forceinline__ int end_valid() const { return valid / 32; }
  __device__ __forceinline__ bool all_valid() const { return valid == kTileKeys * 32; }
};

// kBlockShift: block_size is 2 to this power; negative for others. kPrefetch: cp_async's hint, of 16-byte copies.
// kSameStrides: those of values are those of keys.
template <class Stage, class TableIndex, int kPaging, bool kWholeTiles, bool kSameStrides, int kBlockShift,
          int kCopyBytes, int kPrefetch, int kHeadDim, int kValueDim>
struct KeySource {
  using Element = typename Stage::Keys::Element;
  using KeyTargets = CopyTargets<typename Stage::Keys, kCopyBytes>;
  using ValueTargets = CopyTargets<typename Stage::Values, kCopyBytes>;
  static constexpr bool kLookUpKeys = kPaging == 0 && !kWholeTiles;
  const Element* k;
  const Element* v;
  const float* k_scale;
  const float* v_scale;
  const TableIndex* block_table;
  i64 k_block, k_token, k_head, v_block, v_token, v_head;
  i64 table_batch, table_column;
  i64 num_blocks;
  int block_size;
  int kv_heads;

  // The table's entry of the tile of keys [first, +16); not looked at before it is needed. reach: keys of the table.
  __device__ __forceinline__ TableIndex tile_entry(int sequence, int first, int reach) const {
    if constexpr (kPaging == 0 && kWholeTiles) {
      if (first < reach) return entry(sequence, column_of(first));
    }
    return TableIndex{-1};
  }

  // That tile, of which the keys in [begin, end) count. offset: a ragged sequence's first token. Every lane may ask for
  // another tile.
  __device__ __forceinline__ TilePlace find(TableIndex of_tile, int sequence, int kv_head, int first, int begin, int end,
                                            int offset) const {
    const int first_valid = max(begin - first, 0), end_valid = min(end - first, kTileKeys);
    TilePlace found{-1, first, sequence, kv_head, first_valid < end_valid ? first_valid + end_valid * 32 : 0, 0, 0};
    if constexpr (!kLookUpKeys) {
      if (found.valid == 0) return found;
      if constexpr (kPaging == 1) found.block = sequence;
      if constexpr (kPaging == 2) found.block = offset;
      if constexpr (kPaging == 0) {
        found.place = place_of(first);
        found.block = existing(of_tile);
        if (found.block < 0) found.valid = 0;
      }
      found.k = found.block * (kPaging == 2 ? k_token : k_block) + found.place * k_token + kv_head * k_head;
      if constexpr (!kSameStrides)
        found.v = found.block * (kPaging == 2 ? v_token : v_block) + found.place * v_token + kv_head * v_head;
    }
    return found;
  }

  // What lane `lane` found.
  static __device__ __forceinline__ TilePlace of_lane(const TilePlace& found, int lane) {
    const auto told = [&](auto value) { return __shfl_sync(kFullWarp, value, lane); };
    TilePlace at{0, 0, 0, 0, told(found.valid), 0, 0};
    if constexpr (kLookUpKeys || Stage::kScales) {
      at.block = told(found.block);
      at.place = told(found.place);
      at.kv_head = told(found.kv_head);
    }
    if constexpr (kLookUpKeys) {
      at.sequence = told(found.sequence);
    } else {
      at.k = told(found.k);
      at.v = kSameStrides ? at.k : told(found.v);
    }
    return at;
  }

  // kLookUpKeys: the table's entry for key lane % 16 of a tile; not looked at before it is needed.
  __device__ __forceinline__ TableIndex look_up(const TilePlace& at) const {
    const int row = static_cast<int>(threadIdx.x % kTileKeys);
    const bool valid = row >= at.first_valid() && row < at.end_valid();
    return valid ? entry(at.sequence, column_of(at.place + row)) : TableIndex{-1};
  }
  __device__ __forceinline__ TilePlace of_key(TilePlace at, TableIndex entry) const {
    at.place = place_of(at.place + static_cast<int>(threadIdx.x % kTileKeys));
    at.block = existing(entry);
    return at;
  }

  // Starts the copies of this lane, in its current group.
  __device__ __forceinline__ void copy(unsigned char* stage, const TilePlace& at, const KeyTargets& key_targets,
                                       const ValueTargets& value_targets) const {
    copy_rows<typename Stage::Keys, kHeadDim>(stage, k, at.k, k_block, k_token, k_head, at, key_targets);
    copy_rows<typename Stage::Values, kValueDim>(stage + Stage::kValues, v, at.v, v_block, v_token, v_head, at,
                                                 value_targets);
    if constexpr (Stage::kScales) {  // lanes 0-15 of keys, 16-31 of values
      const int lane = static_cast<int>(threadIdx.x % 32);
      const int row = lane % kTileKeys;
      const bool valid = (!kLookUpKeys || at.block >= 0) && row >= at.first_valid() && row < at.end_valid();
      const i64 slot = static_cast<i64>(at.block) * block_size + at.place + (kLookUpKeys ? 0 : row);
      const float* scales = lane < kTileKeys ? k_scale : v_scale;
      ptx::cp_async<4>(stage + Stage::kScale + lane * 4, valid ? scales + slot * kv_heads + at.kv_head : scales,
                       valid ? 4 : 0);
    }
  }

 private:
  // Where a sequence's key lies: the column of the table and the place in the block.
  __device__ __forceinline__ int column_of(int key) const {
    if constexpr (kBlockShift >= 0) return key >> kBlockShift;
    return key / block_size;
  }
  __device__ __forceinline__ int place_of(int key) const {
    if constexpr (kBlockShift >= 0) return key & ((1 << kBlockShift) - 1);
    return key % block_size;
  }
  __device__ __forceinline__ TableIndex entry(int sequence, int column) const {
    return block_table[sequence * table_batch + column * table_column];
  }
  __device__ __forceinline__ int existing(TableIndex block) const {
    return block >= 0 && block < num_blocks ? static_cast<int>(block) : -1;
  }

  // Rows of one of the tensors: from `begin` on, or kLookUpKeys: from each lane's block and place.
  template <class T, int kDim>
  __device__ __forceinline__ void copy_rows(unsigned char* tile, const Element* tensor, i64 begin, i64 block_stride,
                                            i64 token_stride, i64 head_stride, const TilePlace& at,
                                            const CopyTargets<T, kCopyBytes>& targets) const {
    constexpr int kPieces = T::kRowBytes / kCopyBytes;  // of a row
    constexpr int kPerPiece = kCopyBytes / static_cast<int>(sizeof(Element));
    constexpr int kTrips = kTileKeys * kPieces / 32;
    static_assert(kTileKeys * kPieces % 32 == 0, "all lanes copy");
    constexpr bool kRegular = !kLookUpKeys && 32 % kPieces == 0;  // every trip of a lane has the same piece of a row
    constexpr bool kFullRows = kDim == T::kRowBytes / static_cast<int>(sizeof(Element));
    const auto start = [](unsigned char* target, const Element* source, int bytes = kCopyBytes) {
      ptx::cp_async<kCopyBytes, kCopyBytes == 16 ? kPrefetch : 0>(target, source, bytes);
    };
    const int lane = static_cast<int>(threadIdx.x % 32);
    if constexpr (kRegular) {
      constexpr int kRowsATrip = 32 / kPieces;
      const int first_row = lane / kPieces, piece = lane % kPieces;
      const auto target = [&](int trip) { return tile + targets.offset_of(trip); };
      const bool inside = kFullRows || piece * kPerPiece < kDim;
      const Element* source = tensor + (inside ? first_row * token_stride + piece * kPerPiece : 0) + begin;
      const i64 step = inside ? kRowsATrip * token_stride : 0;
      if (at.all_valid()) {  // nearly always, and for all lanes
#pragma unroll
        for (int trip = 0; trip < kTrips; ++trip) {
          start(target(trip), source, inside ? kCopyBytes : 0);
          source += step;
        }
        return;
      }
#pragma unroll 1
      for (int trip = 0; trip < kTrips; ++trip) {
        const int row = first_row + trip * kRowsATrip;
        const bool valid = inside && row >= at.first_valid() && row < at.end_valid();
        start(tile + T::offset(row, 0, piece * kCopyBytes / 16) + piece * kCopyBytes % 16,
              valid ? source + trip * step : tensor, valid ? kCopyBytes : 0);
      }
    } else {
      const i64 own = at.block < 0 ? -1 : at.block * block_stride + at.place * token_stride + at.kv_head * head_stride;
#pragma unroll(kTrips <= 16 ? kTrips : 8)
      for (int trip = 0; trip < kTrips; ++trip) {
        const int row = (lane + trip * 32) / kPieces, piece = (lane + trip * 32) % kPieces;
        const i64 row_start = kLookUpKeys ? __shfl_sync(kFullWarp, own, row) : begin + row * token_stride;
        const bool valid = (!kLookUpKeys || row_start >= 0) && row >= at.first_valid() && row < at.end_valid() &&
                           (kFullRows || piece * kPerPiece < kDim);
        start(tile + T::offset(row, 0, piece * kCopyBytes / 16) + piece * kCopyBytes % 16,
              valid ? tensor + row_start + piece * kPerPiece : tensor, valid ? kCopyBytes : 0);
      }
    }
  }
};

}  // namespace cki::attention
