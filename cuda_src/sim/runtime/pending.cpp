// The list of asynchronous operations that have not completed yet, and counts of them for each 16-byte granule.
#include "pending.h"

#include <algorithm>

#include "scheduler.h"

namespace cki::sim {

PendingOperations::Handle PendingOperations::add(std::function<void()> complete) {
  operations_.emplace_back(++last_, std::move(complete));
  return last_;
}

bool PendingOperations::is_pending(Handle handle) const {
  for (const auto& operation : operations_)
    if (operation.first == handle) return true;
  return false;
}

void PendingOperations::complete(Handle handle) {
  for (std::size_t i = 0; i < operations_.size(); ++i)
    if (operations_[i].first == handle) return run(i);
}

void PendingOperations::complete_any(u64 random) { run(random % operations_.size()); }

void PendingOperations::run(std::size_t position) {
  std::function<void()> complete = std::move(operations_[position].second);
  operations_.erase(operations_.begin() + static_cast<std::ptrdiff_t>(position));
  // With no current thread: its effects belong to nobody's program order.
  cki_sim_thread_view* thread = cki_sim_thread;
  cki_sim_thread = nullptr;
  complete();
  cki_sim_thread = thread;
}

void InFlight::block_start(u32 window_bytes) {
  const std::size_t granules = window_bytes / 16 + 1;
  if (writes_.size() != granules) {
    writes_.assign(granules, 0);
    reads_.assign(granules, 0);
  } else if (active_) {
    std::fill(writes_.begin(), writes_.end(), 0);
    std::fill(reads_.begin(), reads_.end(), 0);
  }
  active_ = 0;
}

void InFlight::add(std::vector<u16>& counts, u32 offset, u32 bytes, int change) {
  for (u32 granule = offset / 16; granule <= (offset + bytes - 1) / 16; ++granule) {
    counts[granule] = static_cast<u16>(counts[granule] + change);
    active_ += static_cast<u64>(static_cast<i64>(change));
  }
}

i64 InFlight::find(const std::vector<u16>& counts, u32 offset, u32 bytes) {
  for (u32 granule = offset / 16; granule <= (offset + bytes - 1) / 16; ++granule)
    if (counts[granule]) return std::max<i64>(i64{granule} * 16, offset);
  return -1;
}

}  // namespace cki::sim
