// One CUDA thread: what the kernel sees of it, its fiber, and what it waits for.
#pragma once
#include "../runtime_api.h"
#include "fiber.h"
#include "types.h"

namespace cki::sim {

struct Block;
struct Thread;
class Text;

enum class ThreadState : u8 { Ready, Waiting, Polling, Exited };

// Adds details to the deadlock report, e.g. " 0x480 for parity 1 (2 of 4 arrivals missing)".
using DescribeWait = void (*)(const Thread& thread, Text& text);

struct Wait {
  const char* what = "";           // "named barrier", "mbarrier", ...
  CallSite site = nullptr;
  u64 a = 0, b = 0;                // the waiter's own; equal values fold into one line of the deadlock report
  DescribeWait describe = nullptr;
};

// Every change of threads touches the members up to `result`: one cache line.
struct alignas(64) Thread {
  cki_sim_thread_view view;        // first: cki_sim_thread points here
  Block* block = nullptr;
  Fiber fiber;
  ThreadState state = ThreadState::Exited;
  u64 result = 0;                  // left by whoever wakes the thread
  Wait wait;

  u32 index() const { return view.linear_index; }
  u32 warp() const { return view.linear_index / kWarpSize; }
  u32 lane() const { return view.linear_index % kWarpSize; }
};

}  // namespace cki::sim
