// Every function of ptx/half2.cuh, one thread a pair.
#include "common/types.cuh"
#include "ptx/half2.cuh"

using namespace cki;

extern "C" __global__ void __launch_bounds__(256)
    pairs(const u32* a, const u32* b, const u32* c, int n, u32* fma, u32* fnma, u32* saturate, u32* max, u32* ex2) {
  const int i = blockIdx.x * blockDim.x + threadIdx.x;
  if (i >= n) return;
  fma[i] = ptx::fma_f16x2(a[i], b[i], c[i]);
  fnma[i] = ptx::fnma_f16x2(a[i], b[i], c[i]);
  saturate[i] = ptx::mul_abs_saturate_f16x2(a[i], b[i]);
  max[i] = ptx::max_nan_f16x2(a[i], b[i]);
  ex2[i] = ptx::ex2_approx_f16x2(a[i]);
}
