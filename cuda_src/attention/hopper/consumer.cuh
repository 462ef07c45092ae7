// What a consumer warpgroup works on, and how it passes over a tile of keys.
#pragma once

#include "attention/hopper/key_range.cuh"
#include "attention/hopper/scheduler.cuh"
#include "common/types.cuh"

namespace cki::attention {

// A tile of queries, and the keys that its block's rows and the consumer's own rows see.
template <class Band, int kBlockKeys, int kGroupQueries, int kConsumers>
struct ConsumerPart {
  static constexpr int kBlockQueries = kGroupQueries * kConsumers;

  SequenceTile tile;
  Band band;
  KeyRange<kBlockKeys> block;
  KeyRange<kBlockKeys> own;

  __device__ __forceinline__ ConsumerPart(const SequenceTile& tile, const Band& band, int consumer)
      : tile(tile),
        band(band),
        block(band, tile.row_block * kBlockQueries, min((tile.row_block + 1) * kBlockQueries, tile.queries)),
        own(band, first_query(consumer), min(first_query(consumer) + kGroupQueries, tile.queries)) {}

  __device__ __forceinline__ int first_query(int consumer) const {
    return tile.row_block * kBlockQueries + consumer * kGroupQueries;
  }
  // Whether the block's last tile of keys is the consumer's too.
  __device__ __forceinline__ bool ends_with_block() const {
    return !own.is_empty() && own.begin_tile == block.begin_tile;
  }
};

// A tile of which the block needs something, but this warpgroup nothing. It keeps its place in the rings and turns.
template <class KeyRing, class ValueRing, class Turns>
__device__ __forceinline__ void skip_tile(KeyRing& keys, ValueRing& values, const Turns& turns) {
  keys.wait_full();
  __syncwarp();
  keys.release();
  turns.take();
  turns.pass();
  values.wait_full();
  __syncwarp();
  values.release();
}

}  // namespace cki::attention
