// One thread block while it runs, and the group of blocks that are resident together.
#pragma once
#include <memory>
#include <semaphore.h>
#include <vector>

#include "barrier.h"
#include "pending.h"
#include "report.h"
#include "shared_window.h"
#include "thread.h"
#include "types.h"
#include "warp.h"

namespace cki::sim {

struct Block;
struct Group;
struct Launch;
class RaceDetector;

// What an engine keeps for one block; see engine.h.
struct EngineState {
  virtual ~EngineState() = default;
  virtual void block_start(Block&) {}             // before the engine's first use in a block
  virtual void thread_exit(Block&, Thread&) {}    // a thread returned from the kernel: report what it left unfinished
  virtual void block_end(Block&) {}               // every thread of the block has exited (not called after a fatal error)
};

constexpr int kMaxEngines = 16;
int allocate_engine_slot();

struct Block {
  struct EngineSlot {
    std::unique_ptr<EngineState> state;
    u64 serial = 0;
  };

  Group* group = nullptr;
  cki_sim_block_view view{};
  u32 rank = 0;                       // within the group
  u64 serial = 0;                     // differs for every block that was ever run
  std::vector<Thread> threads;
  std::vector<Warp> warps;
  NamedBarrier barriers[kNamedBarriers];
  SharedWindow window;
  InFlight in_flight;
  EngineSlot engines[kMaxEngines];
  u32 live = 0;                       // threads that have not exited

  // The scheduler's.
  u32 ready[kMaxWarps] = {};          // lanes that can run, for each warp
  u32 ready_warps = 0;                // warps with such lanes
  u32 last_warp = 0;
  u32 warp_priority[kMaxWarps] = {};
  u32 priority = 0;
  std::vector<u32> polling;           // indices of threads that wait for memory to change
  std::vector<u8*> stacks;
  Fiber main;                         // the OS thread's own context
  sem_t baton;                        // posted when this block's OS thread shall run

  Block() { sem_init(&baton, 0, 0); }
  u32 thread_count() const { return static_cast<u32>(threads.size()); }
};

// What a launch is asked to look for. The bits are those of cki.sim.Checks in Python.
struct Checks {
  bool adversarial = false;   // asynchronous work completes late, targets and shared memory are poisoned, seeded schedules
  bool hazards = false;       // copies and products in flight against their operands
  bool races = false;         // happens-before on shared memory (instrumented kernels)
  bool bounds = false;        // accesses against tensor extents and shared arrays (instrumented kernels)

  static Checks from_bits(u32 bits) {
    return {(bits & 1) != 0, (bits & 2) != 0, (bits & 4) != 0, (bits & 8) != 0};
  }
};

// The seeded generator behind every choice of a launch: xorshift64, one for each group of co-resident blocks, so that a
// seed reproduces a schedule whatever the number of OS threads.
class Random {
 public:
  void seed(u64 launch_seed, u64 group_index) {
    state_ = (launch_seed + 1) * 0x9E3779B97F4A7C15ull ^ (group_index + 1) * 0xD1B54A32D192ED03ull;
    if (!state_) state_ = 1;
    for (int i = 0; i < 4; ++i) next();
  }
  u64 next() {
    state_ ^= state_ << 13;
    state_ ^= state_ >> 7;
    state_ ^= state_ << 17;
    return state_;
  }
  u32 below(u32 n) { return static_cast<u32>((next() >> 32) * n >> 32); }
  bool one_in(u32 n) { return below(n) == 0; }

 private:
  u64 state_ = 1;
};

// Blocks that are resident together: one block, a cluster, or a whole cooperative grid. Each block has an OS thread (its
// shared memory is that thread's thread-local storage), but only the holder of the baton runs: a schedule depends on the
// seed alone.
struct Group {
  Launch* launch = nullptr;
  u64 index = 0;
  std::vector<Block*> blocks;
  Checks checks;
  Random random;
  Report report;
  PendingOperations pending;
  std::unique_ptr<RaceDetector> races;    // null unless the launch asked for race checks
  u32 cluster_size = 1;

  enum class Policy { RunToBlock, Uniform, RandomPriorities, StrictPriorities };
  Policy policy = Policy::RunToBlock;
  bool plain = true;                  // plain order and a single block: changes within a warp need no choice
  u32 early_completion = 0;           // one in so many choices completes pending work before it must; 0: never
  u32 live = 0;
  u32 polling = 0;                    // threads in ThreadState::Polling
  u32 poll_rounds = 0;                // rounds in which everybody polled and did nothing else
  u32 idle_rounds = 0;                // the same since the last write that others could have polled for
  u32 progress = 0;                   // counts such writes
  u32 progress_seen = 0;
  u64 watch_progress = 0;             // deadlock.cpp: the launch's progress when this group began to watch the others,
  std::vector<u64> watch_rounds;      // and how many rounds each had polled
  u64 switches = 0;
  bool finished = false;              // every thread has exited, or the launch was abandoned
  bool aborted = false;
  Thread* next = nullptr;             // whom the receiver of the baton shall run
  u32 slot = 0;                       // which of the launch's teams of OS threads runs this group

  // The blocks of a cluster follow one another; a cooperative launch may hold several clusters.
  Block& peer(const Block& block, u32 rank_in_cluster) {
    return *blocks[block.rank - block.view.rank_in_cluster + rank_in_cluster];
  }
};

}  // namespace cki::sim
