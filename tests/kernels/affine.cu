// y[i] = factor * x[i] + offset, for the tests of the way of a call.
#include "common/types.cuh"

extern "C" __global__ void __launch_bounds__(kThreads)
affine(const float* __restrict__ x, float* __restrict__ y, float factor, float offset, cki::i64 n) {
  const cki::i64 i = cki::i64{blockIdx.x} * kThreads + threadIdx.x;
  if (i < n) y[i] = factor * x[i] + offset;
}
