// Asynchronous copies between global and shared memory that complete on mbarriers (loads) or by bulk groups (stores).
// The 1-D copies (bulk.cpp) and those through tensor maps (tma.cpp) differ only in how they move bytes.
#pragma once
#include <functional>
#include <vector>

#include "block.h"

namespace cki::sim {

// The targets of a load: this block, or with a mask (bit = rank) those blocks of its cluster.
struct BulkLoad {
  void* shared;
  void* barrier;
  u32 footprint;                                 // bytes of shared memory from `shared` on that may be written
  u32 bytes;                                     // that count on the barrier
  u32 alignment;                                 // of the shared address
  u32 cta_mask;                                  // 0: this block
  std::function<void(const SharedPlace&)> move;  // copies from global memory into one target
};
void issue_bulk_load(const BulkLoad& load, CallSite site);

struct BulkStore {
  const void* shared;
  u32 bytes;
  u32 alignment;
  // Writes to global memory; the tile's bytes are given, with the shared address at which they lay.
  std::function<void(const u8* bytes, u32 shared_address)> move;
};
void issue_bulk_store(const BulkStore& store, CallSite site);

}  // namespace cki::sim
