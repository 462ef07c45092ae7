// Moves registers between the warpgroups of a block (PTX setmaxnreg, sm_90a and later "a" targets).
//
// All warps of a warpgroup execute it. Kernels need `__launch_bounds__(threads, 1)`: without the second argument ptxas
// ignores setmaxnreg (warning C7508).
#pragma once

#include "ptx/target.cuh"

namespace cki::ptx {

// Releases registers down to `Registers` a thread: a multiple of 8 from 24 to 256.
template <int Registers, bool Available = kTargetHasSetmaxnreg>
__device__ __forceinline__ void setmaxnreg_dec() {
  static_assert(Available, "setmaxnreg needs sm_90a (or a later target with suffix a)");
  static_assert(Registers % 8 == 0 && Registers >= 24 && Registers <= 256, "a multiple of 8 from 24 to 256");
  asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" : : "n"(Registers));
}

// Waits until the block's pool holds enough registers, then raises the warpgroup to `Registers` a thread.
template <int Registers, bool Available = kTargetHasSetmaxnreg>
__device__ __forceinline__ void setmaxnreg_inc() {
  static_assert(Available, "setmaxnreg needs sm_90a (or a later target with suffix a)");
  static_assert(Registers % 8 == 0 && Registers >= 24 && Registers <= 256, "a multiple of 8 from 24 to 256");
  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" : : "n"(Registers));
}

}  // namespace cki::ptx
