// Polling loops that wait for nobody. Within a group one counter suffices: only one thread runs at a time. Independent
// groups run truly in parallel, so a group that only polls looks at the others: when each of them has also completed many
// rounds of nothing but polling since, and no write was noted in between, nobody is left to change what they poll.
#include <sched.h>

#include "launch.h"
#include "scheduler.h"

namespace cki::sim {

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

}  // namespace cki::sim
