// A kernel launch: what Python hands over, and the state that all its blocks share.
#pragma once
#include <atomic>
#include <functional>
#include <memory>
#include <mutex>
#include <string>

#include "block.h"
#include "bounds.h"

extern "C" {

// A kernel module as cki/sim/kernel.py loaded it.
struct cki_sim_module {
  void (*entry)(void** arguments);     // unpacks the argument array of cuLaunchKernel and calls the kernel
  void* (*dynamic_address)();          // of the dynamic shared memory on the calling OS thread
  unsigned window_size;                // of the thread-local segment
  unsigned dynamic_offset;             // of the dynamic area in it
  const cki_sim_shared_array* arrays;  // the static shared arrays in it, in order
  unsigned array_count;
};

struct cki_sim_config {
  unsigned grid[3], block[3], cluster[3];
  unsigned dynamic_bytes;
  unsigned checks;                     // Checks::from_bits
  unsigned cooperative;                // all blocks are resident together
  unsigned os_threads;
  unsigned long long seed;
  const cki_sim_extent* extents;       // the launch's tensors, for the bounds check
  unsigned long long extent_count;
};

// Runs the launch to its end. Returns the number of findings; *report is their text, to be freed by cki_sim_free.
int cki_sim_launch(const cki_sim_module* module, const cki_sim_config* config, void** arguments, char** report);
void cki_sim_free(char* report);
}

namespace cki::sim {

// What a team of OS threads shows to the others about its polling; see deadlock.cpp.
struct PollSlot {
  std::atomic<u64> rounds{0};
  std::atomic<bool> running{false};
};

struct Launch {
  Launch(const cki_sim_module& m, const cki_sim_config& c, void** a)
      : module(m), config(c), arguments(a), checks(Checks::from_bits(c.checks)) {}

  const cki_sim_module& module;
  const cki_sim_config& config;
  void** arguments;
  Checks checks;
  Bounds bounds;
  u32 cluster_size = 1;
  u32 blocks_per_group = 1;
  u64 groups = 0;
  std::atomic<u64> next_group{0};
  std::atomic<bool> aborted{false};
  std::atomic<u64> progress{0};
  u32 teams = 1;
  std::unique_ptr<PollSlot[]> poll_slots;
  std::mutex report_mutex;
  std::string report;
  int findings = 0;
};

// True when every group that runs has done nothing but poll for so long that none can be waiting for another's progress.
bool nobody_progresses(Group& group);

// Runs work(1) ... work(count - 1) on pool threads and work(0) on the caller; returns when all are done. May be called from
// within such work. A child made by fork() starts with an empty pool.
void run_on_threads(unsigned count, const std::function<void(unsigned)>& work);

}  // namespace cki::sim
