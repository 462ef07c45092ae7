// Work of packed sequences: which block computes which row block of which sequence.
//
// Row blocks are numbered by slots (attention/packed_sequences.cuh), whose number follows from the tokens and the batch
// alone: the grid is fixed while lengths change. Numbers are handed out as for dense tensors (scheduler.cuh). The
// producer's warp finds the sequence of a slot, passes over slots that hold no rows, and hands what it found to the
// consumers in shared memory, one tile ahead: they neither search nor meet an empty slot, and both cost nothing while
// there is work to hide them.
#pragma once

#include "attention/hopper/scheduler.cuh"
#include "attention/packed_sequences.cuh"
#include "common/reduce.cuh"
#include "common/stage_ring.cuh"
#include "common/types.cuh"

namespace cki::attention {

// Queries and keys of all sequences. kPaged: key_offsets holds the number of keys of each, else where they begin and end.
template <int kBlockRows, bool kPaged, class QueryOffset, class KeyOffset>
struct SequenceList {
  QuerySegments<kBlockRows, QueryOffset> segments;
  const KeyOffset* key_offsets;
  i64 key_offset_stride;
  int key_length;  // that a sequence can have at most

  // The tile of a slot; its row block is negative where the slot holds no rows. All lanes of a warp together.
  template <bool kLongestFirst>
  __device__ __forceinline__ SequenceTile tile(int slot, int head) const {
    const int segment = segments.find(slot);
    SequenceTile tile{slot - segments.first_slot(segment), head, segment - 1, segments.begin(segment), 0, 0, 0};
    tile.queries = segments.begin(segment + 1) - tile.first_query;
    const int row_blocks = (tile.queries + kBlockRows - 1) / kBlockRows;
    if (tile.row_block >= row_blocks) {
      tile.row_block = -1;
      return tile;
    }
    if constexpr (kLongestFirst) tile.row_block = row_blocks - 1 - tile.row_block;
    if (tile.sequence >= 0 && tile.sequence < segments.batch) {
      const i64 at = tile.sequence * key_offset_stride;
      tile.keys = offset_within(key_offsets, at, key_length);
      if constexpr (!kPaged) {
        tile.first_key = tile.keys;
        tile.keys = max(0, offset_within(key_offsets, at + key_offset_stride, key_length) - tile.first_key);
      }
    }
    return tile;
  }
};

// The tiles of one block, one after the other. The same use as WorkSource, but for the producer's part, which is the
// work of a whole warp.
template <Schedule kSchedule, bool kLongestFirst, class Sequences>
struct PackedWorkSource {
  const Sequences sequences;
  const WorkOrder order;  // its row blocks are slots
  u32* counter;
  StageRing<2> ring;
  SequenceTile* tiles;  // one for each stage of the ring
  SequenceTile tile{};
  WorkSequence<kSchedule> numbers;
  int issuer = 0;  // the lane that draws and publishes
  u32 drawn = 0;   // its

  __device__ __forceinline__ PackedWorkSource(const Sequences& sequences, const WorkOrder& order, u32* counter,
                                              unsigned char* ring_memory, unsigned char* tiles)
      : sequences(sequences),
        order(order),
        counter(counter),
        ring(ring_memory),
        tiles(reinterpret_cast<SequenceTile*>(tiles)),
        numbers(order.total) {}

  // The shuffles tell the compiler that all of it is uniform in the warp.
  static __device__ __forceinline__ SequenceTile uniform(const SequenceTile& given) {
    const auto same = [](int value) { return __shfl_sync(kFullWarp, value, 0); };
    return {same(given.row_block), same(given.head),      same(given.sequence), same(given.first_query),
            same(given.queries),   same(given.first_key), same(given.keys)};
  }

  __device__ __forceinline__ bool has_work() const { return tile.row_block >= 0; }

  // Producer: finds the first tile. is_issuer: of one lane.
  __device__ __forceinline__ void begin_producer(bool is_issuer) {
    issuer = __ffs(static_cast<int>(__ballot_sync(kFullWarp, is_issuer))) - 1;
    publish_from(static_cast<int>(blockIdx.x));
    next_of_producer();
  }

  // As in WorkSource; the issuer draws, at least, and the whole warp looks ahead.
  __device__ __forceinline__ void draw() {
    if constexpr (kSchedule == Schedule::dynamic) {
      if (threadIdx.x == static_cast<u32>(issuer)) drawn = gridDim.x + atomicAdd(counter, 1u);
    }
  }

  __device__ __forceinline__ void look_ahead() {
    __syncwarp();
    publish_from(next_number());
  }
  // What was handed over is read back: the producer has few registers to keep it.
  __device__ __forceinline__ void next_of_producer() {
    __syncwarp();
    tile = uniform(tiles[ring.stage ^ 1]);
  }

  // Consumers: take the first tile, and the next ones.
  __device__ __forceinline__ void begin_consumer() { take(); }
  __device__ __forceinline__ void next_of_consumer() {
    __syncwarp();
    ring.release();
    take();
  }

 private:
  __device__ __forceinline__ int next_number() {
    if constexpr (kSchedule == Schedule::dynamic) {
      return static_cast<int>(__shfl_sync(kFullWarp, drawn, issuer));
    } else {
      return numbers.next();
    }
  }

  // The first tile that has rows, from `number` on, goes to the consumers; or the news that there is none.
  __device__ __forceinline__ void publish_from(int number) {
    SequenceTile next{-1, 0, 0, 0, 0, 0, 0};
    while (number < order.total) {
      const WorkTile slot = order.template tile<kLongestFirst>(number);
      next = sequences.template tile<kLongestFirst>(slot.row_block, slot.head);
      if (next.row_block >= 0) break;
      draw();
      number = next_number();
    }
    ring.wait_empty();
    __syncwarp();
    if (threadIdx.x == static_cast<u32>(issuer)) {
      tiles[ring.stage] = next;
      ptx::mbarrier_arrive(ring.full + ring.stage);
    }
    ring.advance();
  }

  __device__ __forceinline__ void take() {
    ring.wait_full();
    tile = uniform(tiles[ring.stage]);
  }
};

}  // namespace cki::attention
