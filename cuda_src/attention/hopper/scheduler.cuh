// Which block computes which tile of queries, and in what order.
//
// Work is numbered so that what runs at the same time shares keys and values in the L2 cache: heads come in sections, and
// within a section the row blocks follow one another, all heads of a row block before the next. A small section's keys and
// values are read from memory evenly in time, and are still in the cache when its last row block comes. With a limit on the
// right (causal) the row blocks with most keys come first, so that short ones fill the gaps at the end; for that the last
// section may have more heads than the others.
//
// Three ways to hand the numbers out:
//   single    a block for each number; the hardware starts them in order
//   fixed     as many blocks as fit the GPU, each takes every gridDim-th number, the direction alternating from round to
//             round: a block with a long tile gets a short one next
//   dynamic   as many blocks as fit; the next number is drawn from a counter in global memory, which is zero at the start
//             (reset_counter.cu, one launch before)
// A block with many tiles hides the start of one tile behind the end of the one before. Which block computes a tile has
// no influence on its result.
#pragma once

#include "common/reduce.cuh"
#include "common/stage_ring.cuh"
#include "common/types.cuh"
#include "ptx/elect.cuh"

namespace cki::attention {

enum class Schedule { single = 0, fixed = 1, dynamic = 2 };

struct WorkTile {
  int row_block;
  int head;
  int batch;
};

// One row block of one head of a sequence.
struct SequenceTile {
  int row_block;  // of the sequence; negative: there is no more work
  int head;
  int sequence;     // packed: -1 or the number of sequences for rows of no sequence, which have no keys
  int first_query;  // of the sequence, along the axis of all queries
  int queries;
  int first_key;  // likewise; 0 in a cache
  int keys;
};

// The sizes that turn a number into a tile. All of them come from the host: what a block computes and keeps is a register
// less for its main loop.
struct WorkOrder {
  int row_blocks;     // of a sequence, or slots
  int heads;
  int batch_heads;    // batches times heads
  int section_heads;  // (batch, head) pairs in a section
  int last_section;   // which takes all heads that are left
  int total;          // row_blocks times batch_heads

  template <bool kLongestFirst>
  __device__ __forceinline__ WorkTile tile(int number) const {
    const int section = min(number / (section_heads * row_blocks), last_section);
    const int first_head = section * section_heads;
    const int heads_here = section < last_section ? section_heads : batch_heads - first_head;
    const int within = number - first_head * row_blocks;
    const int row_block = within / heads_here;
    const int batch_head = first_head + within - row_block * heads_here;
    const int batch = batch_head / heads;
    return {kLongestFirst ? row_blocks - 1 - row_block : row_block, batch_head - batch * heads, batch};
  }
};

// The numbers of one block where they are not drawn.
template <Schedule kSchedule>
struct WorkSequence {
  int total;
  int round = 0;

  __device__ __forceinline__ explicit WorkSequence(int total) : total(total) {}

  // After the first, which is blockIdx.x; `total` where there is none.
  __device__ __forceinline__ int next() {
    if constexpr (kSchedule == Schedule::single) {
      return total;
    } else {
      const int blocks = static_cast<int>(gridDim.x), block = static_cast<int>(blockIdx.x);
      ++round;
      // 64-bit, because the last round may begin near 2^31.
      const i64 next = static_cast<i64>(round) * blocks + (round % 2 ? blocks - 1 - block : block);
      return next < total ? static_cast<int>(next) : total;
    }
  }
};

// The tiles of one block, one after the other. One thread of the producer's warpgroup does nothing but turn numbers into
// tiles and hand them over in shared memory, one ahead: the divisions and what they need would cost consumers registers, and
// time between tiles; between two copies they would delay these. Not needed by the single schedule, where all know the tile.
template <Schedule kSchedule, bool kLongestFirst>
struct WorkSource {
  const WorkOrder order;
  u32* counter;
  StageRing<2> ring;
  StageRing<1> wish;  // full: the next tile may be drawn
  WorkTile* tiles;    // one for each stage of the ring
  SequenceTile tile;

  // queries, keys: of each sequence.
  __device__ __forceinline__ WorkSource(const WorkOrder& order, int queries, int keys, u32* counter,
                                        unsigned char* ring_memory, unsigned char* tiles, unsigned char* wish_memory)
      : order(order),
        counter(counter),
        ring(ring_memory),
        wish(wish_memory),
        tiles(reinterpret_cast<WorkTile*>(tiles)),
        tile{-1, 0, 0, 0, queries, 0, keys} {}

  // takers: threads that take tiles, each of which says that it has read one. One arrival for a warp, behind a __syncwarp,
  // would do: that orders the other lanes' reads before it. But compute-sanitizer's racecheck follows only what a thread
  // itself waits for and says, and took each of them for a race with the next tile's write.
  __device__ __forceinline__ void initialise(int takers) const {
    ring.initialise(takers);
    wish.initialise(1);
  }

  // The whole work of the warp that hands over, by one thread. Prepare: of packed sequences (packed_work.cuh).
  template <class Prepare>
  __device__ __forceinline__ void hand_over(Prepare) {
    if (kSchedule == Schedule::single || !ptx::elect_one()) return;
    WorkSequence<kSchedule> numbers(order.total);
    int number = static_cast<int>(blockIdx.x);
    while (true) {
      const bool is_work = number < order.total;
      const WorkTile next = is_work ? order.template tile<kLongestFirst>(number) : WorkTile{-1, 0, 0};
      ring.wait_empty();
      tiles[ring.stage] = next;
      ptx::mbarrier_arrive(ring.full + ring.stage);
      ring.advance();
      if (!is_work) return;
      if constexpr (kSchedule == Schedule::dynamic) {
        wish.wait_full();
        wish.advance();
        number = static_cast<int>(gridDim.x + atomicAdd(counter, 1u));
      } else {
        number = numbers.next();
      }
    }
  }

  // One thread, once a tile: the next number may be drawn.
  __device__ __forceinline__ void wish_for_next() const {
    if constexpr (kSchedule == Schedule::dynamic) ptx::mbarrier_arrive(wish.full);
  }

  __device__ __forceinline__ bool has_work() const { return tile.row_block >= 0; }

  // Goes to the first tile, and on to the next one: a whole warp, or one thread of a warp.
  template <bool kOneThread = false>
  __device__ __forceinline__ void begin() {
    if constexpr (kSchedule == Schedule::single) {
      set(order.template tile<kLongestFirst>(static_cast<int>(blockIdx.x)));
    } else {
      take<kOneThread>();
    }
  }
  template <bool kOneThread = false>
  __device__ __forceinline__ void next() {
    if constexpr (kSchedule == Schedule::single) {
      tile.row_block = -1;
    } else {
      take<kOneThread>();
    }
  }

 private:
  __device__ __forceinline__ void set(const WorkTile& given) {
    tile.row_block = given.row_block;
    tile.head = given.head;
    tile.sequence = given.batch;
  }

  template <bool kOneThread>
  __device__ __forceinline__ void take() {
    ring.wait_full();
    const WorkTile given = tiles[ring.stage];
    if constexpr (kOneThread) {
      set(given);
    } else {
      // The shuffles tell the compiler that the tile, and all branches that follow from it, are uniform in the warp: else
      // descriptors and barriers go through vector registers in the main loop.
      set({__shfl_sync(kFullWarp, given.row_block, 0), __shfl_sync(kFullWarp, given.head, 0),
           __shfl_sync(kFullWarp, given.batch, 0)});
      __syncwarp();
    }
    ring.release_by_one();
  }
};

}  // namespace cki::attention
