// The rendezvous of a warp's lanes, and the operations of the core that use it: __syncwarp, shuffles, votes, matches,
// reductions, elect.
#include "warp.h"

#include <algorithm>

#include "race.h"
#include "scheduler.h"

namespace cki::sim {

namespace {

u32 lowest(u32 mask) { return static_cast<u32>(__builtin_ctz(mask)); }

Warp& warp_of(const Thread& thread) { return thread.block->warps[thread.warp()]; }

// ---- faults; apart from the rendezvous, so that its own code and stack stay small ----

[[noreturn, gnu::noinline]] void fatal_missing(CallSite site, const char* name, u32 mask, u32 missing) {
  fatal(site, "%s needs all lanes of mask 0x%08x, but lanes 0x%08x do not exist or have exited", name, mask, missing);
}

[[noreturn, gnu::noinline]] void fatal_not_in_mask(CallSite site, const char* name, u32 mask, u32 lane) {
  fatal(site, "%s: the calling lane %u is not in its mask 0x%08x", name, lane, mask);
}

[[noreturn, gnu::noinline]] void fatal_kind(CallSite site, const char* name, u32 lane, const WarpOperation& other) {
  const u32 first = lowest(other.arrived);
  fatal(site, "other lanes of mask 0x%08x are in a %s%s, but lane %u in a %s", other.mask, other.name,
        SiteText(other.site[first]).text, lane, name);
}

[[noreturn, gnu::noinline]] void fatal_overlap(CallSite site, const char* name, u32 mask, u32 lane,
                                               const WarpOperation& other) {
  fatal(site, "%s: mask 0x%08x names lanes that wait for this lane %u in a %s of mask 0x%08x", name, mask, lane,
        other.name, other.mask);
}

[[noreturn, gnu::noinline]] void fatal_too_many(CallSite site, const char* name) {
  fatal(site, "%s: more than four warp-wide operations of one warp are open", name);
}

// ---- the rendezvous ----

// The open operation with this mask, or a free entry. Open masks may overlap: some lanes may wait for the whole warp while
// the others still shuffle among themselves. But when the caller's mask names a lane that waits in an operation which itself
// waits for the caller, neither can ever complete.
WarpOperation& find_operation(Warp& warp, u32 mask, u32 lane, const char* name, CallSite site) {
  for (u32 open = warp.open; open; open &= open - 1) {
    WarpOperation& operation = warp.pending[lowest(open)];
    if (operation.mask == mask && !(operation.arrived >> lane & 1)) return operation;
    if (operation.arrived & mask && operation.mask >> lane & 1)
      fatal_overlap(site, name, mask, lane, operation);
  }
  const u32 entry = lowest(~warp.open);
  if (entry >= Warp::kEntries) fatal_too_many(site, name);
  return warp.pending[entry];
}

void complete(Thread& last, WarpOperation& operation) {
  Warp& warp = warp_of(last);
  operation.mask = operation.arrived;
  operation.complete(last, operation);
  operation.arrived = 0;
  warp.open &= ~(1u << (&operation - warp.pending));
  u32 others = operation.mask;
  if (last.state != ThreadState::Exited) others &= ~(1u << last.lane());
  wake_lanes(*last.block, last.warp(), others);
}

inline u64 rendezvous(CallSite site, int kind, const char* name, u32 mask, u64 value, u32 argument, void* pointer,
                      CompleteWarpOperation complete_operation) {
  Thread& thread = current_thread();
  Warp& warp = warp_of(thread);
  const u32 lane = thread.lane(), missing = mask & (~warp.lanes | warp.exited);
  if (missing && kind >= CKI_SIM_WARP_OPERATIONS) fatal_missing(site, name, mask, missing);
  mask &= warp.lanes;
  if (!(mask >> lane & 1)) fatal_not_in_mask(site, name, mask, lane);
  WarpOperation& operation = find_operation(warp, mask, lane, name, site);
  if (!operation.arrived) {
    warp.open |= 1u << (&operation - warp.pending);
    operation.mask = mask;
    operation.kind = kind;
    operation.name = name;
    operation.complete = complete_operation;
  } else if (operation.kind != kind) {
    fatal_kind(site, name, lane, operation);
  }
  operation.site[lane] = site;
  operation.value[lane] = value;
  operation.argument[lane] = argument;
  operation.pointer[lane] = pointer;
  operation.arrived |= 1u << lane;
  note_activity(*thread.block->group);
  if (((operation.arrived | warp.exited) & mask) == mask)
    complete(thread, operation);
  else
    leave(thread);
  return warp.result[lane];
}

// ---- the core's operations ----

u32 shuffle_source(int kind, u32 lane, u32 argument) {
  const u32 width = argument >> 16, delta = argument & 0xffff, segment = lane & ~(width - 1);
  switch (kind) {
    case CKI_SIM_SHFL_IDX: return segment + (delta & (width - 1));
    case CKI_SIM_SHFL_UP: return lane < segment + delta ? lane : lane - delta;
    case CKI_SIM_SHFL_DOWN: return lane + delta >= segment + width ? lane : lane + delta;
    default: return (lane ^ delta) >= segment + width ? lane : lane ^ delta;
  }
}

void shuffle(Thread& last, WarpOperation& operation) {
  u64* result = warp_of(last).result;
  // A lane outside the mask gives an undefined value: the adversary's choice is all ones, a NaN in every float type.
  const u64 undefined = last.block->group->checks.adversarial ? ~u64{0} : 0;
  for (u32 lanes = operation.mask; lanes; lanes &= lanes - 1) {
    const u32 lane = lowest(lanes), source = shuffle_source(operation.kind, lane, operation.argument[lane]) % kWarpSize;
    result[lane] = operation.mask >> source & 1 ? operation.value[source] : undefined;
  }
}

u64 combine(int kind, u64 a, u64 b) {
  const u32 x = static_cast<u32>(a), y = static_cast<u32>(b);
  const i32 sx = static_cast<i32>(x), sy = static_cast<i32>(y);
  switch (kind) {
    case CKI_SIM_ALL: return a && b;
    case CKI_SIM_ANY: return a || b;
    case CKI_SIM_REDUCE_ADD: return x + y;
    case CKI_SIM_REDUCE_MIN_SIGNED: return static_cast<u32>(std::min(sx, sy));
    case CKI_SIM_REDUCE_MAX_SIGNED: return static_cast<u32>(std::max(sx, sy));
    case CKI_SIM_REDUCE_MIN_UNSIGNED: return std::min(x, y);
    case CKI_SIM_REDUCE_MAX_UNSIGNED: return std::max(x, y);
    case CKI_SIM_REDUCE_AND: return x & y;
    case CKI_SIM_REDUCE_OR: return x | y;
    default: return x ^ y;
  }
}

void reduce(Thread& last, WarpOperation& operation) {
  u64* result = warp_of(last).result;
  u32 lanes = operation.mask;
  u64 total = operation.value[lowest(lanes)];
  for (lanes &= lanes - 1; lanes; lanes &= lanes - 1)
    total = combine(operation.kind, total, operation.value[lowest(lanes)]);
  for (lanes = operation.mask; lanes; lanes &= lanes - 1) result[lowest(lanes)] = total;
}

void ballot(Thread& last, WarpOperation& operation) {
  u64* result = warp_of(last).result;
  u64 total = 0;
  for (u32 lanes = operation.mask; lanes; lanes &= lanes - 1)
    if (operation.value[lowest(lanes)]) total |= u64{1} << lowest(lanes);
  for (u32 lanes = operation.mask; lanes; lanes &= lanes - 1) result[lowest(lanes)] = total;
}

void match(Thread& last, WarpOperation& operation) {
  u64* result = warp_of(last).result;
  for (u32 lanes = operation.mask; lanes; lanes &= lanes - 1) {
    const u32 lane = lowest(lanes);
    u64 equal = 0;
    for (u32 others = operation.mask; others; others &= others - 1)
      if (operation.value[lowest(others)] == operation.value[lane]) equal |= u64{1} << lowest(others);
    if (operation.kind == CKI_SIM_MATCH_ALL && equal != operation.mask) equal = 0;
    result[lane] = equal;
  }
}

void elect(Thread& last, WarpOperation& operation) {
  u64* result = warp_of(last).result;
  for (u32 lanes = operation.mask; lanes; lanes &= lanes - 1)
    result[lowest(lanes)] = lowest(lanes) == lowest(operation.mask);
}

// The only warp-wide operation that orders memory.
void syncwarp(Thread& last, WarpOperation& operation) {
  RaceDetector* races = detector();
  if (!races) return;
  Thread* warp = &last.block->threads[last.warp() * kWarpSize];
  Clock clock;
  for (u32 lanes = operation.mask; lanes; lanes &= lanes - 1) races->release(clock, warp[lowest(lanes)]);
  for (u32 lanes = operation.mask; lanes; lanes &= lanes - 1) races->acquire(warp[lowest(lanes)], clock);
}

struct Operation {
  const char* name;
  CompleteWarpOperation complete;
};

constexpr Operation kOperations[CKI_SIM_WARP_OPERATIONS] = {
    {"__syncwarp", syncwarp},       {"__shfl_sync", shuffle},       {"__shfl_up_sync", shuffle},
    {"__shfl_down_sync", shuffle},  {"__shfl_xor_sync", shuffle},   {"__ballot_sync", ballot},
    {"__all_sync", reduce},         {"__any_sync", reduce},         {"__match_any_sync", match},
    {"__match_all_sync", match},    {"elect.sync", elect},          {"__reduce_add_sync", reduce},
    {"__reduce_min_sync", reduce},  {"__reduce_max_sync", reduce},  {"__reduce_min_sync", reduce},
    {"__reduce_max_sync", reduce},  {"__reduce_and_sync", reduce},  {"__reduce_or_sync", reduce},
    {"__reduce_xor_sync", reduce}};

}  // namespace

u64 warp_rendezvous(CallSite site, int kind, const char* name, u32 mask, u64 value, u32 argument, void* pointer,
                    CompleteWarpOperation complete_operation) {
  return rendezvous(site, kind, name, mask, value, argument, pointer, complete_operation);
}

const WarpOperation* open_operation(const Thread& thread) {
  const Warp& warp = warp_of(thread);
  for (u32 open = warp.open; open; open &= open - 1)
    if (warp.pending[lowest(open)].arrived >> thread.lane() & 1) return &warp.pending[lowest(open)];
  return nullptr;
}

void warp_after_exit(Thread& thread) {
  Warp& warp = thread.block->warps[thread.warp()];
  warp.exited |= 1u << thread.lane();
  for (WarpOperation& operation : warp.pending) {
    if (!operation.arrived || !(operation.mask >> thread.lane() & 1)) continue;
    if (operation.kind >= CKI_SIM_WARP_OPERATIONS)
      fatal(operation.site[lowest(operation.arrived)], "%s waits for lane %u, which exits", operation.name,
            thread.lane());
    if (((operation.arrived | warp.exited) & operation.mask) == operation.mask) complete(thread, operation);
  }
}

}  // namespace cki::sim

using namespace cki::sim;

extern "C" std::uint64_t cki_sim_warp(int operation, unsigned mask, std::uint64_t value, unsigned argument) {
  const CallSite site = CKI_SIM_CALL_SITE;
  jitter();
  return rendezvous(site, operation, kOperations[operation].name, mask, value, argument, nullptr,
                    kOperations[operation].complete);
}
