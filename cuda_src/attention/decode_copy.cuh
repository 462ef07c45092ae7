// Where a tile of 16 keys lies in a cache, and its copy into a warp's ring.
//
// A tile's keys lie in as many blocks as the block size makes; each lane finds the place of one key, and when the tile
// is copied the lanes ask each other. With kWholeTiles (a multiple of 16 keys a block, or no blocks at all) all keys
// of a tile follow one another, and every lane knows the one place.
//
// What is not a key of the sequence is filled with zeros: 0 times NaN is NaN, so a weight of zero would not hide it.
#pragma once

#include "attention/decode_tile.cuh"
#include "attention/tile.cuh"
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

// Of lane l % 16's key (kWholeTiles: of the tile's first): its block (dense: the sequence; ragged: the sequence's
// first token) and its place there. block < 0: no such key.
struct TilePlace {
  i64 block;
  int place;
  int kv_head;
  int first_valid, end_valid;  // keys of the tile that exist and may be seen
};

template <class Stage, class TableIndex, int kPaging, bool kWholeTiles, int kCopyBytes, int kHeadDim, int kValueDim>
struct KeySource {
  using Element = typename Stage::Keys::Element;
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

  // Tile of keys [first, +16) of a sequence, of which those in [begin, end) count. offset(): a ragged sequence's first
  // token.
  template <class Offset>
  __device__ __forceinline__ TilePlace find(int sequence, int kv_head, int first, int begin, int end,
                                            Offset offset) const {
    TilePlace found;
    found.kv_head = kv_head;
    found.first_valid = max(begin - first, 0);
    found.end_valid = min(end - first, kTileKeys);
    found.block = -1;
    found.place = first;
    if (found.first_valid >= found.end_valid) return found;
    if constexpr (kPaging == 1) found.block = sequence;
    if constexpr (kPaging == 2) found.block = offset();
    if constexpr (kPaging == 0) {
      const int row = kWholeTiles ? 0 : static_cast<int>(threadIdx.x) % kTileKeys;
      if (kWholeTiles || (row >= found.first_valid && row < found.end_valid)) {
        const int column = (first + row) / block_size;
        found.place = first + row - column * block_size;
        const i64 block = static_cast<i64>(block_table[sequence * table_batch + column * table_column]);
        if (block >= 0 && block < num_blocks) found.block = block;
      }
    }
    return found;
  }

  // Starts the copies of this lane, in its current group.
  __device__ __forceinline__ void copy(unsigned char* stage, const TilePlace& at) const {
    copy_rows<typename Stage::Keys, kHeadDim>(stage, k + at.kv_head * k_head, k_block, k_token, at);
    copy_rows<typename Stage::Values, kValueDim>(stage + Stage::kValues, v + at.kv_head * v_head, v_block, v_token, at);
    if constexpr (Stage::kScales) {  // lanes 0-15 of keys, 16-31 of values
      const int lane = static_cast<int>(threadIdx.x) % 32;
      const int row = lane % kTileKeys;
      const bool valid = at.block >= 0 && row >= at.first_valid && row < at.end_valid;
      const i64 slot = at.block * block_size + at.place + (kWholeTiles ? row : 0);
      const float* scales = lane < kTileKeys ? k_scale : v_scale;
      ptx::cp_async<4>(stage + Stage::kScale + lane * 4, valid ? scales + slot * kv_heads + at.kv_head : scales,
                       valid ? 4 : 0);
    }
  }

 private:
  template <class T, int kDim>
  __device__ __forceinline__ void copy_rows(unsigned char* tile, const Element* head, i64 block_stride,
                                            i64 token_stride, const TilePlace& at) const {
    constexpr int kPieces = T::kRowBytes / kCopyBytes;  // of a row
    constexpr int kPerPiece = kCopyBytes / static_cast<int>(sizeof(Element));
    constexpr int kTrips = kTileKeys * kPieces / 32;
    static_assert(kTileKeys * kPieces % 32 == 0, "all lanes copy");
    constexpr bool kRegular = kWholeTiles && 32 % kPieces == 0;  // every trip of a lane has the same piece of a row
    const int lane = static_cast<int>(threadIdx.x) % 32;
    const i64 outer_stride = kPaging == 2 ? token_stride : block_stride;
    const i64 own = at.block < 0 ? -1 : at.block * outer_stride + at.place * token_stride;
    if constexpr (kRegular) {
      const int first_row = lane / kPieces, piece = lane % kPieces;
      unsigned char* target = tile + first_row * T::kPitch + piece * kCopyBytes;
      const bool inside = own >= 0 && piece * kPerPiece < kDim;
      const Element* source = inside ? head + own + first_row * token_stride + piece * kPerPiece : head;
      const i64 step = inside ? 32 / kPieces * token_stride : 0;
      if (own >= 0 && at.first_valid == 0 && at.end_valid == kTileKeys) {  // nearly always, and for all lanes
#pragma unroll
        for (int trip = 0; trip < kTrips; ++trip) {
          ptx::cp_async<kCopyBytes>(target + trip * (32 / kPieces * T::kPitch), source, inside ? kCopyBytes : 0);
          source += step;
        }
        return;
      }
#pragma unroll 1
      for (int trip = 0; trip < kTrips; ++trip) {
        const int row = first_row + trip * (32 / kPieces);
        const bool valid = inside && row >= at.first_valid && row < at.end_valid;
        ptx::cp_async<kCopyBytes>(target + trip * (32 / kPieces * T::kPitch), valid ? source : head,
                                  valid ? kCopyBytes : 0);
        source += step;
      }
    } else {
#pragma unroll(kTrips <= 16 ? kTrips : 8)
      for (int trip = 0; trip < kTrips; ++trip) {
        const int row = (lane + trip * 32) / kPieces, piece = (lane + trip * 32) % kPieces;
        const i64 offset = kWholeTiles ? own + row * token_stride : __shfl_sync(kFullWarp, own, row);
        const bool valid = (kWholeTiles ? own : offset) >= 0 && row >= at.first_valid && row < at.end_valid &&
                           piece * kPerPiece < kDim;
        ptx::cp_async<kCopyBytes>(tile + row * T::kPitch + piece * kCopyBytes,
                                  valid ? head + offset + piece * kPerPiece : head, valid ? kCopyBytes : 0);
      }
    }
  }
};

}  // namespace cki::attention
