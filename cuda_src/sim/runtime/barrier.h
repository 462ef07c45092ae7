// The sixteen named barriers of a block; __syncthreads is number 0 with every thread that has not exited.
#pragma once
#include <vector>

#include "types.h"

namespace cki::sim {

struct Block;
struct Thread;

struct NamedBarrier {
  int expected = 0;                 // threads of this phase; -1 = all that have not exited
  u32 arrived = 0;
  int reduction = 0;                // of the predicates so far, for __syncthreads_or and its kin
  int reduction_kind = 0;
  CallSite first_site = nullptr;
  std::vector<Thread*> waiting;
  std::vector<u32> clock;           // race detection: what the arrivals released

  void block_start();
};

// A thread has exited: barriers that wait for all remaining threads may now be complete.
void barriers_after_exit(Block& block);

}  // namespace cki::sim
