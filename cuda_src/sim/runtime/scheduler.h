// Who runs: the current thread, waiting and waking, yielding, polling. Threads change only inside these functions.
#pragma once
#include "block.h"

namespace cki::sim {

inline Thread& current_thread() { return *reinterpret_cast<Thread*>(cki_sim_thread); }
inline Block& current_block() { return *current_thread().block; }
inline Group& current_group() { return *current_block().group; }
inline bool inside_kernel() { return cki_sim_thread != nullptr; }   // false on the host, and while pending work completes
Group* running_group();   // of this OS thread, also while pending work completes; null on the host

// Blocks the current thread until wake(). Whoever wakes it may first leave a value in its `result`.
// The condition is the caller's business: `while (!ready()) { waiters.push_back(&thread); wait({...}); }`.
inline void wait(const Wait& wait);
void wake(Thread& thread);

// Lets another thread run, if the schedule has one; the current thread stays runnable.
void yield();

// In adversarial mode yields now and then. Instructions that others can observe call it first.
inline void jitter();

// A look at memory that another thread or block shall change: runs everybody else before the next look, and reports a
// deadlock when nobody does anything but poll.
void yield_poll(CallSite site);

// A write has happened that a polling loop could be waiting for (a store with release, an atomic, a copy that landed).
// Kernels count theirs by `++*cki_sim_thread->progress`.
inline void note_progress(Group& group) { ++group.progress; }

// The current thread did something other than poll.
inline void note_activity(Group& group) { group.poll_rounds = 0; }

// Makes the threads of a block ready, on the block's own OS thread.
void prepare_block(Block& block);

// Runs the block group to its end on the calling OS thread; called once for each block of the group, after all of them have
// been prepared.
void run_block(Block& block, bool starts);

// Reports a group in which no thread can run: what each thread waits for, and where (deadlock.cpp).
void report_deadlock(Group& group);

// A thread of the block has exited: a cluster barrier that waits for all others may now be complete (cluster.cpp).
void cluster_after_exit(Block& block);

// Ends the group at once; used by fatal().
[[noreturn]] void abandon_group(Group& group);

// ---- the frequent paths, inlined ----

void choose_and_change(Thread& thread);   // to whom the schedule says

// Leaves the current thread, whose state or warp says what it waits for, until it is chosen again.
inline void leave(Thread& thread) {
  Block& block = *thread.block;
  Group& group = *block.group;
  const u32 warp = thread.warp(), lanes = block.ready[warp];
  thread.state = ThreadState::Waiting;
  if (group.plain && lanes) {
    // By far the most frequent change: to the next lane of the warp, on its way to the same warp-wide operation.
    block.last_warp = warp;
    if (!(block.ready[warp] = lanes & (lanes - 1))) block.ready_warps &= ~(1u << warp);
    Thread& next = block.threads[warp * kWarpSize + static_cast<u32>(__builtin_ctz(lanes))];
    ++group.switches;
    cki_sim_thread = &next.view;
    switch_fiber(thread.fiber, next.fiber);
  } else {
    choose_and_change(thread);
  }
  thread.state = ThreadState::Ready;
}

inline void wait(const Wait& wait) {
  Thread& thread = current_thread();
  thread.wait = wait;
  note_activity(*thread.block->group);
  leave(thread);
}

inline void wake_lanes(Block& block, u32 warp, u32 lanes) {   // all of which wait
  block.ready[warp] |= lanes;
  if (lanes) block.ready_warps |= 1u << warp;
}

inline void jitter() {
  Group& group = *current_block().group;
  if (group.checks.adversarial && group.random.one_in(8)) yield();
}

}  // namespace cki::sim
