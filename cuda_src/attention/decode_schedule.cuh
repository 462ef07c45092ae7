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
// A few sequences of about the same length are not cut but dealt: each has the same number of groups, and group i of them
// takes the tiles [(j * groups + i) * warps, +warps), j = 0, 1, ... Which tiles those are does not depend on any length, so
// their entries of the table are read while the lengths are awaited, and nothing has to be searched for afterwards. All
// blocks see from the lengths whether dealing pays (dealing_pays); if not, the same grid cuts the line.
//
// Alone (more units than any split could use, or results that must not depend on the batch), a block takes one unit.
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

// Whether a batch of up to 32 sequences is to be dealt: then the longest sequence sets the time, as if all were as long.
// slack: tiles of a whole batch that take as long as what dealing saves. Every warp finds it out for itself.
template <class Lengths>
__device__ __forceinline__ bool dealing_pays(const Lengths& lengths, int batch, int slack) {
  const int lane = static_cast<int>(threadIdx.x % 32);
  const u32 tiles = lane < batch ? static_cast<u32>(lengths.tiles(lengths.keys(lane))) : 0;
  const u32 most = __reduce_max_sync(kFullWarp, tiles), all = __reduce_add_sync(kFullWarp, tiles);
  return most * static_cast<u32>(batch) - all <= static_cast<u32>(slack);
}

enum class Order { kLine, kDealt, kAlone };

// The division. kLine: the tables keys_of and before (tiles of the sequences before, once; then a number for each warp) are
// shared memory. In the other
// orders a block has one sequence, `base`, and `groups` are those of it.
template <Order kOrderOfTiles>
struct Schedule {
  static constexpr Order kOrder = kOrderOfTiles;
  static constexpr int kLaneSequences = 4;
  static constexpr bool kOne = kOrder != Order::kLine;
  int* keys_of;
  int* before;
  int base;
  int sequences;
  int passes;  // of the line over each sequence
  int groups;
  int chunk;  // positions of a group; kDealt: tiles that are dealt at once
  int one_keys, one_tiles;

  // Sequence numbers are relative to base.
  __device__ __forceinline__ int keys(int sequence) const { return kOne ? one_keys : keys_of[sequence]; }
  __device__ __forceinline__ int tiles(int sequence) const {
    return kOne ? one_tiles : before[sequence + 1] - before[sequence];
  }

  // kOne: the sequence's keys.
  template <class Lengths>
  __device__ __forceinline__ void measure_one(const Lengths& lengths, int keys) {
    one_keys = keys;
    one_tiles = lengths.tiles(keys);
  }

  // kLine: reads the lengths. All threads of the block call it, and a barrier follows.
  template <int kThreads, class Lengths>
  __device__ __forceinline__ void measure(const Lengths& lengths) {
    const int thread = static_cast<int>(threadIdx.x);
    if (sequences <= 32 * kLaneSequences) {  // one warp, each lane some neighbouring sequences
      if (thread < 32) {
        int counts[kLaneSequences], ends[kLaneSequences], sum = 0;
        const int each = (sequences + 31) / 32;
#pragma unroll
        for (int j = 0; j < kLaneSequences; ++j) {
          const int i = thread * each + j;
          counts[j] = j < each && i < sequences ? lengths.keys(i) : 0;
        }
#pragma unroll
        for (int j = 0; j < kLaneSequences; ++j) {
          if (j < each && thread * each + j < sequences) sum += lengths.tiles(counts[j]);
          ends[j] = sum;
        }
        const int up_to_lane = sum_up_to_lane(sum);
#pragma unroll
        for (int j = 0; j < kLaneSequences; ++j)
          if (j < each) enter(thread * each + j, counts[j], up_to_lane - sum + ends[j]);
      }
      __syncthreads();
      return;
    }
    int* totals = before + sequences + 1;  // of the warps
    int all_before = 0;
#pragma unroll 1
    for (int first = 0; first < sequences; first += kThreads) {
      const int i = first + thread;
      const int count = i < sequences ? lengths.keys(i) : 0;
      int running = all_before + sum_up_to_lane(i < sequences ? lengths.tiles(count) : 0);
      if (thread % 32 == 31) totals[thread / 32] = running - all_before;
      __syncthreads();
#pragma unroll
      for (int warp = 0; warp < kThreads / 32; ++warp) {
        if (warp < thread / 32) running += totals[warp];
        all_before += totals[warp];
      }
      enter(i, count, running);
      __syncthreads();
    }
  }

  // Cuts the line for the groups of blocks; none gets less than `least` positions. kDealt: deals `least` tiles at once.
  __device__ __forceinline__ void cut(int least) {
    chunk = least;
    if constexpr (kOrder == Order::kLine) {
      const u32 above = static_cast<u32>(positions() + groups - 1);
      chunk = max(static_cast<int>(above / static_cast<u32>(groups)), least);  // unsigned: a shorter division
    }
  }

  __device__ __forceinline__ int positions() const { return kOne ? one_tiles : before[sequences] * passes; }

  // How many of the positions are a group's, and which tile of a unit it has at a position from its begin on.
  __device__ __forceinline__ int share(int group) const {
    if constexpr (kOrder == Order::kAlone) return one_tiles;
    if constexpr (kOrder == Order::kLine)
      return static_cast<int>(max(min(static_cast<i64>(positions()) - static_cast<i64>(group) * chunk,
                                      static_cast<i64>(chunk)), i64{0}));
    const int round = groups * chunk;
    const int rounds = static_cast<int>(static_cast<u32>(one_tiles) / static_cast<u32>(round));
    return rounds * chunk + max(min(one_tiles - rounds * round - group * chunk, chunk), 0);
  }
  template <int kDealtTiles>
  __device__ __forceinline__ int tile_at(int position, int group) const {
    if constexpr (kOrder != Order::kDealt) return position;
    const int round = position / kDealtTiles;
    return (round * (groups - 1) + group) * kDealtTiles + position;
  }

  // A whole warp asks for the same position: 32 places at a time are looked at.
  __device__ __forceinline__ int sequence_at(int position) const {
    if constexpr (kOne) return 0;
    const int lane = static_cast<int>(threadIdx.x % 32);
    int first = 0, count = sequences;  // it is one of these
    while (count > 1) {
      const int step = (count + 31) / 32;
      const bool begun = lane * step < count && before[first + lane * step] * passes <= position;
      const int whole_steps = __popc(__ballot_sync(kFullWarp, begun)) - 1;
      first += whole_steps * step;
      count = min(step, count - whole_steps * step);
    }
    return first;
  }

  __device__ __forceinline__ int unit_begin(int sequence, int pass) const {
    return kOne ? 0 : before[sequence] * passes + pass * tiles(sequence);
  }

  // The groups that share a unit, and which place for parts group first_group + i of them uses: a group has two, one for
  // the sequence it begins with and one for that it ends with. Places are kPlaceStep apart from the second group on.
  static constexpr int kPlaceStep = kOne ? 1 : 2;
  __device__ __forceinline__ int first_group(int unit_begin) const { return kOne ? 0 : unit_begin / chunk; }
  __device__ __forceinline__ int sharing_groups(int unit_begin, int tiles) const {
    if constexpr (kOne) return min(groups, (tiles + chunk - 1) / chunk);
    return (unit_begin + tiles - 1) / chunk - first_group(unit_begin) + 1;
  }
  __device__ __forceinline__ int place(int unit_begin, int i) const {
    if constexpr (kOne) return base * groups + i;
    const int group = first_group(unit_begin) + i;
    return group * 2 + (i == 0 && group * chunk < unit_begin ? 1 : 0);
  }

 private:
  // The sum of what the lanes up to this one hold.
  static __device__ __forceinline__ int sum_up_to_lane(int value) {
#pragma unroll
    for (int distance = 1; distance < 32; distance *= 2) {
      const int lower = __shfl_up_sync(kFullWarp, value, distance);
      if (static_cast<int>(threadIdx.x % 32) >= distance) value += lower;
    }
    return value;
  }

  // Enters sequence i, of `count` keys, into the tables; end: tiles of all up to it.
  __device__ __forceinline__ void enter(int i, int count, int end) const {
    if (i < sequences) {
      keys_of[i] = count;
      before[i + 1] = end;
    }
    if (i == 0) before[0] = 0;
  }
};

// A place among a group's positions that moves on; `remaining` of them are left from it on. kDealt: `tile` counts the
// group's own tiles.
struct Cursor {
  int sequence;  // relative to the schedule's base
  int pass;
  int tile;  // of the unit
  int remaining;

  // Where a group begins that has `share` positions.
  template <Order kOrder>
  static __device__ __forceinline__ Cursor begin(const Schedule<kOrder>& schedule, int group, int share) {
    if constexpr (kOrder == Order::kLine) return at(schedule, group * schedule.chunk, share);
    return {0, 0, 0, share};
  }

  // At a position of the line, with `remaining` positions to walk.
  template <Order kOrder>
  static __device__ __forceinline__ Cursor at(const Schedule<kOrder>& schedule, int position, int remaining) {
    Cursor found;
    found.sequence = schedule.sequence_at(position);
    const int tiles = schedule.tiles(found.sequence);
    const int within = position - schedule.unit_begin(found.sequence, 0);
    found.pass = schedule.passes > 1 ? within / tiles : 0;
    found.tile = within - found.pass * tiles;
    found.remaining = remaining;
    return found;
  }

  template <Order kOrder>
  __device__ __forceinline__ void advance(const Schedule<kOrder>& schedule, int positions) {
    remaining -= positions;
    tile += positions;
    if constexpr (!Schedule<kOrder>::kOne) {
      while (remaining > 0 && tile >= schedule.tiles(sequence)) {
        tile -= schedule.tiles(sequence);
        if (++pass == schedule.passes) {
          pass = 0;
          ++sequence;
        }
      }
    }
  }
};

}  // namespace cki::attention
