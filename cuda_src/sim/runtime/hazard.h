// Which 16-byte granules of a block's shared memory are the target or the source of asynchronous work in flight.
// The engines mark and unmark; they also ask, when work is issued. Needs no instrumented kernel and no numerics.
#pragma once
#include <vector>

#include "types.h"

namespace cki::sim {

class InFlight {
 public:
  void block_start(u32 window_bytes);

  // Offsets in the block's window.
  void add_write(u32 offset, u32 bytes) { add(writes_, offset, bytes, +1); }
  void remove_write(u32 offset, u32 bytes) { add(writes_, offset, bytes, -1); }
  void add_read(u32 offset, u32 bytes) { add(reads_, offset, bytes, +1); }
  void remove_read(u32 offset, u32 bytes) { add(reads_, offset, bytes, -1); }

  // The first byte offset of a granule in flight, or -1.
  i64 find_write(u32 offset, u32 bytes) const { return active_ ? find(writes_, offset, bytes) : -1; }
  i64 find_read(u32 offset, u32 bytes) const { return active_ ? find(reads_, offset, bytes) : -1; }

 private:
  void add(std::vector<u16>& counts, u32 offset, u32 bytes, int change);
  static i64 find(const std::vector<u16>& counts, u32 offset, u32 bytes);
  std::vector<u16> writes_, reads_;
  u64 active_ = 0;    // marks that are set: no look at the maps while it is 0
};

}  // namespace cki::sim
