// Who computes what in decoding: the tiles of all sequences and heads as one line, cut evenly among the blocks.
//
// A unit is one KV head of one sequence (and one block of query rows, where rows are many). Its work is the tiles of
// 16 keys that its queries see, at least one so that empty sequences are written too. Units follow one another,
// sequence after sequence; block i takes the positions [i * chunk, (i + 1) * chunk) of that line (stream-K: Osama et
// al., arXiv 2301.03598). So the work of all blocks is equal to one tile whatever the lengths are, only the first and
// the last unit of a block can be shared with other blocks, and everything follows from lengths in device memory: a
// captured graph adapts.
//
// Unsplit (kSplit false: more units than any split could use), a block takes one unit.
#pragma once

#include "attention/decode_tile.cuh"
#include "common/types.cuh"

namespace cki::attention {

// How many keys each sequence has, and where they begin among those that its queries see.
template <class Index, bool kRagged, bool kLimitLeft>
struct KeyLengths {
  const Index* lengths;  // [batch], or kRagged: offsets [batch + 1]
  i64 stride;
  int capacity;  // keys that a sequence can have at most; ragged: that all have together
  int queries;
  int left;

  // Values outside what can be are cut off, so that nothing outside the cache is read.
  __device__ __forceinline__ int keys(int sequence) const {
    const i64 first = static_cast<i64>(lengths[sequence * stride]);
    if constexpr (!kRagged) return static_cast<int>(max(i64{0}, min(first, static_cast<i64>(capacity))));
    const i64 last = static_cast<i64>(lengths[(sequence + 1) * stride]);
    return first < 0 || last > capacity ? 0 : static_cast<int>(max(last - first, i64{0}));
  }

  // Ragged: where the sequence begins.
  __device__ __forceinline__ int offset(int sequence) const {
    return static_cast<int>(lengths[sequence * stride]);
  }

  // The first key that the first query sees; all queries see none before it.
  __device__ __forceinline__ int first_key(int keys) const {
    if constexpr (kLimitLeft) return min(max(keys - queries - left, 0), keys);
    return 0;
  }

  __device__ __forceinline__ int first_tile(int keys) const { return first_key(keys) / kTileKeys; }

  __device__ __forceinline__ int tiles(int keys) const {
    return max(1, (keys + kTileKeys - 1) / kTileKeys - first_tile(keys));
  }
};

// The line. `keys` and `before` (tiles of the sequences before, of one unit each) are shared memory; sequence `base`
// comes first in them.
struct Schedule {
  int* keys;
  int* before;
  int base;
  int sequences;
  int units;  // of a sequence
  int chunk;  // positions of a block

  __device__ __forceinline__ int tiles(int sequence) const { return before[sequence + 1] - before[sequence]; }

  // Fills the tables for all sequences; all threads of the block call it, and a barrier follows.
  template <int kThreads, class Lengths>
  __device__ __forceinline__ void measure(const Lengths& lengths) {
    const int thread = static_cast<int>(threadIdx.x);
    for (int i = thread; i < sequences; i += kThreads) {  // all loads at once, then the sums
      keys[i] = lengths.keys(base + i);
      before[i + 1] = lengths.tiles(keys[i]);
    }
    if (thread == 0) before[0] = 0;
    __syncthreads();
    if (thread < 32) {
      int sum = 0;
      for (int first = 0; first < sequences; first += 32) {
        const int i = first + thread;
        int running = i < sequences ? before[i + 1] : 0;
#pragma unroll
        for (int distance = 1; distance < 32; distance *= 2) {
          const int lower = __shfl_up_sync(kFullWarp, running, distance);
          if (thread >= distance) running += lower;
        }
        running += sum;
        if (i < sequences) before[i + 1] = running;
        sum = __shfl_sync(kFullWarp, running, 31);
      }
    }
    __syncthreads();
  }

  // Cuts the line for `blocks` blocks; no block gets less than `least` positions.
  __device__ __forceinline__ void cut(int blocks, int least) {
    chunk = max((positions() + blocks - 1) / blocks, least);
  }

  __device__ __forceinline__ int positions() const { return before[sequences] * units; }

  __device__ __forceinline__ int sequence_at(int position) const {
    int low = 0, high = sequences;
    while (high - low > 1) {
      const int middle = (low + high) / 2;
      if (before[middle] * units <= position) {
        low = middle;
      } else {
        high = middle;
      }
    }
    return low;
  }

  __device__ __forceinline__ int unit_begin(int sequence, int unit) const {
    return before[sequence] * units + unit * tiles(sequence);
  }

  // The blocks that share a unit, and where block first_block + i of them keeps its part: a block has two places, one
  // for the unit it begins with and one for the unit it ends with.
  __device__ __forceinline__ int first_block(int unit_begin) const { return unit_begin / chunk; }
  __device__ __forceinline__ int sharing_blocks(int unit_begin, int tiles) const {
    return (unit_begin + tiles - 1) / chunk - first_block(unit_begin) + 1;
  }
  __device__ __forceinline__ int place(int unit_begin, int i) const {
    const int block = first_block(unit_begin) + i;
    return block * 2 + (i == 0 && block * chunk < unit_begin ? 1 : 0);
  }
};

// A place on the line that moves on; `remaining` positions are left from it to the end of the walk.
struct Cursor {
  int sequence;  // relative to the schedule's base
  int unit;
  int tile;  // of the unit
  int remaining;

  __device__ __forceinline__ void advance(const Schedule& schedule, int positions) {
    remaining -= positions;
    tile += positions;
    while (remaining > 0 && tile >= schedule.tiles(sequence)) {
      tile -= schedule.tiles(sequence);
      if (++unit == schedule.units) {
        unit = 0;
        ++sequence;
      }
    }
  }
};

}  // namespace cki::attention
