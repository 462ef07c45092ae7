// Every function of ptx/math.cuh, one thread an input.
#include "common/types.cuh"
#include "ptx/math.cuh"

using namespace cki;

extern "C" __global__ void __launch_bounds__(256)
    approximate(const float* x, int n, float* ex2, float* lg2, float* rcp, float* rsqrt, float* tanh) {
  const int i = blockIdx.x * blockDim.x + threadIdx.x;
  if (i >= n) return;
  ex2[i] = ptx::ex2_approx(x[i]);
  lg2[i] = ptx::lg2_approx(x[i]);
  rcp[i] = ptx::rcp_approx(x[i]);
  rsqrt[i] = ptx::rsqrt_approx(x[i]);
  tanh[i] = ptx::tanh_approx(x[i]);
}

extern "C" __global__ void __launch_bounds__(256) larger(const float* a, const float* b, int n, float* y) {
  const int i = blockIdx.x * blockDim.x + threadIdx.x;
  if (i < n) y[i] = ptx::max_nan(a[i], b[i]);
}
