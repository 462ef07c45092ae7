// FastTrack over the shared memory of a group of blocks.
//
// State of memory is kept for each 4-byte granule, and for single bytes once an access covers a part of one (fp8, f16).
// A cell holds the last write and the reads since: one epoch while they follow each other, a vector when they are concurrent.
#include "race.h"

#include <algorithm>
#include <cstdio>
#include <cstring>

#include "scheduler.h"

namespace cki::sim {

namespace {

// Vector clocks are arrays of n times. The loops have no early end, so that they become vector instructions.
void join(u32* into, const u32* from, u32 n) {
  for (u32 i = 0; i < n; ++i) into[i] = std::max(into[i], from[i]);
}

// Whether any time of `a` is later than that of `b`.
bool exceeds(const u32* a, const u32* b, u32 n) {
  u32 later = 0;
  for (u32 i = 0; i < n; ++i) later |= a[i] > b[i];
  return later != 0;
}

constexpr u32 kPseudoThreads = 64;   // for asynchronous copies; two keys that share one can hide a race, never invent one
constexpr u32 kGranule = 4;

struct Cell {
  Epoch write, read;
  CallSite write_site = nullptr, read_site = nullptr;
  u32* readers = nullptr;       // times of concurrent reads by actor, instead of `read`
  bool write_atomic = false;
  bool read_atomic = false;     // all reads since the last write were atomic
};

struct Granule {
  Cell whole;
  std::unique_ptr<Cell[]> bytes;   // kept for reuse once made
  bool split = false;
  u32 serial = 0;                  // of the group run in which the cells were last touched
};

struct Access {
  u32 actor;
  const u32* known;     // its clock
  CallSite site;
  const char* what;
  u32 address;          // for the message

  Epoch now() const { return {actor, known[actor]}; }
};

}  // namespace

struct RaceDetector::State {
  u32 blocks = 0;
  u32 threads = 0, width = 0, threads_per_block = 0, serial = 0;
  std::vector<u32> clocks;               // threads x width
  std::vector<u32> proxy_fenced;         // by actor: writes up to that time were followed by a fence.proxy.async
  std::vector<std::vector<Granule>> memory;   // by block of the group
  std::vector<u32*> free_readers;
  std::vector<std::unique_ptr<u32[]>> all_readers;
  std::unordered_map<u64, u32> async_actors;
  std::vector<u32> async_time;
  // Atomics: what a location's last release carries; each thread's last release fence and what its relaxed loads saw.
  std::unordered_map<const void*, Clock> locations;
  std::vector<Clock> fence_release, fence_acquire;

  u32 actor(const Thread& thread) const { return thread.block->rank * threads_per_block + thread.index(); }
  u32* clock(u32 actor_index) { return &clocks[static_cast<std::size_t>(actor_index) * width]; }
  void ensure(Clock& clock_vector) const {
    if (clock_vector.empty()) clock_vector.assign(width, 0);
  }
  void tick(u32 actor_index) { ++clock(actor_index)[actor_index]; }

  u32* new_readers() {
    if (free_readers.empty()) {
      all_readers.push_back(std::make_unique<u32[]>(width));
      free_readers.push_back(all_readers.back().get());
    }
    u32* readers = free_readers.back();
    free_readers.pop_back();
    std::memset(readers, 0, width * sizeof(u32));
    return readers;
  }
  void drop_readers(Cell& cell) {
    if (cell.readers) free_readers.push_back(cell.readers);
    cell.readers = nullptr;
  }

  Granule& granule(const SharedPlace& place, u32 index) {
    Granule& g = memory[place.block->rank][index];
    if (g.serial != serial) {
      g.serial = serial;
      g.whole = Cell{};      // reader vectors of an earlier run went back to the pool as a whole
      g.split = false;
    }
    return g;
  }

  void split(Granule& g) {
    if (!g.bytes) g.bytes = std::make_unique<Cell[]>(kGranule);
    for (u32 i = 0; i < kGranule; ++i) {
      g.bytes[i] = g.whole;
      if (g.whole.readers) {
        g.bytes[i].readers = new_readers();
        std::memcpy(g.bytes[i].readers, g.whole.readers, width * sizeof(u32));
      }
    }
    drop_readers(g.whole);
    g.split = true;
  }

  // Calls visit_cell(cell, access) for every cell of the current thread's access.
  template <class Visit>
  void visit(const SharedPlace& place, u32 bytes, CallSite site, const char* what, Visit visit_cell) {
    const u32 who = actor(current_thread());
    Access access{who, clock(who), site, what, 0};
    const auto visit_at = [&](Cell& cell, u32 offset) {
      access.address = offset + kSharedBase;
      visit_cell(cell, access);
    };
    const u32 end = place.offset + bytes;
    for (u32 at = place.offset; at < end;) {
      const u32 index = at / kGranule, next = std::min(end, (index + 1) * kGranule);
      Granule& g = granule(place, index);
      if (next - at < kGranule && !g.split) split(g);
      if (!g.split) {
        visit_at(g.whole, at);
      } else {
        for (u32 i = at; i < next; ++i) visit_at(g.bytes[i % kGranule], i);
      }
      at = next;
    }
  }

  // ---- the rules ----

  const char* describe(u32 actor_index, char* buffer, std::size_t size) const {
    if (actor_index >= threads)
      std::snprintf(buffer, size, "asynchronous work");
    else if (blocks == 1)
      std::snprintf(buffer, size, "thread %u", actor_index);
    else
      std::snprintf(buffer, size, "thread %u of block rank %u", actor_index % threads_per_block,
                    actor_index / threads_per_block);
    return buffer;
  }

  void report(const Access& access, const char* how, u32 other, CallSite other_site) {
    char buffer[64];
    race_found(access.site, "%s %s shared 0x%x%s; with no synchronisation between, %s it",
               describe(other, buffer, sizeof buffer), how, access.address, SiteText(other_site).text, access.what);
  }

  bool check_write(const Cell& cell, const Access& access) {
    if (cell.write.time <= access.known[cell.write.actor]) return false;
    report(access, "wrote", cell.write.actor, cell.write_site);
    return true;
  }

  bool check_reads(const Cell& cell, const Access& access) {
    if (cell.readers) {
      if (!exceeds(cell.readers, access.known, width)) return false;
      for (u32 i = 0; i < width; ++i)
        if (cell.readers[i] > access.known[i]) {
          report(access, "read", i, cell.read_site);
          return true;
        }
    } else if (cell.read.time > access.known[cell.read.actor]) {
      report(access, "read", cell.read.actor, cell.read_site);
      return true;
    }
    return false;
  }

  // Reads of one kind only are remembered, plain ones before atomic ones: an atomic write conflicts with the plain alone.
  void record_atomic_read(Cell& cell, const Access& access) {
    if (!cell.readers && cell.read.time == 0) cell.read_atomic = true;
    if (cell.read_atomic) add_reader(cell, access, access.now());
  }

  void record_read(Cell& cell, const Access& access, Epoch reader) {
    if (cell.read_atomic) {
      drop_readers(cell);
      cell.read = Epoch{};
      cell.read_atomic = false;
    }
    add_reader(cell, access, reader);
  }

  // `reader` may be asynchronous work that the accessing thread has issued.
  void add_reader(Cell& cell, const Access& access, Epoch reader) {
    const bool first = !cell.readers && cell.read.time == 0;
    cell.read_site = access.site;
    if (cell.readers) {
      cell.readers[reader.actor] = reader.time;
    } else if (first || cell.read.actor == reader.actor || cell.read.time <= access.known[cell.read.actor]) {
      cell.read = reader;
    } else {
      cell.readers = new_readers();
      cell.readers[cell.read.actor] = cell.read.time;
      cell.readers[reader.actor] = reader.time;
    }
  }

  void record_write(Cell& cell, Epoch epoch, CallSite site, bool atomic) {
    drop_readers(cell);
    cell.read = Epoch{};
    cell.read_atomic = false;
    cell.write = epoch;
    cell.write_site = site;
    cell.write_atomic = atomic;
  }
};

RaceDetector::RaceDetector() : state_(std::make_unique<State>()) {}
RaceDetector::~RaceDetector() = default;

void RaceDetector::group_start(Group& group) {
  State& s = *state_;
  s.blocks = static_cast<u32>(group.blocks.size());
  s.threads_per_block = group.blocks[0]->thread_count();
  s.threads = s.threads_per_block * s.blocks;
  const u32 width = (s.threads + kPseudoThreads + 7) / 8 * 8;
  if (width != s.width) {
    s.width = width;
    s.all_readers.clear();
  }
  s.free_readers.clear();
  for (const auto& readers : s.all_readers) s.free_readers.push_back(readers.get());
  ++s.serial;
  s.clocks.assign(static_cast<std::size_t>(s.threads) * width, 0);
  for (u32 i = 0; i < s.threads; ++i) s.clock(i)[i] = 1;
  s.proxy_fenced.assign(width, 0);
  if (s.memory.size() < s.blocks) s.memory.resize(s.blocks);
  for (u32 i = 0; i < s.blocks; ++i) {
    const std::size_t granules = group.blocks[i]->window.size / kGranule + 1;
    if (s.memory[i].size() < granules) s.memory[i].resize(granules);
  }
  s.async_actors.clear();
  s.async_time.assign(kPseudoThreads, 0);
  s.locations.clear();
  s.fence_release.assign(s.threads, {});
  s.fence_acquire.assign(s.threads, {});
}

// ---- order of memory ----

void RaceDetector::release(Clock& into, const Thread& thread) {
  State& s = *state_;
  const u32 actor = s.actor(thread);
  s.ensure(into);
  join(into.data(), s.clock(actor), s.width);
  s.tick(actor);
}

void RaceDetector::acquire(const Thread& thread, const Clock& from) {
  if (!from.empty()) join(state_->clock(state_->actor(thread)), from.data(), state_->width);
}

void RaceDetector::acquire(const Thread& thread, Epoch epoch) {
  u32& known = state_->clock(state_->actor(thread))[epoch.actor];
  known = std::max(known, epoch.time);
}

void RaceDetector::complete_async(Clock& into, Epoch epoch) {
  state_->ensure(into);
  into[epoch.actor] = std::max(into[epoch.actor], epoch.time);
}

Epoch RaceDetector::begin_async(u64 key) {
  State& s = *state_;
  const auto found = s.async_actors.emplace(key, static_cast<u32>(s.async_actors.size() % kPseudoThreads)).first;
  return {s.threads + found->second, ++s.async_time[found->second]};
}

// ---- accesses ----

void RaceDetector::read(const SharedPlace& place, u32 bytes, CallSite site, const char* what) {
  State& s = *state_;
  s.visit(place, bytes, site, what, [&](Cell& cell, const Access& access) {
    s.check_write(cell, access);
    s.record_read(cell, access, access.now());
  });
}

void RaceDetector::write(const SharedPlace& place, u32 bytes, CallSite site, const char* what) {
  State& s = *state_;
  s.visit(place, bytes, site, what, [&](Cell& cell, const Access& access) {
    if (!s.check_write(cell, access)) s.check_reads(cell, access);
    s.record_write(cell, access.now(), site, false);
  });
}

// Atomics do not race with each other, whatever they order.
void RaceDetector::atomic(const SharedPlace& place, u32 bytes, CallSite site, const char* what, bool write) {
  State& s = *state_;
  s.visit(place, bytes, site, what, [&](Cell& cell, const Access& access) {
    if (!cell.write_atomic) s.check_write(cell, access);
    if (!write) return s.record_atomic_read(cell, access);
    if (!cell.read_atomic) s.check_reads(cell, access);
    s.record_write(cell, access.now(), site, true);
  });
}

void RaceDetector::write_async(const SharedPlace& place, u32 bytes, Epoch epoch, CallSite site, const char* what) {
  State& s = *state_;
  s.visit(place, bytes, site, what, [&](Cell& cell, const Access& access) {
    if (cell.write.actor != epoch.actor) s.check_write(cell, access);
    s.check_reads(cell, access);
    s.record_write(cell, epoch, site, false);
  });
}

void RaceDetector::read_async(const SharedPlace& place, u32 bytes, Epoch epoch, CallSite site, const char* what) {
  State& s = *state_;
  s.visit(place, bytes, site, what, [&](Cell& cell, const Access& access) {
    const bool raced = s.check_write(cell, access);
    if (epoch.time) s.record_read(cell, access, epoch);
    if (raced) return;
    const Epoch write = cell.write;
    if (write.time == 0 || write.actor >= s.threads || s.proxy_fenced[write.actor] >= write.time) return;
    char buffer[64];
    race_found(site, "%s shared 0x%x, written by %s without a fence.proxy.async after the write;", what,
               access.address, s.describe(write.actor, buffer, sizeof buffer));
  });
}

void RaceDetector::fence_proxy_async() {
  State& s = *state_;
  const u32 actor = s.actor(current_thread());
  join(s.proxy_fenced.data(), s.clock(actor), s.width);
}

// ---- atomics and fences ----

void RaceDetector::fence(bool acquire, bool release) {
  State& s = *state_;
  const u32 actor = s.actor(current_thread());
  if (acquire && !s.fence_acquire[actor].empty()) join(s.clock(actor), s.fence_acquire[actor].data(), s.width);
  if (!release) return;
  s.fence_release[actor].assign(s.clock(actor), s.clock(actor) + s.width);
  s.tick(actor);
}

void RaceDetector::atomic_load(const void* location, bool acquire) {
  State& s = *state_;
  const auto found = s.locations.find(location);
  if (found == s.locations.end()) return;
  const u32 actor = s.actor(current_thread());
  if (acquire) {
    join(s.clock(actor), found->second.data(), s.width);
  } else {
    s.ensure(s.fence_acquire[actor]);
    join(s.fence_acquire[actor].data(), found->second.data(), s.width);
  }
}

void RaceDetector::atomic_store(const void* location, bool release) {
  state_->locations.erase(location);
  atomic_update(location, false, release);
}

// A read-modify-write goes on with the release sequence of the location.
void RaceDetector::atomic_update(const void* location, bool acquire, bool release) {
  State& s = *state_;
  const u32 actor = s.actor(current_thread());
  atomic_load(location, acquire);
  const Clock& fenced = s.fence_release[actor];
  if (!release && fenced.empty()) return;
  Clock& carried = s.locations[location];
  s.ensure(carried);
  if (release) {
    join(carried.data(), s.clock(actor), s.width);
    s.tick(actor);
  } else {
    join(carried.data(), fenced.data(), s.width);
  }
}

RaceDetector* detector() {
  Group* group = running_group();
  return group && group->checks.races ? group->races.get() : nullptr;
}

}  // namespace cki::sim
