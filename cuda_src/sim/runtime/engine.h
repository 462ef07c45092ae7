// How an engine (the model of one family of instructions: cp.async, mbarrier, TMA, wgmma, ...) plugs into the runtime.
//
// 1. Put its state of one block in a class derived from EngineState, and define one static Engine<State> in its .cpp:
//
//      struct CpAsyncState : EngineState {
//        std::vector<Groups> of_thread;
//        void block_start(Block& block) override { of_thread.assign(block.thread_count(), {}); }
//        void thread_exit(Block& block, Thread& thread) override { ...hazard(...) when groups are left... }
//      };
//      static Engine<CpAsyncState> engine;
//
//    `engine.of(block)` gives the state. It is made on first use, kept for later blocks (so reuse memory in block_start),
//    and block_start runs when a block first asks for it. Engines that a kernel never uses cost nothing.
//
// 2. Write extern "C" functions named cki_sim_<instruction>, declared again in cuda_src/sim/ptx/<file>.cuh. Each starts with
//
//      CallSite site = CKI_SIM_CALL_SITE;       // here, and only here: the address must be the kernel's
//      Thread& thread = current_thread();
//      Block& block = *thread.block;
//      jitter();                                // adversarial mode: other threads may run first
//
// 3. Use: shared_window.h for addresses; scheduler.h to wait and wake; pending.h for what completes late and copies in flight;
//    warp.h for warp-wide rendezvous; race.h for the order of memory; report.h for findings.
//
// Only one thread of a group of co-resident blocks runs at a time and threads change only inside wait, yield, jitter,
// yield_poll and the warp rendezvous, so state of blocks needs no lock, peers' state in a cluster included.
#pragma once
#include <memory>

#include "block.h"

namespace cki::sim {

template <class State>
class Engine {
 public:
  Engine() : slot_(allocate_engine_slot()) {}

  State& of(Block& block) const {
    Block::EngineSlot& slot = block.engines[slot_];
    if (!slot.state) slot.state = std::make_unique<State>();
    State& state = static_cast<State&>(*slot.state);
    if (slot.serial != block.serial) {
      slot.serial = block.serial;
      state.block_start(block);
    }
    return state;
  }

  // The state when this block has used the engine, else null.
  State* if_used(Block& block) const {
    Block::EngineSlot& slot = block.engines[slot_];
    return slot.state && slot.serial == block.serial ? static_cast<State*>(slot.state.get()) : nullptr;
  }

 private:
  int slot_;
};

}  // namespace cki::sim
