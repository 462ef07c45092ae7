// A producer and two consumer warpgroups with the registers that kProducer and kConsumer say.
#include "ptx/setmaxnreg.cuh"

using namespace cki;

extern "C" __global__ void __launch_bounds__(384, 1) register_pool(int* seen) {
  if (threadIdx.x < 128) {
    ptx::setmaxnreg_dec<kProducer>();
  } else {
    ptx::setmaxnreg_inc<kConsumer>();
  }
  if (threadIdx.x == 383) *seen = 1;
}
