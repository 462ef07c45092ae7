// Work of packed sequences: which block computes which row block of which sequence.
//
// Row blocks are numbered by slots (attention/packed_sequences.cuh), whose number follows from the tokens and the batch
// alone: the grid is fixed while lengths change. Numbers are handed out as for dense tensors (scheduler.cuh). A warp of
// the producer's warpgroup does nothing but find the sequence of a slot, pass over slots that hold no rows, and hand the
// tile over in shared memory, one ahead. Those that copy and the consumers take it from there: none of them searches or
// meets an empty slot. A search takes about 2000 cycles (a draw and several reads from memory, one after the other),
// which between two copies would leave the consumers without keys.
#pragma once

#include "attention/hopper/scheduler.cuh"
#include "attention/packed_sequences.cuh"
#include "common/reduce.cuh"
#include "common/stage_ring.cuh"
#include "common/types.cuh"

namespace cki::attention {

// Queries and keys of all sequences. kPaged: key_offsets holds the number of keys of each, else where they begin and end.
template <int kBlockQueries, bool kPaged, class QueryOffset, class KeyOffset>
struct SequenceList {
  QuerySegments<kBlockQueries, QueryOffset> segments;
  const KeyOffset* key_offsets;
  i64 key_offset_stride;
  int key_length;  // that a sequence can have at most

  // The tile of a slot; its row block is negative where the slot holds no rows. All lanes of a warp together.
  template <bool kLongestFirst>
  __device__ __forceinline__ SequenceTile tile(int slot, int head) const {
    const int segment = segments.find(slot);
    SequenceTile tile{slot - segments.first_slot(segment), head, segment - 1, segments.begin(segment), 0, 0, 0};
    tile.queries = segments.begin(segment + 1) - tile.first_query;
    const int row_blocks = (tile.queries + kBlockQueries - 1) / kBlockQueries;
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

// The tiles of one block, one after the other.
template <Schedule kSchedule, bool kLongestFirst, class Sequences>
struct PackedWorkSource {
  const Sequences sequences;
  const WorkOrder order;  // its row blocks are slots
  u32* counter;
  StageRing<2> ring;
  StageRing<1> wish;    // full: the next tile may be drawn
  SequenceTile* tiles;  // one for each stage of the ring
  SequenceTile tile{};

  __device__ __forceinline__ PackedWorkSource(const Sequences& sequences, const WorkOrder& order, u32* counter,
                                              unsigned char* ring_memory, unsigned char* tiles,
                                              unsigned char* wish_memory)
      : sequences(sequences),
        order(order),
        counter(counter),
        ring(ring_memory),
        wish(wish_memory),
        tiles(reinterpret_cast<SequenceTile*>(tiles)) {}

  // takers: threads that take tiles, each of which says that it has read one (scheduler.cuh says why not a warp).
  __device__ __forceinline__ void initialise(int takers) const {
    ring.initialise(takers);
    wish.initialise(1);
  }

  // The whole work of the warp that hands over. prepare(tile): what else it does for a tile, after it has handed it over.
  template <class Prepare>
  __device__ __forceinline__ void hand_over(Prepare prepare) {
    WorkSequence<kSchedule> numbers(order.total);
    int number = static_cast<int>(blockIdx.x);
    while (true) {
      SequenceTile next{-1, 0, 0, 0, 0, 0, 0};
      while (number < order.total) {
        const WorkTile slot = order.template tile<false>(number);  // a sequence's row blocks are turned round below
        next = sequences.template tile<kLongestFirst>(slot.row_block, slot.head);
        if (next.row_block >= 0) break;
        number = next_number(numbers);
      }
      ring.warp_wait_empty();
      if (threadIdx.x % 32 == 0) {
        tiles[ring.stage] = next;
        ptx::mbarrier_arrive(ring.full + ring.stage);
      }
      ring.advance();
      if (next.row_block < 0) return;
      prepare(next);
      if constexpr (kSchedule == Schedule::dynamic) {
        wish.warp_wait_full();
        wish.advance();
      }
      number = next_number(numbers);
    }
  }

  // One thread, once a tile: the next number may be drawn.
  __device__ __forceinline__ void wish_for_next() const {
    if constexpr (kSchedule == Schedule::dynamic) ptx::mbarrier_arrive(wish.full);
  }

  // Goes to the first tile, and on to the next one: a whole warp, or one thread of a warp.
  template <bool kOneThread = false>
  __device__ __forceinline__ void begin() {
    next<kOneThread>();
  }
  template <bool kOneThread = false>
  __device__ __forceinline__ void next() {
    if constexpr (!kOneThread) __syncwarp();
    ring.wait_full();
    const SequenceTile given = tiles[ring.stage];
    if constexpr (kOneThread) {
      tile = given;
    } else {
      // The shuffles tell the compiler that all of it is uniform in the warp.
      const auto same = [](int value) { return __shfl_sync(kFullWarp, value, 0); };
      tile = {same(given.row_block), same(given.head),      same(given.sequence), same(given.first_query),
              same(given.queries),   same(given.first_key), same(given.keys)};
      __syncwarp();
    }
    ring.release_by_one();
  }

  __device__ __forceinline__ bool has_work() const { return tile.row_block >= 0; }

 private:
  __device__ __forceinline__ int next_number(WorkSequence<kSchedule>& numbers) const {
    if constexpr (kSchedule == Schedule::dynamic) {
      u32 drawn = 0;
      if (threadIdx.x % 32 == 0) drawn = gridDim.x + atomicAdd(counter, 1u);
      return static_cast<int>(__shfl_sync(kFullWarp, drawn, 0));
    } else {
      return numbers.next();
    }
  }
};

}  // namespace cki::attention
