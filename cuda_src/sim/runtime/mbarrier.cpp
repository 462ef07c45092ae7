// mbarriers: phases, arrivals and transaction counts.
//
// The state lies in the barrier's own 64-bit word in shared memory, as on the hardware, and a second time here: a use
// before mbarrier.init, or after the word was overwritten, is found by comparing the two. A wait blocks the fiber
// until the phase completes and then looks again, so that a waiter that is lapped by two phases sleeps on, as it may
// on the hardware.
#include "mbarrier.h"

#include <cstring>
#include <unordered_map>

#include "engine.h"
#include "scheduler.h"

using namespace cki::sim;

namespace {

constexpr u32 kMaxCount = (1u << 20) - 1;
constexpr u32 kMagic = 2;   // neither all-zero nor all-one memory looks like a barrier

struct Word {
  u64 phase : 1;
  u64 expected : 20;
  u64 pending : 20;   // arrivals missing in this phase
  i64 tx : 21;   // bytes outstanding; negative when more have landed than were announced
  u64 magic : 2;
};
static_assert(sizeof(Word) == 8);

struct Barrier {
  Word word{};
  u32 copies = 0;   // issued and not landed
  CallSite last_tx = nullptr;   // who last changed the byte count
  std::vector<Thread*> waiting;
  Clock arrived;   // race detection: what the arrivals of all phases so far released
  Clock completed;   // the same at the end of the last complete phase
};

struct MbarrierState : EngineState {
  std::unordered_map<u32, Barrier> barriers;   // by offset in the window

  void block_start(Block&) override { barriers.clear(); }

  void block_end(Block&) override {
    for (auto& [offset, barrier] : barriers) {
      if (barrier.copies) {
        hazard(barrier.last_tx, "the block exits while %u copies that complete on mbarrier shared 0x%x are in flight",
               barrier.copies, offset + kSharedBase);
      } else if (barrier.word.tx) {
        hazard(barrier.last_tx,
               "the block exits with %d bytes outstanding on mbarrier shared 0x%x: expect_tx and copies disagree",
               static_cast<int>(barrier.word.tx), offset + kSharedBase);
      }
    }
  }
};

Engine<MbarrierState> engine;

void store(const SharedPlace& place, const Barrier& barrier) { std::memcpy(place.pointer, &barrier.word, 8); }

SharedPlace aligned_place(const void* pointer, CallSite site) {
  const u32 address = shared_address(pointer, site);
  if (address % 8) fatal(site, "mbarrier at shared 0x%x: the address must be a multiple of 8", address);
  return shared_place(address, 8, site);
}

Barrier& find(const SharedPlace& place, CallSite site) {
  auto& barriers = engine.of(*place.block).barriers;
  const auto found = barriers.find(place.offset);
  if (found == barriers.end()) {
    fatal(site, "mbarrier at shared 0x%x used before mbarrier.init", place.offset + kSharedBase);
  }
  if (std::memcmp(place.pointer, &found->second.word, 8) != 0) {
    fatal(site, "mbarrier at shared 0x%x was overwritten by ordinary stores", place.offset + kSharedBase);
  }
  return found->second;
}

// The barrier for an operation by the current thread, which must be ordered after its initialisation.
Barrier& use(const SharedPlace& place, CallSite site) {
  Barrier& barrier = find(place, site);
  // Recorded as atomic reads, so that the initialisation stays the last write, which every user must know.
  if (RaceDetector* races = detector()) races->atomic(place, 8, site, "an mbarrier operation on", false);
  return barrier;
}

void complete_phase_if_due(const SharedPlace& place, Barrier& barrier, CallSite site) {
  if (barrier.word.pending == 0 && barrier.word.tx == 0) {
    if (barrier.copies) {
      hazard(site,
             "a phase of mbarrier shared 0x%x completes while %u copies that complete on it are in flight: expect_tx "
             "names "
             "too few bytes",
             place.offset + kSharedBase, barrier.copies);
    }
    barrier.word.phase ^= 1;
    barrier.word.pending = barrier.word.expected;
    barrier.completed = barrier.arrived;
    for (Thread* thread : barrier.waiting) wake(*thread);
    barrier.waiting.clear();
  }
  store(place, barrier);
  note_progress(*place.block->group);
}

void change_tx(const SharedPlace& place, Barrier& barrier, i64 bytes, CallSite site) {
  const i64 tx = barrier.word.tx + bytes;
  if (tx > kMaxCount || tx < -i64{kMaxCount}) {
    fatal(site, "mbarrier at shared 0x%x: a transaction count of %lld is out of range (+-%u)",
          place.offset + kSharedBase, static_cast<long long>(tx), kMaxCount);
  }
  barrier.word.tx = tx;
  barrier.last_tx = site;
}

void arrive(const SharedPlace& place, Barrier& barrier, CallSite site) {
  if (barrier.word.pending == 0) {
    fatal(site, "mbarrier at shared 0x%x: more arrivals than its count of %u in one phase", place.offset + kSharedBase,
          static_cast<u32>(barrier.word.expected));
  }
  --barrier.word.pending;
  complete_phase_if_due(place, barrier, site);
}

void arrive_by_thread(const SharedPlace& place, u32 expected_bytes, CallSite site) {
  Barrier& barrier = use(place, site);
  if (RaceDetector* races = detector()) races->release(barrier.arrived, current_thread());
  if (expected_bytes) change_tx(place, barrier, expected_bytes, site);
  arrive(place, barrier, site);
}

void describe_wait(const Thread& thread, Text& text) {
  const auto& barriers = engine.of(*thread.block).barriers;
  const auto found = barriers.find(static_cast<u32>(thread.wait.a));
  if (found == barriers.end()) return;
  const Word& word = found->second.word;
  text.add(" shared 0x%x for parity %u (phase %u, %u of %u arrivals missing, %d bytes outstanding)",
           found->first + kSharedBase, static_cast<u32>(thread.wait.b), static_cast<u32>(word.phase),
           static_cast<u32>(word.pending), static_cast<u32>(word.expected), static_cast<int>(word.tx));
}

// True when the phase of that parity is complete, and then acquires what its arrivals released.
bool test(const SharedPlace& place, u32 parity, CallSite site) {
  Barrier& barrier = use(place, site);
  if (barrier.word.phase == parity) return false;
  if (RaceDetector* races = detector()) races->acquire(current_thread(), barrier.completed);
  return true;
}

void check_parity(u32 parity, CallSite site) {
  if (parity > 1) fatal(site, "mbarrier wait for parity %u: a parity is 0 or 1", parity);
}

}  // namespace

namespace cki::sim {

SharedPlace mbarrier_place(const void* pointer, CallSite site) {
  const SharedPlace place = aligned_place(pointer, site);
  use(place, site);
  return place;
}

void mbarrier_note_copy(const SharedPlace& place, CallSite site) {
  Barrier& barrier = find(place, site);
  ++barrier.copies;
  barrier.last_tx = site;
}

void mbarrier_complete_tx(const SharedPlace& place, u32 bytes, Epoch epoch, CallSite site) {
  Barrier& barrier = find(place, site);
  --barrier.copies;
  if (RaceDetector* races = detector()) races->complete_async(barrier.arrived, epoch);
  change_tx(place, barrier, -i64{bytes}, site);
  complete_phase_if_due(place, barrier, site);
}

void mbarrier_arrive_async(const SharedPlace& place, Epoch epoch, CallSite site) {
  Barrier& barrier = find(place, site);
  if (RaceDetector* races = detector()) {
    if (epoch.time) races->complete_async(barrier.arrived, epoch);
  }
  arrive(place, barrier, site);
}

}  // namespace cki::sim

extern "C" void cki_sim_mbarrier_init(void* pointer, unsigned count) {
  CallSite site = CKI_SIM_CALL_SITE;
  const SharedPlace place = aligned_place(pointer, site);
  if (count < 1 || count > kMaxCount)
    fatal(site, "mbarrier.init: a count of %u is out of range (1..%u)", count, kMaxCount);
  Barrier& barrier = engine.of(*place.block).barriers[place.offset];
  if (barrier.word.magic == kMagic) {
    hazard(site, "mbarrier.init of shared 0x%x, which is a live mbarrier: mbarrier.inval comes first",
           place.offset + kSharedBase);
  }
  barrier = Barrier{};
  barrier.word.expected = barrier.word.pending = count;
  barrier.word.magic = kMagic;
  store(place, barrier);
  if (RaceDetector* races = detector()) races->write(place, 8, site, "mbarrier.init of");
}

extern "C" void cki_sim_mbarrier_invalidate(void* pointer) {
  CallSite site = CKI_SIM_CALL_SITE;
  const SharedPlace place = aligned_place(pointer, site);
  const Barrier& barrier = find(place, site);
  if (barrier.copies || !barrier.waiting.empty()) {
    fatal(site, "mbarrier.inval of shared 0x%x while %u copies complete on it and %zu threads wait",
          place.offset + kSharedBase, barrier.copies, barrier.waiting.size());
  }
  if (RaceDetector* races = detector()) races->write(place, 8, site, "mbarrier.inval of");
  engine.of(*place.block).barriers.erase(place.offset);
}

extern "C" void cki_sim_mbarrier_arrive(void* pointer, unsigned expected_bytes) {
  CallSite site = CKI_SIM_CALL_SITE;
  jitter();
  arrive_by_thread(aligned_place(pointer, site), expected_bytes, site);
}

extern "C" void cki_sim_mbarrier_arrive_cluster(void* local, unsigned rank) {
  CallSite site = CKI_SIM_CALL_SITE;
  jitter();
  const u32 address = map_to_rank(shared_address(local, site), rank, site);
  arrive_by_thread(shared_place(address, 8, site), 0, site);
}

extern "C" void cki_sim_mbarrier_expect_tx(void* pointer, unsigned bytes) {
  CallSite site = CKI_SIM_CALL_SITE;
  jitter();
  const SharedPlace place = aligned_place(pointer, site);
  Barrier& barrier = use(place, site);
  change_tx(place, barrier, bytes, site);
  complete_phase_if_due(place, barrier, site);
}

extern "C" int cki_sim_mbarrier_try_wait_parity(void* pointer, unsigned parity) {
  CallSite site = CKI_SIM_CALL_SITE;
  jitter();
  check_parity(parity, site);
  const SharedPlace place = aligned_place(pointer, site);
  if (test(place, parity, site)) return 1;
  find(place, site).waiting.push_back(&current_thread());
  wait({"mbarrier", site, place.offset, parity, describe_wait});
  return test(place, parity, site);
}

extern "C" int cki_sim_mbarrier_test_wait_parity(void* pointer, unsigned parity) {
  CallSite site = CKI_SIM_CALL_SITE;
  check_parity(parity, site);
  const SharedPlace place = aligned_place(pointer, site);
  yield_poll(site);
  return test(place, parity, site);
}
