// Packed sequences: which one a block works on, found on the device from offsets that the host never reads.
//
// The offsets cu_seqlens_q [batch + 1] cut the packed queries into segments: what lies before the first offset (nothing,
// as a rule), one for each sequence, and what lies behind the last offset (padding). The first and the last have no keys,
// so every row of the output is written.
//
// A segment s that begins at row e owns the slots from floor(e / kBlockRows) + s on, up to the next segment's first. That
// is enough for its row blocks, and one too many at most: floor((e + n) / B) - floor(e / B) + 1 >= ceil(n / B). So the
// number of all slots follows from the rows and the batch alone (the grid is fixed while lengths change from one replay
// of a graph to the next), and the segment of a slot is found by a search: 32 probes at once, two rounds for a batch of
// 1000. The alternative, numbering the row blocks without gaps, needs the sum over all sequences in front of the block's.
//
// Offsets are cut to [0, total]. Where they fall, rows are written twice or not at all, but nothing outside is touched.
#pragma once

#include "common/reduce.cuh"
#include "common/types.cuh"

namespace cki::attention {

// The offset at an index, within [0, limit].
template <class Offset>
__device__ __forceinline__ int offset_within(const Offset* offsets, i64 index, int limit) {
  const i64 offset = static_cast<i64>(offsets[index]);
  return static_cast<int>(max(i64{0}, min(offset, static_cast<i64>(limit))));
}

template <int kBlockRows, class Offset>
struct QuerySegments {
  const Offset* offsets;
  i64 offset_stride;
  int batch;
  int total;           // queries of all segments
  int rows_per_query;  // query heads that share a block

  __device__ __forceinline__ int slots() const { return total * rows_per_query / kBlockRows + batch + 2; }

  // Where a segment begins, in queries. Segment s is sequence s - 1.
  __device__ __forceinline__ int begin(int segment) const {
    if (segment == 0) return 0;
    if (segment == batch + 2) return total;
    return offset_within(offsets, (segment - 1) * offset_stride, total);
  }

  __device__ __forceinline__ int first_slot(int segment) const {
    return begin(segment) * rows_per_query / kBlockRows + segment;
  }

  // The segment of a slot; all lanes of a warp together.
  __device__ __forceinline__ int find(int slot) const {
    const int lane = static_cast<int>(threadIdx.x) % 32;
    int low = 0, end = batch + 2;
    while (end - low > 1) {
      const int step = (end - low + 31) / 32;
      const int probe = low + lane * step;
      const bool begun = lane == 0 || (probe < end && first_slot(probe) <= slot);
      low += (31 - __clz(static_cast<int>(__ballot_sync(kFullWarp, begun)))) * step;
      end = min(end, low + step);
    }
    return low;
  }
};

}  // namespace cki::attention
