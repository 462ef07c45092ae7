// bar.sync, bar.arrive and __syncthreads with its reductions.
#include "barrier.h"

#include <algorithm>

#include "race.h"
#include "scheduler.h"

namespace cki::sim {

namespace {

u32 wanted(const Block& block, const NamedBarrier& barrier) {
  if (barrier.expected < 0) return block.live;
  return std::min(static_cast<u32>(barrier.expected), block.thread_count());   // a partial warp counts as a whole one
}

void describe_wait(const Thread& thread, Text& text) {
  const NamedBarrier& barrier = thread.block->barriers[thread.wait.a];
  text.add(" %u (%u of %u threads arrived)", static_cast<u32>(thread.wait.a), barrier.arrived,
           wanted(*thread.block, barrier));
}

void complete(NamedBarrier& barrier, RaceDetector* races, const Thread* self) {
  for (Thread* thread : barrier.waiting) {
    if (races) races->acquire(*thread, barrier.clock);
    thread->result = static_cast<u64>(barrier.reduction);
    if (thread != self) wake(*thread);
  }
  barrier.block_start();
}

void reduce(NamedBarrier& barrier, int kind, bool predicate) {
  switch (kind) {
    case CKI_SIM_BARRIER_OR: barrier.reduction |= predicate; break;
    case CKI_SIM_BARRIER_AND: barrier.reduction &= predicate; break;
    case CKI_SIM_BARRIER_COUNT: barrier.reduction += predicate; break;
    default: break;
  }
}

// Two arrivals agree when they name the same count; a bare __syncthreads means every thread of the block.
bool same_count(const Block& block, int a, int b) {
  const int all = static_cast<int>(block.thread_count());
  return (a < 0 ? all : a) == (b < 0 ? all : b);
}

int arrive(CallSite site, int id, int threads, bool wait_for_it, int kind, bool predicate) {
  jitter();
  Thread& thread = current_thread();
  Block& block = *thread.block;
  if (id < 0 || id >= static_cast<int>(kNamedBarriers)) fatal(site, "barrier %d does not exist: there are 0 to 15", id);
  if (threads >= 0 && (threads == 0 || threads % 32 != 0))
    fatal(site, "barrier %d: thread count %d is not a positive multiple of the warp size", id, threads);
  if (threads > static_cast<int>((block.thread_count() + kWarpSize - 1) / kWarpSize * kWarpSize))
    fatal(site, "barrier %d: thread count %d exceeds the block's %u threads", id, threads, block.thread_count());
  note_activity(*block.group);
  NamedBarrier& barrier = block.barriers[id];
  if (barrier.arrived == 0) {
    barrier.expected = threads;
    barrier.reduction_kind = kind;
    barrier.reduction = kind == CKI_SIM_BARRIER_AND;
    barrier.first_site = site;
  } else if (!same_count(block, barrier.expected, threads)) {
    fatal(site, "barrier %d: thread count %d differs from the %d of earlier arrivals", id, threads, barrier.expected);
  } else if (barrier.reduction_kind != kind) {
    fatal(site, "barrier %d: some threads reduce a predicate and others do not, or differently", id);
  }
  reduce(barrier, kind, predicate);
  RaceDetector* races = detector();
  if (races) races->release(barrier.clock, thread);
  ++barrier.arrived;
  if (wait_for_it) barrier.waiting.push_back(&thread);
  if (barrier.arrived >= wanted(block, barrier)) {
    thread.result = 0;
    complete(barrier, races, &thread);
    const u64 result = thread.result;
    if (block.group->checks.adversarial) yield();
    return static_cast<int>(result);
  }
  if (!wait_for_it) return 0;
  wait(Wait{"barrier", site, static_cast<u64>(id), static_cast<u64>(static_cast<i64>(threads)), describe_wait});
  return static_cast<int>(thread.result);
}

}  // namespace

void NamedBarrier::block_start() {
  expected = 0;
  arrived = 0;
  reduction = 0;
  reduction_kind = 0;
  waiting.clear();
  clock.clear();
}

void barriers_after_exit(Block& block) {
  for (NamedBarrier& barrier : block.barriers)
    if (barrier.arrived && barrier.expected < 0 && barrier.arrived >= block.live) complete(barrier, detector(), nullptr);
}

}  // namespace cki::sim

using namespace cki::sim;

extern "C" void cki_sim_bar_sync(int id, int threads) {
  arrive(CKI_SIM_CALL_SITE, id, threads, true, CKI_SIM_BARRIER_PLAIN, false);
}

extern "C" void cki_sim_bar_arrive(int id, int threads) {
  arrive(CKI_SIM_CALL_SITE, id, threads, false, CKI_SIM_BARRIER_PLAIN, false);
}

extern "C" int cki_sim_syncthreads_reduce(int reduction, int predicate) {
  return arrive(CKI_SIM_CALL_SITE, 0, -1, true, reduction, predicate != 0);
}
