// setmaxnreg: fibers have no register file, but a block's warps share a pool of registers out as on the GPU.
//
// A block begins with the same number for every thread, which an SM's 65536 bound. A decrease gives registers back to the
// block's pool; an increase waits until the pool has them. So a block whose warps ask for more in all than it began with
// waits for ever on the GPU. Here it runs to its end, which says so: in which order warps ask does not matter.
#include <algorithm>
#include <vector>

#include "engine.h"
#include "report.h"
#include "scheduler.h"
#include "warp.h"

using namespace cki::sim;

namespace {

constexpr u32 kRegistersOfSm = 65536;

// Of a thread at the launch, at most; given by eights, so that 255 take 256 of the pool.
u32 at_launch(const Block& block) { return std::min(255u, kRegistersOfSm / block.thread_count() / 8 * 8); }

struct RegisterPool : EngineState {
  struct Asked {
    u32 registers = 0;  // of a thread; 0: this warp never asked
    CallSite increase = nullptr;
  };
  std::vector<Asked> of_warp;

  void block_start(Block& block) override { of_warp.assign(block.warps.size(), {}); }

  void block_end(Block& block) override {
    const u32 begun = (at_launch(block) + 7) / 8 * 8, warps = static_cast<u32>(of_warp.size());
    u32 held = 0;
    CallSite increase = nullptr;
    for (const Asked& asked : of_warp) {
      held += asked.registers ? asked.registers : begun;
      if (asked.increase) increase = asked.increase;
    }
    if (increase && held > begun * warps) {
      fatal(increase,
            "setmaxnreg: the warps of the block hold %u registers a lane in all, and it began with %u at most (%u warps of "
            "%u): on a GPU an increase waits for ever",
            held, begun * warps, warps, begun);
    }
  }
};

Engine<RegisterPool> engine;

void check_equal(Thread& last, WarpOperation& operation) {
  for (u32 lane = 0; lane < kWarpSize; ++lane) {
    if (operation.mask >> lane & 1 && operation.argument[lane] != operation.argument[last.lane()]) {
      fatal(operation.site, "setmaxnreg: the lanes of a warp name different counts, %u and %u",
            operation.argument[lane], operation.argument[last.lane()]);
    }
  }
}

}  // namespace

extern "C" void cki_sim_setmaxnreg(int registers, bool is_decrease) {
  const CallSite site = CKI_SIM_CALL_SITE;
  Thread& thread = current_thread();
  Block& block = *thread.block;
  // The hardware traps on a decrease to more.
  if (is_decrease && static_cast<u32>(registers) > at_launch(block)) {
    fatal(site, "setmaxnreg.dec to %d registers, where a thread of a block of %u begins with %u at most", registers,
          block.thread_count(), at_launch(block));
  }
  RegisterPool::Asked& asked = engine.of(block).of_warp[thread.index() / kWarpSize];
  asked.registers = static_cast<u32>(registers);
  asked.increase = is_decrease ? nullptr : site;
  warp_rendezvous(site, kSetmaxnreg, "setmaxnreg", kFullWarp, 0, static_cast<u32>(registers), nullptr, check_equal);
}
