// cp.async.bulk: asynchronous copies of contiguous bytes, and what the tensor copies share with them.
//
// Plain mode copies at issue. In adversarial mode a load fills its target with all-one bits and lands later: when
// nothing else can run, or at random. A store reads its source when the thread waits for that (or later), and writes
// when it waits for the whole group. A source that has changed between issue and read is reported at the store.
#include "bulk.h"

#include <cstring>
#include <deque>
#include <memory>

#include "bounds.h"
#include "convert.h"
#include "engine.h"
#include "mbarrier.h"
#include "race.h"
#include "scheduler.h"
#include "tensor_map.h"

using namespace cki::sim;

namespace {

// A store between issue and completion: first its source is read, then global memory is written.
struct Store {
  SharedPlace source;
  u32 bytes;
  std::vector<u8> issued;   // the source as it was at issue
  std::function<void(const u8*, u32)> move;
  CallSite site;
  Epoch epoch;   // of the read, for race detection
  bool read = false, written = false;

  u32 address() const { return source.offset + kSharedBase; }

  void do_read() {
    if (read) return;
    read = true;
    source.block->in_flight.remove_read(source.offset, bytes);
    if (std::memcmp(issued.data(), source.pointer, bytes) != 0) {
      hazard(site, "the source of this bulk store, shared 0x%x, was overwritten before bulk_wait_group_read",
             address());
      std::memcpy(issued.data(), source.pointer, bytes);
    }
  }

  void do_write() {
    do_read();
    if (written) return;
    written = true;
    move(issued.data(), address());
    note_progress(*source.block->group);
  }
};

using StoreGroup = std::vector<std::shared_ptr<Store>>;

struct ThreadStores {
  StoreGroup open;
  std::deque<StoreGroup> groups;   // committed, oldest first
};

struct BulkState : EngineState {
  std::vector<ThreadStores> of_thread;

  void block_start(Block& block) override { of_thread.assign(block.thread_count(), {}); }

  void thread_exit(Block&, Thread& thread) override {
    ThreadStores& mine = of_thread[thread.index()];
    mine.groups.push_back(std::move(mine.open));
    for (const StoreGroup& group : mine.groups) {
      for (const auto& store : group) {
        if (store->read) continue;
        hazard(store->site, "the thread exits while this bulk store may still read shared 0x%x: no wait covers it",
               store->address());
        return;
      }
    }
  }
};

Engine<BulkState> engine;

struct Target {
  SharedPlace place, barrier;
  Epoch epoch;
};

u64 race_key(const SharedPlace& barrier) { return u64{2} << 40 | u64{barrier.block->rank} << 24 | barrier.offset; }

void check_target(const SharedPlace& place, u32 bytes, CallSite site) {
  const i64 written = place.block->in_flight.find_write(place.offset, bytes);
  if (written >= 0) {
    hazard(site, "this copy overwrites shared 0x%x, the target of another copy in flight",
           static_cast<u32>(written) + kSharedBase);
  }
  const i64 read = place.block->in_flight.find_read(place.offset, bytes);
  if (read >= 0) {
    hazard(site, "this copy overwrites shared 0x%x, which an operation in flight still reads",
           static_cast<u32>(read) + kSharedBase);
  }
}

// The same place in each block that the load addresses.
std::vector<Target> targets_of(const BulkLoad& load, CallSite site) {
  Block& block = current_block();
  const u32 address = shared_address(load.shared, site), barrier = shared_address(load.barrier, site);
  if (address % load.alignment) fatal(site, "shared 0x%x must be a multiple of %u", address, load.alignment);
  std::vector<Target> targets;
  if (load.cta_mask == 0) {
    targets.push_back({shared_place(address, load.footprint, site), mbarrier_place(load.barrier, site), {}});
    return targets;
  }
  if (load.cta_mask >> block.group->cluster_size) {
    fatal(site, "multicast mask 0x%x names blocks beyond the cluster of %u", load.cta_mask, block.group->cluster_size);
  }
  for (u32 rank = 0; rank < block.group->cluster_size; ++rank) {
    if (!(load.cta_mask >> rank & 1)) continue;
    const bool own = rank == block.view.rank_in_cluster;
    targets.push_back({shared_place(own ? address : map_to_rank(address, rank, site), load.footprint, site),
                       shared_place(own ? barrier : map_to_rank(barrier, rank, site), 8, site),
                       {}});
  }
  return targets;
}

void complete_oldest_groups(int newest_allowed, bool writes) {
  jitter();
  Thread& thread = current_thread();
  ThreadStores& mine = engine.of(*thread.block).of_thread[thread.index()];
  std::size_t count = mine.groups.size();
  for (std::size_t i = 0; i + static_cast<std::size_t>(newest_allowed) < count; ++i) {
    for (const auto& store : mine.groups[i]) {
      if (RaceDetector* races = detector()) races->acquire(thread, store->epoch);
      writes ? store->do_write() : store->do_read();
    }
  }
  while (!mine.groups.empty() && mine.groups.size() > static_cast<std::size_t>(newest_allowed) && writes) {
    mine.groups.pop_front();
  }
}

void check_bulk_arguments(const void* global, u32 bytes, CallSite site) {
  if (bytes == 0 || bytes % 16 || reinterpret_cast<std::uintptr_t>(global) % 16) {
    fatal(site, "bulk copy of %u bytes at global %p: both must be multiples of 16", bytes, global);
  }
}

void load(void* shared, const void* global, u32 bytes, void* barrier, u32 cta_mask, CallSite site) {
  check_bulk_arguments(global, bytes, site);
  check_global(global, bytes, false, site);
  issue_bulk_load({shared, barrier, bytes, bytes, 16, cta_mask,
                   [global, bytes](const SharedPlace& target) { std::memcpy(target.pointer, global, bytes); }},
                  site);
}

}  // namespace

namespace cki::sim {

void issue_bulk_load(const BulkLoad& load, CallSite site) {
  jitter();
  Group& group = current_group();
  std::vector<Target> targets = targets_of(load, site);
  for (Target& target : targets) {
    check_target(target.place, load.footprint, site);
    if (RaceDetector* races = detector()) {
      target.epoch = races->begin_async(race_key(target.barrier));
      races->write_async(target.place, load.footprint, target.epoch, site, "a bulk copy writes");
    }
    mbarrier_note_copy(target.barrier, site);
  }
  if (!group.checks.adversarial) {
    for (const Target& target : targets) {
      load.move(target.place);
      mbarrier_complete_tx(target.barrier, load.bytes, target.epoch, site);
    }
    return;
  }
  for (const Target& target : targets) {
    target.place.block->in_flight.add_write(target.place.offset, load.footprint);
    std::memset(target.place.pointer, 0xff, load.footprint);
    group.pending.add([target, move = load.move, bytes = load.bytes, footprint = load.footprint, site] {
      target.place.block->in_flight.remove_write(target.place.offset, footprint);
      move(target.place);
      mbarrier_complete_tx(target.barrier, bytes, target.epoch, site);
    });
  }
}

void issue_bulk_store(const BulkStore& store, CallSite site) {
  jitter();
  Thread& thread = current_thread();
  Group& group = *thread.block->group;
  const u32 address = shared_address(store.shared, site);
  if (address % store.alignment) fatal(site, "shared 0x%x must be a multiple of %u", address, store.alignment);
  const SharedPlace source = shared_place(address, store.bytes, site);
  const i64 written = source.block->in_flight.find_write(source.offset, store.bytes);
  if (written >= 0) {
    hazard(site, "this bulk store reads shared 0x%x, the target of a copy in flight",
           static_cast<u32>(written) + kSharedBase);
  }
  Epoch epoch;
  if (RaceDetector* races = detector()) {
    epoch = races->begin_async(u64{3} << 40 | u64{thread.block->rank} << 16 | thread.index());
    races->read_async(source, store.bytes, epoch, site, "a bulk store reads");
  }
  const bool adversarial = group.checks.adversarial;
  if (!adversarial) store.move(source.pointer, address);
  note_progress(group);
  if (!adversarial && !group.checks.races) return;
  auto deferred = std::make_shared<Store>();
  deferred->source = source;
  deferred->bytes = store.bytes;
  deferred->site = site;
  deferred->epoch = epoch;
  deferred->read = deferred->written = !adversarial;
  engine.of(*thread.block).of_thread[thread.index()].open.push_back(deferred);
  if (!adversarial) return;
  deferred->issued.assign(source.pointer, source.pointer + store.bytes);
  deferred->move = store.move;
  source.block->in_flight.add_read(source.offset, store.bytes);
  group.pending.add([deferred] { deferred->do_write(); });
}

}  // namespace cki::sim

extern "C" void cki_sim_bulk_load(void* shared, const void* global, unsigned bytes, void* barrier, unsigned cta_mask) {
  load(shared, global, bytes, barrier, cta_mask, CKI_SIM_CALL_SITE);
}

extern "C" void cki_sim_bulk_store(void* global, const void* shared, unsigned bytes) {
  CallSite site = CKI_SIM_CALL_SITE;
  check_bulk_arguments(global, bytes, site);
  check_global(global, bytes, true, site);
  issue_bulk_store({shared, bytes, 16, [global, bytes](const u8* data, u32) { std::memcpy(global, data, bytes); }},
                   site);
}

extern "C" void cki_sim_bulk_reduce_add_f32(void* global, const void* shared, unsigned bytes) {
  CallSite site = CKI_SIM_CALL_SITE;
  check_bulk_arguments(global, bytes, site);
  check_global(global, bytes, true, site);
  issue_bulk_store({shared, bytes, 16,
                    [global, bytes](const u8* data, u32) {
                      for (u32 i = 0; i < bytes; i += 4)
                        add_to_global(TensorType::F32, static_cast<u8*>(global) + i, data + i);
                    }},
                   site);
}

extern "C" void cki_sim_bulk_commit_group() {
  Thread& thread = current_thread();
  ThreadStores& mine = engine.of(*thread.block).of_thread[thread.index()];
  mine.groups.push_back(std::move(mine.open));
  mine.open.clear();
}

extern "C" void cki_sim_bulk_wait_group(int newest_allowed) { complete_oldest_groups(newest_allowed, true); }

extern "C" void cki_sim_bulk_wait_group_read(int newest_allowed) { complete_oldest_groups(newest_allowed, false); }
