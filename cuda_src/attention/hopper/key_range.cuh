// Which tiles of keys a run of query rows reads, and which of them need a test for each key.
//
// Both ends of a row's interval move up with the row (common/key_band.cuh), so the first and the last row decide.
#pragma once

#include "common/types.cuh"

namespace cki::attention {

template <int kBlockKeys>
struct KeyRange {
  int begin_tile;    // tiles [begin_tile, end_tile) hold a key that some row may see
  int end_tile;
  int end;           // keys from here on are seen by no row
  int common_begin;  // keys [common_begin, common_end) are seen by all rows
  int common_end;

  // The tiles of rows [first_row, end_row); none when there are no rows.
  template <class Band>
  __device__ __forceinline__ KeyRange(const Band& band, int first_row, int end_row) {
    common_begin = band.begin(end_row - 1);
    common_end = band.end(first_row);
    begin_tile = band.begin(first_row) / kBlockKeys;
    end = band.end(end_row - 1);
    end_tile = first_row < end_row ? (end + kBlockKeys - 1) / kBlockKeys : 0;
  }

  __device__ __forceinline__ bool is_empty() const { return begin_tile >= end_tile; }

  // Whether some row does not see the tile's last key (which may be past the end of all).
  __device__ __forceinline__ bool passes_common_end(int tile) const { return (tile + 1) * kBlockKeys > common_end; }

  // The first tile whose first key all rows see, if they see its last.
  __device__ __forceinline__ int first_after_common_begin() const { return (common_begin + kBlockKeys - 1) / kBlockKeys; }
};

}  // namespace cki::attention
