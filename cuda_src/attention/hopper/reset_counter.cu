// Sets the work counter of the dynamic schedule (scheduler.cuh) to zero, one launch before the attention kernel.
//
// The counter lies in a workspace that the caller's allocator hands out, so its content is unknown at the start, and two
// calls on two streams never share one. A counter that the last block leaves at zero would need memory that outlives the
// call. The launch costs about a microsecond, which the attention kernel hides by starting early (programmatic launch).
#include "common/types.cuh"
#include "ptx/grid_dependency.cuh"

using namespace cki;

extern "C" __global__ void __launch_bounds__(32, 1) reset_counter(u32* counter) {
  ptx::griddepcontrol_launch_dependents();
  if (threadIdx.x == 0) *counter = 0;
}
