// cp.async: 4, 8 or 16 bytes from global to shared memory, complete by groups of the issuing thread.
//
// Plain mode copies at issue. Adversarial mode fills the target with all-one bits at issue (a NaN in every format)
// and copies when the thread waits for the group: the last moment that the rules allow. Race detection treats the
// copy as a writer of its own from issue to wait, so that a reader who did not wait is reported; after the wait it is
// a write by the thread.
#include <cstring>
#include <deque>
#include <vector>

#include "bounds.h"
#include "engine.h"
#include "mbarrier.h"
#include "race.h"
#include "scheduler.h"

using namespace cki::sim;

namespace {

struct Copy {
  SharedPlace target;
  const u8* source;
  u32 bytes;
  u32 source_bytes;   // the rest is zero
  bool landed;   // in memory, though no wait has told the thread so yet
  CallSite site;
};

// Copies in order of issue. The first groups[0] of them form the oldest group, and so on; those behind all groups are
// open.
struct ThreadCopies {
  std::deque<Copy> copies;
  std::deque<u32> groups;
  u32 committed = 0;
  u64 finished = 0;   // copies that have left the front of the queue
  Epoch open_epoch;   // of the open group; time 0 while it is empty
  std::deque<Epoch> epochs;   // of the committed groups
};

struct CpAsyncState : EngineState {
  std::vector<ThreadCopies> of_thread;

  void block_start(Block& block) override { of_thread.assign(block.thread_count(), {}); }

  void thread_exit(Block&, Thread& thread) override {
    for (const Copy& copy : of_thread[thread.index()].copies) {
      if (!copy.landed) {
        hazard(copy.site, "the thread exits with this cp.async in flight: no wait covers it");
        return;
      }
    }
  }
};

Engine<CpAsyncState> engine;

void land(Copy& copy) {
  if (copy.landed) return;
  copy.landed = true;
  if (copy.source_bytes) std::memcpy(copy.target.pointer, copy.source, copy.source_bytes);
  if (copy.bytes > copy.source_bytes)
    std::memset(copy.target.pointer + copy.source_bytes, 0, copy.bytes - copy.source_bytes);
}

void land_in_flight(Copy& copy) {
  if (copy.landed) return;
  copy.target.block->in_flight.remove_write(copy.target.offset, copy.bytes);
  land(copy);
}

// Whether copies must be remembered: otherwise everything is done at issue.
bool deferred(const Group& group) { return group.checks.adversarial || group.checks.races; }

u64 race_key(const Thread& thread) { return u64{1} << 40 | u64{thread.block->rank} << 16 | thread.index(); }

void check_target(const Copy& copy) {
  const InFlight& in_flight = copy.target.block->in_flight;
  // A granule of the map has 16 bytes: smaller copies may share one without touching each other.
  if (copy.bytes == 16 && in_flight.find_write(copy.target.offset, 16) >= 0) {
    hazard(copy.site, "cp.async writes shared 0x%x, the target of another copy in flight",
           copy.target.offset + kSharedBase);
  }
  if (in_flight.find_read(copy.target.offset, copy.bytes) >= 0) {
    hazard(copy.site, "cp.async writes shared 0x%x, which an operation in flight still reads",
           copy.target.offset + kSharedBase);
  }
}

// The oldest group is complete and the thread knows it.
void finish_oldest_group(Thread& thread, ThreadCopies& mine, CallSite site) {
  RaceDetector* races = detector();
  if (races && mine.epochs.front().time) races->acquire(thread, mine.epochs.front());
  for (u32 i = 0; i < mine.groups.front(); ++i) {
    Copy& copy = mine.copies.front();
    land_in_flight(copy);
    if (races) races->write(copy.target, copy.bytes, site, "cp.async writes");
    mine.copies.pop_front();
    ++mine.finished;
  }
  mine.committed -= mine.groups.front();
  mine.groups.pop_front();
  mine.epochs.pop_front();
}

void commit(ThreadCopies& mine) {
  const u32 open = static_cast<u32>(mine.copies.size()) - mine.committed;
  mine.groups.push_back(open);
  mine.epochs.push_back(mine.open_epoch);
  mine.committed += open;
  mine.open_epoch = {};
}

}  // namespace

extern "C" void cki_sim_cp_async(void* shared, const void* global, int bytes, int source_bytes) {
  CallSite site = CKI_SIM_CALL_SITE;
  Thread& thread = current_thread();
  Block& block = *thread.block;
  if (!block.window.contains(shared))
    fatal(site, "cp.async: %p is not an address of this block's shared memory", shared);
  const u32 size = static_cast<u32>(bytes), offset = block.window.offset(shared);
  if (!block.window.valid(offset, size)) shared_place(offset + kSharedBase, size, site);   // reports it
  if (source_bytes < 0 || source_bytes > bytes) {
    fatal(site, "cp.async: a source of %d bytes for a copy of %d", source_bytes, bytes);
  }
  if (offset % size || reinterpret_cast<std::uintptr_t>(global) % size) {
    fatal(site, "cp.async of %d bytes: shared 0x%x and global %p must be multiples of it", bytes, offset + kSharedBase,
          global);
  }
  if (source_bytes) check_global(global, static_cast<u32>(source_bytes), false, site);
  Copy copy{{&block, offset, static_cast<u8*>(shared)},
            static_cast<const u8*>(global),
            size,
            static_cast<u32>(source_bytes),
            false,
            site};
  if (!deferred(*block.group)) return land(copy);
  check_target(copy);
  ThreadCopies& mine = engine.of(block).of_thread[thread.index()];
  if (RaceDetector* races = detector()) {
    if (!mine.open_epoch.time) mine.open_epoch = races->begin_async(race_key(thread));
    races->write_async(copy.target, size, mine.open_epoch, site, "cp.async writes");
  }
  if (block.group->checks.adversarial) {
    block.in_flight.add_write(offset, size);
    std::memset(shared, 0xff, size);
  } else {
    land(copy);
  }
  mine.copies.push_back(copy);
}

extern "C" void cki_sim_cp_async_commit_group() {
  Thread& thread = current_thread();
  if (deferred(*thread.block->group)) commit(engine.of(*thread.block).of_thread[thread.index()]);
}

extern "C" void cki_sim_cp_async_wait_group(int newest_allowed) {
  CallSite site = CKI_SIM_CALL_SITE;
  Thread& thread = current_thread();
  if (!deferred(*thread.block->group)) return;
  jitter();
  ThreadCopies& mine = engine.of(*thread.block).of_thread[thread.index()];
  while (mine.groups.size() > static_cast<std::size_t>(newest_allowed)) finish_oldest_group(thread, mine, site);
}

extern "C" void cki_sim_cp_async_wait_all() {
  CallSite site = CKI_SIM_CALL_SITE;
  Thread& thread = current_thread();
  if (!deferred(*thread.block->group)) return;
  jitter();
  ThreadCopies& mine = engine.of(*thread.block).of_thread[thread.index()];
  commit(mine);
  while (!mine.groups.empty()) finish_oldest_group(thread, mine, site);
}

extern "C" void cki_sim_cp_async_mbarrier_arrive_noinc(void* pointer) {
  CallSite site = CKI_SIM_CALL_SITE;
  Thread& thread = current_thread();
  Block& block = *thread.block;
  jitter();
  const SharedPlace barrier = mbarrier_place(pointer, site);
  Group& group = *block.group;
  if (!deferred(group)) return mbarrier_arrive_async(barrier, {}, site);
  ThreadCopies& mine = engine.of(block).of_thread[thread.index()];
  Epoch last = mine.open_epoch;
  for (auto epoch = mine.epochs.rbegin(); !last.time && epoch != mine.epochs.rend(); ++epoch) last = *epoch;
  if (!group.checks.adversarial) return mbarrier_arrive_async(barrier, last, site);
  const u64 end = mine.finished + mine.copies.size();   // the arrival covers the copies issued so far
  group.pending.add([&mine, end, barrier, last, site] {
    for (std::size_t i = 0; i < mine.copies.size() && mine.finished + i < end; ++i) land_in_flight(mine.copies[i]);
    mbarrier_arrive_async(barrier, last, site);
  });
}
