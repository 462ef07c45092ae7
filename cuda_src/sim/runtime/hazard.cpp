// Counts of work in flight for each 16-byte granule.
#include "hazard.h"

#include <algorithm>

namespace cki::sim {

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
