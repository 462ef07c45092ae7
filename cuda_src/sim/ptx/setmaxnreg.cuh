// Simulated ptx/setmaxnreg.cuh: fibers have no register file. What is left is that whole warps execute it, converged, that
// none gives up more registers than it can have, and that a block's warps do not ask for more than it began with.
#pragma once

extern "C" void cki_sim_setmaxnreg(int registers, bool is_decrease);

namespace cki::ptx {

template <int Registers>
__device__ __forceinline__ void setmaxnreg_dec() {
  static_assert(Registers % 8 == 0 && Registers >= 24 && Registers <= 256, "a multiple of 8 from 24 to 256");
  cki_sim_setmaxnreg(Registers, true);
}

template <int Registers>
__device__ __forceinline__ void setmaxnreg_inc() {
  static_assert(Registers % 8 == 0 && Registers >= 24 && Registers <= 256, "a multiple of 8 from 24 to 256");
  cki_sim_setmaxnreg(Registers, false);
}

}  // namespace cki::ptx
