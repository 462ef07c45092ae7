// Election of one lane of a converged warp (PTX elect.sync, sm_90).
#pragma once

#include "common/types.cuh"
#include "ptx/target.cuh"

namespace cki::ptx {

// True in exactly one lane of the warp, which one is the hardware's choice. Unlike `lane == 0` the compiler knows
// that the branch is taken by one thread, and issues TMA and commits without a loop over lanes.
template <int Sm = kTargetSm>
__device__ __forceinline__ bool elect_one() {
  static_assert(Sm >= 90, "elect.sync needs sm_90");
  u32 elected;
  asm volatile(
      "{\n"
      "  .reg .pred p;\n"
      "  elect.sync _|p, 0xffffffff;\n"
      "  selp.u32 %0, 1, 0, p;\n"
      "}"
      : "=r"(elected)
      :
      : "memory");
  return elected != 0;
}

}  // namespace cki::ptx
