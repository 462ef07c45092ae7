// barrier.cluster: arrive and wait of every thread of a cluster.
#include "engine.h"
#include "race.h"
#include "scheduler.h"

namespace cki::sim {

namespace {

// Kept by the first block of each cluster, on behalf of all.
struct ClusterBarrier : EngineState {
  u32 phase = 0;
  u32 arrived = 0;
  std::vector<Thread*> waiting;
  Clock arriving, completed;      // race detection: released in this phase, and in the phase before

  void block_start(Block&) override {
    phase = arrived = 0;
    waiting.clear();
    arriving.clear();
    completed.clear();
  }
};

// Of each block: the phase that each thread has arrived at and not yet waited for.
struct ClusterArrivals : EngineState {
  static constexpr u32 kNone = ~0u;
  std::vector<u32> phase;
  void block_start(Block& block) override { phase.assign(block.thread_count(), kNone); }
  void thread_exit(Block& block, Thread& thread) override;
};

Engine<ClusterBarrier> barrier_engine;
Engine<ClusterArrivals> arrivals_engine;

ClusterBarrier& barrier_of(Block& block) { return barrier_engine.of(block.group->peer(block, 0)); }

u32 live_threads(Block& block) {
  u32 live = 0;
  for (u32 rank = 0; rank < block.group->cluster_size; ++rank) live += block.group->peer(block, rank).live;
  return live;
}

void complete_if_all_arrived(Block& block, ClusterBarrier& barrier) {
  if (barrier.arrived == 0 || barrier.arrived < live_threads(block)) return;
  barrier.arrived = 0;
  ++barrier.phase;
  barrier.completed.swap(barrier.arriving);
  barrier.arriving.clear();
  for (Thread* thread : barrier.waiting) wake(*thread);
  barrier.waiting.clear();
}

void ClusterArrivals::thread_exit(Block& block, Thread& thread) {
  if (phase[thread.index()] == kNone) return;
  hazard(nullptr, "thread exits after barrier.cluster.arrive without the wait");
  // It no longer counts among the live threads, so its arrival must not count either.
  if (phase[thread.index()] == barrier_of(block).phase) --barrier_of(block).arrived;
}

void describe_wait(const Thread& thread, Text& text) {
  Block& block = *thread.block;
  text.add(" (%u of %u threads of the cluster arrived)", barrier_of(block).arrived, live_threads(block));
}

void arrive(CallSite site, bool release) {
  jitter();
  Thread& thread = current_thread();
  Block& block = *thread.block;
  note_activity(*block.group);
  ClusterBarrier& barrier = barrier_of(block);
  u32& mine = arrivals_engine.of(block).phase[thread.index()];
  if (mine != ClusterArrivals::kNone) fatal(site, "barrier.cluster.arrive twice without a wait between");
  mine = barrier.phase;
  if (RaceDetector* races = detector(); races && release) races->release(barrier.arriving, thread);
  ++barrier.arrived;
  complete_if_all_arrived(block, barrier);
}

void wait_for_cluster(CallSite site, bool acquire) {
  jitter();
  Thread& thread = current_thread();
  Block& block = *thread.block;
  ClusterBarrier& barrier = barrier_of(block);
  u32& mine = arrivals_engine.of(block).phase[thread.index()];
  if (mine == ClusterArrivals::kNone) fatal(site, "barrier.cluster.wait without an arrive");
  while (barrier.phase == mine) {
    barrier.waiting.push_back(&thread);
    wait(Wait{"cluster barrier", site, 0, 0, describe_wait});
  }
  mine = ClusterArrivals::kNone;
  if (RaceDetector* races = detector(); races && acquire) races->acquire(thread, barrier.completed);
}

}  // namespace

void cluster_after_exit(Block& block) {
  if (ClusterBarrier* barrier = barrier_engine.if_used(block.group->peer(block, 0)))
    complete_if_all_arrived(block, *barrier);
}

}  // namespace cki::sim

extern "C" void cki_sim_cluster_arrive(int release) { cki::sim::arrive(CKI_SIM_CALL_SITE, release != 0); }

extern "C" void cki_sim_cluster_wait(int acquire) { cki::sim::wait_for_cluster(CKI_SIM_CALL_SITE, acquire != 0); }
