// Simulated ptx/grid_dependency.cuh: launches of the simulated device run one after the other, so every earlier grid
// is complete.
#pragma once

namespace cki::ptx {

__device__ __forceinline__ void griddepcontrol_wait() {}
__device__ __forceinline__ void griddepcontrol_launch_dependents() {}

}  // namespace cki::ptx
