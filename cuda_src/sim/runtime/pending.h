// Asynchronous work that the hardware may complete at any later time. In adversarial mode it completes as late as the rules
// allow: when nothing else in the group can run, at random (rarely), or when its engine says that somebody has waited for
// it. In plain mode engines complete work at issue and do not come here.
#pragma once
#include <functional>
#include <utility>
#include <vector>

#include "types.h"

namespace cki::sim {

class PendingOperations {
 public:
  using Handle = u64;

  // `complete` runs once, later, on any OS thread of the group and with no current thread: it must not wait, and must hold
  // what it needs (blocks, host pointers) by itself. It may wake threads, move data and report.
  Handle add(std::function<void()> complete);

  // Completes that one now, unless it already has; for waits that must find it done (bulk and cp.async groups).
  void complete(Handle handle);
  bool is_pending(Handle handle) const;

  bool empty() const { return operations_.empty(); }
  void complete_any(u64 random);
  void clear() { operations_.clear(); }

 private:
  void run(std::size_t position);
  std::vector<std::pair<Handle, std::function<void()>>> operations_;
  Handle last_ = 0;
};

// Which 16-byte granules of a block's shared memory are the target or the source of asynchronous work in flight.
// The engines mark and unmark; they also ask, when work is issued. Needs no instrumented kernel and no numerics.
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
