// What is checked at each access of an instrumented kernel.
#include "tsan_hooks.h"

#include "bounds.h"
#include "launch.h"
#include "race.h"
#include "scheduler.h"

namespace cki::sim {

namespace {

// The shared memory that a pointer lies in: the block's own or a peer's.
bool find_shared(Block& block, const void* pointer, SharedPlace& place) {
  Block* owner = nullptr;
  if (block.window.contains(pointer)) {
    owner = &block;
  } else if (block.group->cluster_size > 1) {
    for (u32 rank = 0; rank < block.group->cluster_size; ++rank)
      if (block.group->peer(block, rank).window.contains(pointer)) owner = &block.group->peer(block, rank);
  }
  if (!owner) return false;
  const u32 offset = owner->window.offset(pointer);
  place = {owner, offset, owner->window.base + offset};
  return true;
}

void check_shared_bounds(const SharedPlace& place, u32 bytes, bool write, CallSite site) {
  const SharedWindow& window = place.block->window;
  if (!window.valid(place.offset, bytes))
    beyond_shared(window, place.offset, bytes, write ? "write" : "read", site);
}

// Everything but race detection; false when the access is not to shared memory or there is no one to check.
bool common_checks(const void* pointer, std::size_t bytes, bool write, CallSite site, SharedPlace& place) {
  if (!inside_kernel() || bytes == 0) return false;
  Block& block = current_block();
  Group& group = *block.group;
  if (!find_shared(block, pointer, place)) {
    if (group.checks.bounds) group.launch->bounds.check(pointer, bytes, write, site);
    return false;
  }
  if (group.checks.bounds) check_shared_bounds(place, static_cast<u32>(bytes), write, site);
  if (place.block != &block && place.block->live == 0)
    fatal(site, "access to the shared memory of cluster rank %u, whose threads have all exited",
          place.block->view.rank_in_cluster);
  const InFlight& in_flight = place.block->in_flight;
  if (in_flight.find_write(place.offset, static_cast<u32>(bytes)) >= 0)
    hazard(site, "%s shared 0x%x, the target of an asynchronous copy in flight", write ? "writes" : "reads",
           place.offset + kSharedBase);
  if (write && in_flight.find_read(place.offset, static_cast<u32>(bytes)) >= 0)
    hazard(site, "writes shared 0x%x, which an asynchronous operation in flight reads", place.offset + kSharedBase);
  return true;
}

bool acquires(int order) { return order == __ATOMIC_CONSUME || order == __ATOMIC_ACQUIRE || order >= __ATOMIC_ACQ_REL; }
bool releases(int order) { return order >= __ATOMIC_RELEASE; }

}  // namespace

void hook_access(const void* pointer, std::size_t bytes, bool write, CallSite site) {
  SharedPlace place;
  if (!common_checks(pointer, bytes, write, site, place)) return;
  RaceDetector* races = detector();
  if (!races) return;
  if (write)
    races->write(place, static_cast<u32>(bytes), site, "writes");
  else
    races->read(place, static_cast<u32>(bytes), site, "reads");
}

void hook_atomic(const void* pointer, std::size_t bytes, AtomicAccess kind, int order, CallSite site) {
  if (!inside_kernel()) return;
  SharedPlace place;
  const bool shared = common_checks(pointer, bytes, kind != AtomicAccess::Load, site, place);
  RaceDetector* races = detector();
  if (!races) return;
  if (shared)
    races->atomic(place, static_cast<u32>(bytes), site, "accesses (atomic)", kind != AtomicAccess::Load);
  if (kind == AtomicAccess::Load)
    races->atomic_load(pointer, acquires(order));
  else if (kind == AtomicAccess::Store)
    races->atomic_store(pointer, releases(order));
  else
    races->atomic_update(pointer, acquires(order), releases(order));
}

void hook_fence(int order) {
  if (RaceDetector* races = inside_kernel() ? detector() : nullptr) races->fence(acquires(order), releases(order));
}

}  // namespace cki::sim
