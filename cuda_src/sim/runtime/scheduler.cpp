// Choosing who runs next, and changing to it, also across the OS threads of a group.
#include "scheduler.h"

#include "engine.h"
#include "launch.h"

CKI_SIM_TLS cki_sim_thread_view* cki_sim_thread;
CKI_SIM_TLS cki_sim_block_view cki_sim_block;

namespace cki::sim {

namespace {

CKI_SIM_TLS Block* block_of_os_thread;

u32 lowest(u32 mask) { return static_cast<u32>(__builtin_ctz(mask)); }

u32 nth_bit(u32 mask, u32 n) {
  while (n--) mask &= mask - 1;
  return lowest(mask);
}

void make_ready(Thread& thread) {
  Block& block = *thread.block;
  thread.state = ThreadState::Ready;
  block.ready[thread.warp()] |= 1u << thread.lane();
  block.ready_warps |= 1u << thread.warp();
}

// ---- which block, warp and lane ----

// Plain order stays where it is and goes round; the adversary moves at random, or by strict priorities.
Block* choose_block(Group& group, Block& here) {
  const u32 n = static_cast<u32>(group.blocks.size());
  if (n == 1) return here.ready_warps ? &here : nullptr;
  if (group.policy == Group::Policy::StrictPriorities) {
    Block* best = nullptr;
    for (Block* block : group.blocks)
      if (block->ready_warps && (!best || block->priority > best->priority)) best = block;
    return best;
  }
  const bool stay = group.policy == Group::Policy::RunToBlock || !group.random.one_in(64);
  if (stay && here.ready_warps) return &here;
  const u32 start = group.policy == Group::Policy::RunToBlock ? here.rank + 1 : group.random.below(n);
  for (u32 i = 0; i < n; ++i) {
    Block* block = group.blocks[(start + i) % n];
    if (block->ready_warps) return block;
  }
  return nullptr;
}

// Uniform choice alone is a weak adversary: threads stay close together. Priorities let one warp run far ahead of another,
// redrawn now and then (PCT, Burckhardt et al., ASPLOS 2010) or fixed. Each group draws one of the policies.
u32 choose_warp(Group& group, Block& block) {
  switch (group.policy) {
    case Group::Policy::RunToBlock:
      return block.ready_warps >> block.last_warp & 1 ? block.last_warp : lowest(block.ready_warps);
    case Group::Policy::Uniform:
      return nth_bit(block.ready_warps, group.random.below(static_cast<u32>(__builtin_popcount(block.ready_warps))));
    case Group::Policy::RandomPriorities:
      if (group.random.one_in(64)) block.warp_priority[group.random.below(kMaxWarps)] = group.random.below(1u << 31);
      break;
    case Group::Policy::StrictPriorities:
      break;
  }
  u32 best = lowest(block.ready_warps);
  for (u32 rest = block.ready_warps & (block.ready_warps - 1); rest; rest &= rest - 1)
    if (block.warp_priority[lowest(rest)] > block.warp_priority[best]) best = lowest(rest);
  return best;
}

Thread& choose_thread(Group& group, Block& block) {
  const u32 warp = choose_warp(group, block);
  const u32 lanes = block.ready[warp];
  const u32 lane = group.checks.adversarial
                       ? nth_bit(lanes, group.random.below(static_cast<u32>(__builtin_popcount(lanes))))
                       : lowest(lanes);
  block.last_warp = warp;
  if (!(block.ready[warp] &= ~(1u << lane))) block.ready_warps &= ~(1u << warp);
  return block.threads[warp * kWarpSize + lane];
}

void wake_pollers(Group& group) {
  for (Block* block : group.blocks) {
    for (u32 index : block->polling) make_ready(block->threads[index]);
    block->polling.clear();
  }
  group.polling = 0;
}

// The next thread to run; null when all have exited or the launch cannot go on.
Thread* pick(Group& group, Block& here) {
  for (;;) {
    if (group.checks.adversarial) {
      if (group.early_completion && !group.pending.empty() && group.random.one_in(group.early_completion)) {
        group.pending.complete_any(group.random.next());
      }
      if (group.polling && group.random.one_in(32)) wake_pollers(group);
    }
    if (Block* block = choose_block(group, here)) return &choose_thread(group, *block);
    if (!group.pending.empty()) {
      group.pending.complete_any(group.random.next());
      note_progress(group);
      continue;
    }
    if (group.live == 0) return nullptr;
    if (group.polling && !group.launch->aborted && !nobody_progresses(group)) {
      wake_pollers(group);
      continue;
    }
    if (!group.launch->aborted) report_deadlock(group);
    group.aborted = true;
    return nullptr;
  }
}

// ---- changing to it ----

void finish(Group& group, Block& here) {
  group.finished = true;
  for (Block* block : group.blocks)
    if (block != &here) sem_post(&block->baton);
}

void take_baton(Block& here) {
  while (sem_wait(&here.baton) != 0) {
  }
}

// Leaves `from` for the chosen thread, or for the OS thread's own context when there is none. When the thread belongs to
// another block, that block's OS thread gets the baton and this one sleeps until it comes back.
void change_to(Fiber& from, Block& here, Thread* next) {
  Group& group = *here.group;
  ++group.switches;
  if (!next) {
    finish(group, here);
  } else if (next->block != &here) {
    group.next = next;
    sem_post(&next->block->baton);
    take_baton(here);
    next = group.finished ? nullptr : group.next;
  }
  Fiber& to = next ? next->fiber : here.main;
  cki_sim_thread = next ? &next->view : nullptr;
  if (&to != &from) switch_fiber(from, to);
}

void exit_thread(Thread& thread) {
  Block& block = *thread.block;
  for (Block::EngineSlot& slot : block.engines)
    if (slot.state && slot.serial == block.serial) slot.state->thread_exit(block, thread);
  thread.state = ThreadState::Exited;
  --block.live;
  --block.group->live;
  note_progress(*block.group);
  warp_after_exit(thread);
  barriers_after_exit(block);
  cluster_after_exit(block);
  if (block.live == 0)
    for (Block::EngineSlot& slot : block.engines)
      if (slot.state && slot.serial == block.serial) slot.state->block_end(block);
}

void fiber_entry() {
  {
    const Launch& launch = *current_group().launch;
    launch.module.entry(launch.arguments);
  }
  Thread& thread = current_thread();
  exit_thread(thread);
  change_to(thread.fiber, *thread.block, pick(*thread.block->group, *thread.block));
  __builtin_trap();   // an exited fiber is never resumed
}

// Stacks lie whole pages apart, so equal depths would fall into the same few sets of the first-level cache and the lanes of a
// warp would evict each other at every switch. Starting at different depths spreads them.
std::size_t stack_top(u32 thread) { return kStackBytes - thread * 320 % 4096 / 64 * 64; }

void prepare_threads(Block& block) {
  while (block.stacks.size() < block.threads.size()) block.stacks.push_back(allocate_stack());
  for (u32 i = 0; i < block.thread_count(); ++i) {
    prepare_fiber(block.threads[i].fiber, block.stacks[i], stack_top(i), fiber_entry);
    make_ready(block.threads[i]);
  }
}

}  // namespace

Group* running_group() { return block_of_os_thread ? block_of_os_thread->group : nullptr; }

void choose_and_change(Thread& thread) {
  Thread* next = pick(*thread.block->group, *thread.block);
  if (next != &thread) change_to(thread.fiber, *thread.block, next);
}

void wake(Thread& thread) {
  if (thread.state == ThreadState::Waiting) make_ready(thread);
}

void yield() {
  Thread& thread = current_thread();
  make_ready(thread);
  choose_and_change(thread);
}

void yield_poll(CallSite site) {
  Thread& thread = current_thread();
  Group& group = *thread.block->group;
  thread.state = ThreadState::Polling;
  thread.wait = Wait{"polling loop", site};
  thread.block->polling.push_back(thread.index());
  ++group.polling;
  choose_and_change(thread);
}

void prepare_block(Block& block) {
  block_of_os_thread = &block;
  cki_sim_block = block.view;
  prepare_threads(block);
}

void run_block(Block& block, bool starts) {
  if (!starts) take_baton(block);
  Group& group = *block.group;
  if (!group.finished) {
    Thread* first = starts ? pick(group, block) : group.next;
    change_to(block.main, block, first);
  }
  cki_sim_thread = nullptr;
  block_of_os_thread = nullptr;
}

void abandon_group(Group& group) {
  Block& here = *block_of_os_thread;
  group.aborted = true;
  finish(group, here);
  cki_sim_thread = nullptr;
  Fiber abandoned;
  switch_fiber(abandoned, here.main);
  __builtin_unreachable();
}

int allocate_engine_slot() {
  static int allocated = 0;
  if (allocated == kMaxEngines) __builtin_trap();   // raise kMaxEngines
  return allocated++;
}

}  // namespace cki::sim

extern "C" void cki_sim_yield_poll() { cki::sim::yield_poll(CKI_SIM_CALL_SITE); }

extern "C" void cki_sim_yield_after_look() {
  cki::sim::note_activity(cki::sim::current_group());
  cki::sim::yield_poll(CKI_SIM_CALL_SITE);
}

extern "C" void cki_sim_assertion_failed(const char* condition) {
  cki::sim::fatal(CKI_SIM_CALL_SITE, "assertion failed: %s", condition);
}

extern "C" void cki_sim_trap() { cki::sim::fatal(CKI_SIM_CALL_SITE, "trap"); }

extern "C" unsigned long long cki_sim_clock() { return cki::sim::current_group().switches; }
