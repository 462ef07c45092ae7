// What every architecture from sm_80 on compiles: used by the compile test, not launched.
#include "common/types.cuh"
#include "ptx/address.cuh"
#include "ptx/barrier.cuh"
#include "ptx/convert.cuh"
#include "ptx/cp_async.cuh"
#include "ptx/fence.cuh"
#include "ptx/ldmatrix.cuh"
#include "ptx/math.cuh"
#include "ptx/mbarrier.cuh"
#include "ptx/memory.cuh"
#include "ptx/mma.cuh"
#include "ptx/movmatrix.cuh"

using namespace cki;

extern "C" __global__ void __launch_bounds__(32) ampere(const u32* in, u32* out, float* floats) {
  __shared__ __align__(16) u32 tile[256];
  __shared__ u64 barrier;
  const int t = threadIdx.x;
  if (t == 0) ptx::mbarrier_init(&barrier, 32);
  ptx::bar_arrive(1, 64);
  ptx::bar_sync(2, 32);
  ptx::cp_async<16>(tile + 4 * t, in + 4 * t);
  ptx::cp_async<8>(tile + 128 + 2 * t, in + 2 * t, 4);
  ptx::cp_async<4>(tile + 192 + t, in + t, 0);
  ptx::cp_async_commit_group();
  ptx::cp_async_wait_group<1>();
  ptx::cp_async_wait_all();
  ptx::cp_async_mbarrier_arrive_noinc(&barrier);
  ptx::mbarrier_arrive(&barrier);
  ptx::mbarrier_wait_parity(&barrier, 0);
  ptx::mbarrier_invalidate(&barrier);
  u32 a[4], b[2], one[1];
  ptx::ldmatrix_x4(a, tile + 4 * t);
  ptx::ldmatrix_x2_trans(b, tile + 4 * t);
  ptx::ldmatrix_x1(one, tile + 4 * t);
  float d[4] = {};
  ptx::mma_m16n8k16_f16(d, a, b, d);
  ptx::mma_m16n8k16_bf16(d, a, b, d);
  ptx::mma_m16n8k8_tf32(d, a, b, d);
  floats[t] = d[0] + d[1] + d[2] + d[3] + ptx::ex2_approx(floats[t]) + ptx::tanh_approx(floats[t + 32]);
  out[t] = ptx::movmatrix_trans(one[0]) + ptx::f32x2_to_bf16x2(d[0], d[1]) + ptx::f32x2_to_f16x2(d[2], d[3]) +
           ptx::f32_to_tf32(d[0]) + ptx::shared_address(tile) + ptx::load_global_nc_4(in) + ptx::load_acquire_gpu(in);
  ptx::fence_acq_rel_gpu();
  ptx::store_release_gpu(out + 32, 1);
}
