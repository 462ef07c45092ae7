// What the copy engines need of mbarriers: the completion of asynchronous work on one.
#pragma once
#include "block.h"
#include "race.h"

namespace cki::sim {

// The barrier at `pointer` (of this block, or of a peer): fatal unless it is aligned, initialised and intact.
SharedPlace mbarrier_place(const void* pointer, CallSite site);

// A copy that will complete on the barrier has been issued. Every such call is followed by one complete_tx.
void mbarrier_note_copy(const SharedPlace& barrier, CallSite site);

// `bytes` of that copy have landed; `epoch` is the copy's for race detection. Runs with or without a current thread.
void mbarrier_complete_tx(const SharedPlace& barrier, u32 bytes, Epoch epoch, CallSite site);

// One arrival by asynchronous work, publishing what is complete up to `epoch` (time 0: nothing).
void mbarrier_arrive_async(const SharedPlace& barrier, Epoch epoch, CallSite site);

}  // namespace cki::sim
