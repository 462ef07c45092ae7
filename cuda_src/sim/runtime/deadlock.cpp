// Threads that wait for ever: how polling loops that wait for nobody are told, and the report of a group that cannot go on.
#include <sched.h>

#include "launch.h"
#include "scheduler.h"

namespace cki::sim {

// ---- polling ----
//
// Within a group one counter suffices: only one thread runs at a time. Independent groups run truly in parallel, so a group
// that only polls looks at the others: when each of them has also completed many rounds of nothing but polling since, and no
// write was noted in between, nobody is left to change what they poll.

namespace {

constexpr u32 kPollRounds = 1000;         // of pure polling
constexpr u32 kIdleRounds = 200 * 1000;   // of polling mixed with barriers and votes, which write nothing

void start_watch(Group& group) {
  Launch& launch = *group.launch;
  group.watch_progress = launch.progress;
  group.watch_rounds.resize(launch.teams);
  for (u32 i = 0; i < launch.teams; ++i) group.watch_rounds[i] = launch.poll_slots[i].rounds;
}

bool others_only_poll(const Group& group) {
  const Launch& launch = *group.launch;
  if (group.watch_progress != launch.progress) return false;
  for (u32 i = 0; i < launch.teams; ++i)
    if (launch.poll_slots[i].running && launch.poll_slots[i].rounds < group.watch_rounds[i] + kPollRounds) return false;
  return true;
}

}  // namespace

bool nobody_progresses(Group& group) {
  Launch& launch = *group.launch;
  if (group.progress != group.progress_seen) {
    group.progress_seen = group.progress;
    group.poll_rounds = group.idle_rounds = 0;
    ++launch.progress;
  }
  ++launch.poll_slots[group.slot].rounds;
  ++group.poll_rounds;
  ++group.idle_rounds;
  if (group.poll_rounds < kPollRounds && group.idle_rounds < kIdleRounds) return false;
  if (launch.teams == 1) return true;
  sched_yield();
  if (group.watch_rounds.empty() || group.watch_progress != launch.progress) {
    start_watch(group);
    return false;
  }
  return others_only_poll(group);
}

// ---- the report: neighbouring threads that wait for the same thing at the same place are folded into one line ----

namespace {

bool same_wait(const Thread& a, const Thread& b) {
  if (a.state != b.state) return false;
  if (a.state == ThreadState::Exited) return true;
  const WarpOperation *in_a = open_operation(a), *in_b = open_operation(b);
  if (in_a || in_b) return in_a == in_b && in_a->site[a.lane()] == in_b->site[b.lane()];
  return a.wait.site == b.wait.site && a.wait.what == b.wait.what && a.wait.a == b.wait.a && a.wait.b == b.wait.b;
}

void describe(const Thread& thread, Text& text) {
  if (const WarpOperation* operation = open_operation(thread)) {
    text.add("wait at %s of mask 0x%08x (lanes 0x%08x missing)", operation->name, operation->mask,
             operation->mask & ~operation->arrived);
    text.add_site(operation->site[thread.lane()]);
    return;
  }
  switch (thread.state) {
    case ThreadState::Ready:
      text.add("can run");
      return;
    case ThreadState::Exited:
      text.add("exited");
      return;
    case ThreadState::Polling:
      text.add("poll memory that nobody changes");
      break;
    case ThreadState::Waiting:
      text.add("wait at %s", thread.wait.what);
      if (thread.wait.describe) thread.wait.describe(thread, text);
      break;
  }
  text.add_site(thread.wait.site);
}

}  // namespace

void report_deadlock(Group& group) {
  Text& text = group.report.text_to_append();
  text.add("DEADLOCK%s: no thread can go on\n", group.polling ? " (polling)" : "");
  if (group.polling)
    text.add("  blocks of an ordinary grid are not all resident at once: a block that waits for a later one needs a "
             "cooperative launch\n");
  for (const Block* block : group.blocks) {
    const cki_sim_index& at = block->view.block_index;
    text.add("  block (%u,%u,%u)\n", at.x, at.y, at.z);
    for (u32 first = 0; first < block->thread_count();) {
      u32 end = first + 1;
      while (end < block->thread_count() && same_wait(block->threads[first], block->threads[end])) ++end;
      if (end == first + 1)
        text.add("    thread %u: ", first);
      else
        text.add("    threads %u-%u: ", first, end - 1);
      describe(block->threads[first], text);
      text.add("\n");
      first = end;
    }
  }
}

}  // namespace cki::sim
