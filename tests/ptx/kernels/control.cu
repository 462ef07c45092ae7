// Instructions that steer a block: named barriers, elect, setmaxnreg, programmatic launch, fences.
#include "common/types.cuh"
#include "ptx/address.cuh"
#include "ptx/barrier.cuh"
#include "ptx/elect.cuh"
#include "ptx/fence.cuh"
#include "ptx/grid_dependency.cuh"
#include "ptx/setmaxnreg.cuh"

using namespace cki;

// out: [0..8) warps' elected counts, [8] what the consumer read, [9] difference of two shared addresses.
extern "C" __global__ void __launch_bounds__(256, 1) control(u32* out) {
  __shared__ u32 box[32];
  __shared__ u32 value;
  const int warp = threadIdx.x / 32;
  ptx::griddepcontrol_wait();
  const u32 elected = __popc(__ballot_sync(0xffffffffu, ptx::elect_one()));
  if (threadIdx.x % 32 == 0) out[warp] = elected;
  if (threadIdx.x < 128) {
    ptx::setmaxnreg_dec<40>();
    if (threadIdx.x == 7) value = 42;
    ptx::bar_arrive(1, 256);
  } else {
    ptx::setmaxnreg_inc<152>();
    ptx::bar_sync(1, 256);
    if (threadIdx.x == 200) out[8] = value;
  }
  ptx::fence_proxy_async_shared();
  ptx::fence_proxy_async_global();
  ptx::fence_proxy_async();
  ptx::fence_acq_rel_cluster();
  if (threadIdx.x == 0) out[9] = ptx::shared_address(box + 5) - ptx::shared_address(box);
  ptx::griddepcontrol_launch_dependents();
}
