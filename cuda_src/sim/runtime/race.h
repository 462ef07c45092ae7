// Race detection on shared memory by happens-before: FastTrack (Flanagan and Freund, PLDI 2009) with one vector clock for
// each CUDA thread of the group, and pseudo-threads for asynchronous copies. Only what orders memory in PTX orders here:
// barriers, mbarriers, __syncwarp, fences with atomics; a shuffle or a vote does not.
//
// Plain loads and stores of a kernel arrive by the compiler's hooks (tsan_hooks.cpp); engines report what they touch:
//
//   if (RaceDetector* races = detector()) races->read(place, 16, site, "ldmatrix reads");
//
// Asynchronous work: `Epoch e = races->begin_async(key)`, then `races->write_async(place, bytes, e, site, what)`. The copy is
// known to a thread after `races->acquire(thread, clock)` of a clock in which `races->complete_async(clock, e)` was noted,
// or after `races->acquire(thread, e)`.
#pragma once
#include <memory>
#include <unordered_map>
#include <vector>

#include "block.h"

namespace cki::sim {

using Clock = std::vector<u32>;   // empty stands for all zero

struct Epoch {
  u32 actor = 0;
  u32 time = 0;
};

class RaceDetector {
 public:
  RaceDetector();
  ~RaceDetector();
  void group_start(Group& group);

  // ---- order of memory ----
  void release(Clock& into, const Thread& thread);        // what the thread did so far is in `into`
  void acquire(const Thread& thread, const Clock& from);  // the thread knows what is in `from`
  void acquire(const Thread& thread, Epoch epoch);
  void complete_async(Clock& into, Epoch epoch);
  Epoch begin_async(u64 key);                             // equal keys share a pseudo-thread (say, a barrier's address)

  // ---- accesses to shared memory; `what` is the subject and verb of the message: "ldmatrix reads" ----
  void read(const SharedPlace& place, u32 bytes, CallSite site, const char* what);
  void write(const SharedPlace& place, u32 bytes, CallSite site, const char* what);
  void atomic(const SharedPlace& place, u32 bytes, CallSite site, const char* what, bool write = true);
  void write_async(const SharedPlace& place, u32 bytes, Epoch epoch, CallSite site, const char* what);
  // A read by the asynchronous proxy (bulk store, wgmma operand), under way until its epoch is acquired (an epoch of
  // time 0 is checked and not remembered). Also reports generic writes with no fence.proxy.async after them.
  void read_async(const SharedPlace& place, u32 bytes, Epoch epoch, CallSite site, const char* what);
  void fence_proxy_async();                               // by the current thread

  // ---- atomics and fences of the C++ model, for ordinary and global memory alike ----
  void fence(bool acquire, bool release);
  void atomic_load(const void* location, bool acquire);
  void atomic_store(const void* location, bool release);
  void atomic_update(const void* location, bool acquire, bool release);

 private:
  struct State;
  std::unique_ptr<State> state_;
};

// The current group's detector, or null when races are not checked.
RaceDetector* detector();

}  // namespace cki::sim
