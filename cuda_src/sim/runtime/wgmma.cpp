// wgmma: asynchronous products of a warpgroup.
//
// The products are no rendezvous: a thread deposits its part of the warpgroup's n-th product (the place of its
// accumulators, its A registers) and goes on, and a product can run once all 128 threads have deposited. Its
// accumulators live as a 64xN tile from the first product on them until a wait returns them to each thread. Plain
// mode runs a product with the last deposit; adversarial mode runs it when somebody waits for it, and until then the
// threads' registers hold a signalling NaN: any arithmetic changes its bits, so that registers touched in flight are
// noticed.
#include <algorithm>
#include <bitset>
#include <cstring>
#include <deque>
#include <vector>

#include "engine.h"
#include "race.h"
#include "scheduler.h"
#include "wgmma.h"

using namespace cki::sim;

namespace {

struct Shape {
  u64 a, b;   // descriptors
  u32 columns;
  WgmmaType type;
  bool a_in_registers, a_mn_major, b_mn_major, accumulate;
  u32 group;   // number of commits before it
  CallSite site;

  bool operator==(const Shape& o) const {
    return a == o.a && b == o.b && columns == o.columns && type == o.type && a_in_registers == o.a_in_registers &&
           a_mn_major == o.a_mn_major && b_mn_major == o.b_mn_major && accumulate == o.accumulate && group == o.group &&
           site == o.site;
  }
};

struct Product {
  Shape shape;
  Accumulators* accumulators = nullptr;
  u32 deposits = 0, deposits_of_warp[kWarpgroupWarps] = {};
  u32 returns = 0;
  std::bitset<kWarpgroupThreads> returned;   // threads whose wait has covered it
  bool done = false;
  bool reads_marked = false;   // in the map of operations in flight
  Epoch epoch;   // of its reads, for race detection
  bool b_remembered = false;
  u32 a_registers[kWarpgroupThreads][4];
};

// One thread's position in its own sequence of wgmma instructions.
struct Issuer {
  u32 issued = 0;   // products
  u32 committed = 0;   // groups
  bool fenced = false;   // no accumulators have come back to the thread since its last wgmma.fence
};

struct Warpgroup {
  std::deque<Product*> queue;   // not yet returned to all threads, oldest first
  u32 first = 0;   // number of the oldest
  std::vector<Thread*> waiting;   // for other threads' deposits
  Issuer threads[kWarpgroupThreads];
};

struct WgmmaState : EngineState {
  std::vector<Warpgroup> warpgroups;
  Pool<Product> products;
  Pool<Accumulators> accumulators;
  std::vector<float> a = std::vector<float>(kProductRows * kMaxWgmmaK),
                     b = std::vector<float>(kMaxProductColumns * kMaxWgmmaK);   // fp32

  void block_start(Block& block) override {
    warpgroups.clear();
    warpgroups.resize(block.thread_count() / kWarpgroupThreads);
    products.give_all();
    accumulators.give_all();
  }

  void thread_exit(Block&, Thread& thread) override {
    if (thread.index() / kWarpgroupThreads >= warpgroups.size()) return;
    for (const Product* product : warpgroups[thread.index() / kWarpgroupThreads].queue) {
      const u32 position = thread.index() % kWarpgroupThreads;
      if (product->accumulators->registers[position] && !product->returned[position]) {
        return hazard(product->shape.site, "the thread exits with this wgmma in flight: no wgmma_wait_group covers it");
      }
    }
  }
};

Engine<WgmmaState> engine;

Warpgroup& warpgroup_of(Thread& thread, CallSite site) {
  WgmmaState& state = engine.of(*thread.block);
  const u32 index = thread.index() / kWarpgroupThreads;
  if (index >= state.warpgroups.size()) {
    fatal(site, "wgmma by thread %u: the block's %u threads make only %zu whole warpgroups of 128", thread.index(),
          thread.block->thread_count(), state.warpgroups.size());
  }
  return state.warpgroups[index];
}

void check_untouched(const Accumulators& accumulators, u32 position, CallSite site) {
  if (!is_poison(accumulators.registers[position], accumulators.columns / 2)) {
    hazard(site, "accumulator registers were written while a wgmma on them is in flight");
  }
}

u32 offset_of(u32 address) { return (address & 0x3ffff) - kSharedBase; }

// Visits the chunks of both operands that rows first_row.. of D need, as visit(offset, whether it is of B).
template <class Visit>
void for_each_operand_chunk(const Shape& shape, u32 first_row, u32 rows, Visit visit) {
  if (!shape.a_in_registers) {
    for_each_chunk(MatrixDescriptor::decode(shape.a), shape.a_mn_major, first_row, rows,
                   [&](u32 address, u32, u32) { visit(offset_of(address), false); });
  }
  for_each_chunk(MatrixDescriptor::decode(shape.b), shape.b_mn_major, 0, shape.columns,
                 [&](u32 address, u32, u32) { visit(offset_of(address), true); });
}

// A warp's part of a product may start to read as soon as that warp has issued it. All four warps read B: each is
// checked, the first is remembered.
void check_operands(Block& block, Product& product, u32 warp) {
  const Shape& shape = product.shape;
  RaceDetector* races = detector();
  for_each_operand_chunk(shape, warp * 16, 16, [&](u32 offset, bool of_b) {
    if (!block.window.valid(offset, kChunkBytes)) return;   // reported when it is read
    if (block.in_flight.find_write(offset, kChunkBytes) >= 0) {
      hazard(shape.site, "wgmma issued while its operand at shared 0x%x is the target of a copy in flight",
             offset + kSharedBase);
    }
    if (!races) return;
    const Epoch epoch = of_b && product.b_remembered ? Epoch{} : product.epoch;
    races->read_async({&block, offset, block.window.base + offset}, kChunkBytes, epoch, shape.site, "wgmma reads");
  });
  product.b_remembered = true;
}

void mark_reads(Block& block, Product& product, bool begin) {
  product.reads_marked = begin;
  for_each_operand_chunk(product.shape, 0, kProductRows, [&](u32 offset, bool) {
    if (!block.window.valid(offset, kChunkBytes)) return;
    begin ? block.in_flight.add_read(offset, kChunkBytes) : block.in_flight.remove_read(offset, kChunkBytes);
  });
}

void run(Block& block, Product& product) {
  WgmmaState& state = engine.of(block);
  float *a = state.a.data(), *b = state.b.data(), *tile = product.accumulators->tile;
  const Shape& shape = product.shape;
  if (shape.a_in_registers) {
    read_register_a(product.a_registers, shape.type, a);
  } else {
    read_operand_a(block, MatrixDescriptor::decode(shape.a), shape.type, shape.a_mn_major, kProductRows, a, shape.site);
  }
  read_operand_b(block, MatrixDescriptor::decode(shape.b), shape.type, shape.b_mn_major, shape.columns, b, shape.site);
  if (!shape.accumulate) std::fill_n(tile, kProductRows * shape.columns, 0.0f);
  multiply_accumulate(a, b, tile, shape.columns, wgmma_k(shape.type));
  if (product.reads_marked) mark_reads(block, product, false);
  product.done = true;
}

// The product that follows the queue, as this thread sees it: on accumulators in flight already, or on new ones.
Product& append(WgmmaState& state, Warpgroup& group, const Shape& shape, u32 position, float* registers) {
  Product* product = state.products.take();
  product->shape = shape;
  product->accumulators = nullptr;
  product->deposits = product->returns = 0;
  std::fill_n(product->deposits_of_warp, kWarpgroupWarps, 0);
  product->returned.reset();
  product->done = product->reads_marked = false;
  for (auto earlier = group.queue.rbegin(); earlier != group.queue.rend(); ++earlier) {
    if (!(*earlier)->returned[position] && (*earlier)->accumulators->registers[position] == registers) {
      product->accumulators = (*earlier)->accumulators;
      break;
    }
  }
  if (!product->accumulators) {
    product->accumulators = state.accumulators.take();
    product->accumulators->references = 0;
    product->accumulators->columns = shape.columns;
    std::fill_n(product->accumulators->registers, kWarpgroupThreads, nullptr);
  }
  ++product->accumulators->references;
  product->epoch = {};
  product->b_remembered = false;
  if (RaceDetector* races = detector()) {
    product->epoch = races->begin_async(u64{4} << 40 | u64{current_block().rank} << 16 |
                                        current_thread().index() / kWarpgroupThreads);
  }
  group.queue.push_back(product);
  return *product;
}

void check_descriptors(u64 a, u64 b, CallSite site) {
  for (u64 bits : {a, b}) {
    const u32 base_offset = MatrixDescriptor::decode(bits).base_offset;
    if (base_offset)
      fatal(site, "wgmma descriptor with base offset %u: only tiles aligned to their swizzle are modelled",
            base_offset);
  }
}

void check_agreement(const Product& product, const Shape& shape) {
  if (product.shape == shape) return;
  fatal(shape.site,
        "wgmma: the threads of a warpgroup disagree on a product (descriptors, N, type, accumulate, group or line)");
}

void deposit_accumulators(Product& product, Issuer& me, u32 position, float* registers, bool adversarial) {
  Accumulators& accumulators = *product.accumulators;
  const Shape& shape = product.shape;
  if (accumulators.registers[position]) {
    if (accumulators.registers[position] != registers || accumulators.columns != shape.columns) {
      fatal(shape.site,
            "wgmma: a product on accumulators of which others are in flight with another N or other registers");
    }
    if (adversarial) check_untouched(accumulators, position, shape.site);
    return;
  }
  if (!me.fenced) {
    hazard(shape.site,
           "wgmma without wgmma_fence after its accumulator registers were last accessible to ordinary code");
  }
  accumulators.registers[position] = registers;
  if (shape.accumulate) move_fragment<Direction::ToTile>(accumulators, position, registers);
  if (adversarial) poison(registers, shape.columns / 2);
}

void issue(float* d, u32 columns, WgmmaType type, u64 a, const u32* a_registers, u64 b, bool a_mn_major,
           bool b_mn_major, bool accumulate, CallSite site) {
  jitter();
  Thread& thread = current_thread();
  Block& block = *thread.block;
  const Checks& checks = block.group->checks;
  WgmmaState& state = engine.of(block);
  Warpgroup& group = warpgroup_of(thread, site);
  const u32 position = thread.index() % kWarpgroupThreads;
  Issuer& me = group.threads[position];
  check_descriptors(a_registers ? 0 : a, b, site);
  const Shape shape{a,          b,          columns,    type,         a_registers != nullptr,
                    a_mn_major, b_mn_major, accumulate, me.committed, site};
  const u32 index = me.issued++ - group.first;
  Product& product = index == group.queue.size() ? append(state, group, shape, position, d) : *group.queue[index];
  check_agreement(product, shape);
  if (a_registers) {
    if (!me.fenced)
      hazard(site, "wgmma without wgmma_fence after its A registers were last accessible to ordinary code");
    std::memcpy(product.a_registers[position], a_registers, sizeof product.a_registers[position]);
  }
  deposit_accumulators(product, me, position, d, checks.adversarial);
  const u32 warp = position / kWarpSize;
  if (++product.deposits_of_warp[warp] == kWarpSize && (checks.adversarial || checks.races))
    check_operands(block, product, warp);
  if (++product.deposits < kWarpgroupThreads) return;
  for (Thread* waiter : group.waiting) wake(*waiter);
  group.waiting.clear();
  if (checks.adversarial) {
    mark_reads(block, product, true);
  } else {
    run(block, product);
  }
}

// Whether all products of groups before `end` can be complete; runs those that have not run yet.
bool complete_groups_before(Block& block, Warpgroup& group, u32 end) {
  for (Product* product : group.queue) {
    if (product->shape.group >= end) break;
    if (product->deposits < kWarpgroupThreads) return false;
    if (!product->done) run(block, *product);
  }
  return true;
}

// Gives this thread its accumulators of all groups before `end`, except those that a later product of its own still
// uses.
void return_accumulators(Warpgroup& group, Issuer& me, u32 position, u32 end, bool adversarial, CallSite site) {
  const u32 issued = me.issued - group.first;   // products of the queue to which this thread has contributed
  for (u32 i = 0; i < issued && group.queue[i]->shape.group < end; ++i) {
    Product& product = *group.queue[i];
    if (product.returned[position]) continue;
    product.returned.set(position);
    ++product.returns;
    if (RaceDetector* races = detector()) races->acquire(current_thread(), product.epoch);
    Accumulators& accumulators = *product.accumulators;
    const bool used_later = std::any_of(group.queue.begin() + i + 1, group.queue.begin() + issued,
                                        [&](const Product* later) { return later->accumulators == &accumulators; });
    if (used_later) continue;
    if (adversarial) check_untouched(accumulators, position, site);
    move_fragment<Direction::ToRegisters>(accumulators, position, accumulators.registers[position]);
    me.fenced = false;
  }
}

void retire(WgmmaState& state, Warpgroup& group) {
  while (!group.queue.empty() && group.queue.front()->returns == kWarpgroupThreads) {
    Product* product = group.queue.front();
    group.queue.pop_front();
    ++group.first;
    if (--product->accumulators->references == 0) state.accumulators.give(product->accumulators);
    state.products.give(product);
  }
}

}  // namespace

extern "C" void cki_sim_wgmma(float* d, int columns, int type, std::uint64_t a, std::uint64_t b, int a_mn_major,
                              int b_mn_major, int accumulate) {
  issue(d, static_cast<u32>(columns), static_cast<WgmmaType>(type), a, nullptr, b, a_mn_major, b_mn_major, accumulate,
        CKI_SIM_CALL_SITE);
}

extern "C" void cki_sim_wgmma_registers(float* d, int columns, int type, const unsigned* a, std::uint64_t b,
                                        int b_mn_major, int accumulate) {
  issue(d, static_cast<u32>(columns), static_cast<WgmmaType>(type), 0, a, b, false, b_mn_major, accumulate,
        CKI_SIM_CALL_SITE);
}

extern "C" void cki_sim_wgmma_fence() {
  CallSite site = CKI_SIM_CALL_SITE;
  Thread& thread = current_thread();
  warpgroup_of(thread, site).threads[thread.index() % kWarpgroupThreads].fenced = true;
}

extern "C" void cki_sim_wgmma_commit_group() {
  CallSite site = CKI_SIM_CALL_SITE;
  Thread& thread = current_thread();
  ++warpgroup_of(thread, site).threads[thread.index() % kWarpgroupThreads].committed;
}

extern "C" void cki_sim_wgmma_wait_group(int newest_allowed) {
  CallSite site = CKI_SIM_CALL_SITE;
  jitter();
  Thread& thread = current_thread();
  Block& block = *thread.block;
  Warpgroup& group = warpgroup_of(thread, site);
  const u32 position = thread.index() % kWarpgroupThreads;
  Issuer& me = group.threads[position];
  if (me.committed <= static_cast<u32>(newest_allowed)) return;
  const u32 end = me.committed - static_cast<u32>(newest_allowed);
  while (!complete_groups_before(block, group, end)) {
    group.waiting.push_back(&thread);
    wait({"wgmma_wait_group, for other threads of the warpgroup to issue their part,", site, 0, 0, nullptr});
  }
  return_accumulators(group, me, position, end, block.group->checks.adversarial, site);
  retire(engine.of(block), group);
}
