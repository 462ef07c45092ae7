// Programmatic dependent launch (PTX griddepcontrol, sm_90). The attribute is that of the later of two launches: without
// it, that one's wait and the earlier one's launch_dependents do nothing.
#pragma once

#include "ptx/target.cuh"

namespace cki::ptx {

// Waits until the grids that this one depends on have completed and their writes are visible.
template <int Sm = kTargetSm>
__device__ __forceinline__ void griddepcontrol_wait() {
  static_assert(Sm >= 90, "griddepcontrol needs sm_90");
  asm volatile("griddepcontrol.wait;" : : : "memory");
}

// Lets the dependent grid start once every block of this one has called it or has exited. It publishes no writes: the
// dependent's griddepcontrol_wait() does.
template <int Sm = kTargetSm>
__device__ __forceinline__ void griddepcontrol_launch_dependents() {
  static_assert(Sm >= 90, "griddepcontrol needs sm_90");
  asm volatile("griddepcontrol.launch_dependents;" : : : "memory");
}

}  // namespace cki::ptx
