// Who computes what in decoding: the tiles of all sequences as one line, cut evenly among the blocks.
//
// A unit is one KV head of one sequence (and one block of query rows, where rows are many). Its work is the tiles of
// 16 keys that its queries see, at least one so that empty sequences are written too. Tiles follow one another, sequence
// after sequence; group i of blocks takes the positions [i * chunk, (i + 1) * chunk) of that line (stream-K: Osama et
// al., arXiv 2301.03598). So the work of all groups is equal to one tile whatever the lengths are, only the first and
// the last sequence of a group can be shared with other groups, and everything follows from lengths in device memory: a
// captured graph adapts.
//
// The blocks of a group are the units of a sequence (`together` of them: all, or a part, and then the line passes each
// sequence several times). They read the same tiles for different heads at about the same time: a token's heads lie
// side by side, and memory gives whole rows of it faster than pieces at different times.
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

// The line. `keys` and `before` (tiles of the sequences before, once) are shared memory; sequence `base` comes first in
// them.
struct Schedule {
  int* keys;
  int* before;
  int base;
  int sequences;
  int passes;  // of the line over each sequence
  int chunk;   // positions of a group

  __device__ __forceinline__ int tiles(int sequence) const { return before[sequence + 1] - before[sequence]; }

  // Fills the tables for all sequences; all threads of the block call it, and a barrier follows.
  template <int kThreads, class Lengths>
  __device__ __forceinline__ void measure(const Lengths& lengths) {
    const int thread = static_cast<int>(threadIdx.x);
    if (sequences <= 32) {
      if (thread < 32) add_up(lengths, thread, thread < sequences ? lengths.keys(base + thread) : 0, 0);
    } else {
      for (int i = thread; i < sequences; i += kThreads) keys[i] = lengths.keys(base + i);  // all loads at once
      __syncthreads();
      if (thread < 32) {
        int sum = 0;
        for (int first = 0; first < sequences; first += 32) {
          const int i = first + thread;
          sum = add_up(lengths, i, i < sequences ? keys[i] : 0, sum);
        }
      }
    }
    __syncthreads();
  }

  // Cuts the line for `groups` groups of blocks; none gets less than `least` positions.
  __device__ __forceinline__ void cut(int groups, int least) {
    const u32 above = static_cast<u32>(positions() + groups - 1);
    chunk = max(static_cast<int>(above / static_cast<u32>(groups)), least);  // unsigned: a shorter division
  }

  __device__ __forceinline__ int positions() const { return before[sequences] * passes; }

  __device__ __forceinline__ int sequence_at(int position) const {
    int low = 0, high = sequences;
    while (high - low > 1) {
      const int middle = (low + high) / 2;
      if (before[middle] * passes <= position) {
        low = middle;
      } else {
        high = middle;
      }
    }
    return low;
  }

  __device__ __forceinline__ int unit_begin(int sequence, int pass) const {
    return before[sequence] * passes + pass * tiles(sequence);
  }

  // The groups that share a unit, and which place for parts group first_group + i of them uses: a group has two, one for
  // the sequence it begins with and one for that it ends with.
  __device__ __forceinline__ int first_group(int unit_begin) const { return unit_begin / chunk; }
  __device__ __forceinline__ int sharing_groups(int unit_begin, int tiles) const {
    return (unit_begin + tiles - 1) / chunk - first_group(unit_begin) + 1;
  }
  __device__ __forceinline__ int place(int unit_begin, int i) const {
    const int group = first_group(unit_begin) + i;
    return group * 2 + (i == 0 && group * chunk < unit_begin ? 1 : 0);
  }

 private:
  // Enters lane's sequence i of `count` keys, behind `sum` tiles, into the tables; returns the tiles behind all 32.
  template <class Lengths>
  __device__ __forceinline__ int add_up(const Lengths& lengths, int i, int count, int sum) {
    int running = i < sequences ? lengths.tiles(count) : 0;
#pragma unroll 1
    for (int distance = 1; distance < 32 && distance < sequences; distance *= 2) {
      const int lower = __shfl_up_sync(kFullWarp, running, distance);
      if (static_cast<int>(threadIdx.x) >= distance) running += lower;
    }
    running += sum;
    if (i < sequences) {
      keys[i] = count;
      before[i + 1] = running;
    }
    if (i == 0) before[0] = 0;
    return __shfl_sync(kFullWarp, running, 31);
  }
};

// A place on the line that moves on; `remaining` positions are left from it to the end of the walk.
struct Cursor {
  int sequence;  // relative to the schedule's base
  int pass;
  int tile;  // of the unit
  int remaining;

  // At a position of the line, with at most `most` positions to walk.
  static __device__ __forceinline__ Cursor at(const Schedule& schedule, int position, int most) {
    Cursor found;
    found.sequence = schedule.sequence_at(position);
    const int tiles = schedule.tiles(found.sequence);
    const int within = position - schedule.before[found.sequence] * schedule.passes;
    found.pass = schedule.passes > 1 ? within / tiles : 0;
    found.tile = within - found.pass * tiles;
    found.remaining = min(most, schedule.positions() - position);
    return found;
  }

  __device__ __forceinline__ void advance(const Schedule& schedule, int positions) {
    remaining -= positions;
    tile += positions;
    while (remaining > 0 && tile >= schedule.tiles(sequence)) {
      tile -= schedule.tiles(sequence);
      if (++pass == schedule.passes) {
        pass = 0;
        ++sequence;
      }
    }
  }
};

}  // namespace cki::attention
