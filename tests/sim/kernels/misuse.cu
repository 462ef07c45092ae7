// One misuse of an instruction a run, chosen by kFault; see test_fault_misuse.py. What the hardware would trap on, leave undefined
// or silently get wrong.
#include "common/wgmma_descriptor.cuh"
#include "ptx/bulk.cuh"
#include "ptx/cp_async.cuh"
#include "ptx/ldmatrix.cuh"
#include "ptx/mbarrier.cuh"
#include "ptx/memory.cuh"
#include "ptx/setmaxnreg.cuh"
#include "ptx/tma.cuh"
#include "ptx/wgmma.cuh"

using namespace cki;

// memory: 64x64 fp32, also behind `map` with boxes of 8x16; 128 threads.
extern "C" __global__ void __launch_bounds__(128, 1) misuse(const __grid_constant__ TensorMap map, float* memory) {
  __shared__ __align__(1024) u8 tile[2048];
  __shared__ u64 barrier[2];
  const int t = threadIdx.x;
  if (t == 0) ptx::mbarrier_init(barrier, 1);
  ptx::fence_mbarrier_init();
  __syncthreads();
  u32 r[4];
  float d[4] = {};
  const u64 descriptor = wgmma_descriptor_k_major<32>(tile);
  if (kFault >= 16) ptx::wgmma_fence();
  if (kFault == 1 && t == 0) memory[0] = __uint_as_float(ptx::load_global_nc_16(memory + 1).x);
  if (kFault == 2 && t == 0) ptx::cp_async<16>(tile + 8, memory);
  if (kFault == 3 && t == 0) ptx::cp_async<8>(tile, memory, 9);
  if (kFault == 4 && t < 32) ptx::ldmatrix_x4(r, tile + 16 * t + 4);
  if (kFault == 5 && t == 0) ptx::mbarrier_arrive(reinterpret_cast<u64*>(tile + 4));
  if (kFault == 6 && t == 0) ptx::mbarrier_try_wait_parity(barrier, 2);
  if (kFault == 7 && t == 0) ptx::tma_load_2d(tile, &map, barrier, 2, 0);
  if (kFault == 8 && t == 0) ptx::tma_store_2d(&map, tile, 0, -1);
  if (kFault == 9 && t == 0) ptx::tma_load_3d(tile, &map, barrier, 0, 0, 0);
  if (kFault == 10 && t == 0) ptx::bulk_load(tile, memory, 24, barrier);
  if (kFault == 11 && t == 0) ptx::tma_load_2d(tile + 64, &map, barrier, 0, 0);
  if (kFault == 12 && t == 0) {
    barrier[0] = 0;
    ptx::mbarrier_arrive(barrier);
  }
  if (kFault == 13 && t < 8) ptx::setmaxnreg_inc<64>();
  if (kFault == 14 && t == 0) ptx::mbarrier_init(barrier, 2);
  if (kFault == 19) ptx::setmaxnreg_dec<256>();
  if (kFault == 15 && t == 0) {
    ptx::bulk_store(memory, tile, 16);
    ptx::bulk_commit_group();
  }
  if (kFault == 16) ptx::wgmma<8, f16>(d, descriptor, descriptor + t / 32, true);
  if (kFault == 17) {
    ptx::wgmma<8, f16>(d, descriptor, wgmma_descriptor_k_major<32>(memory), true);
  }
  if (kFault == 18) {
    ptx::wgmma<8, f16>(d, descriptor, descriptor, true);
    ptx::wgmma_commit_group();
  }
}
