// ptx/cp_async.cuh: every size with full and partial sources, hints, groups in order, and the arrival on an mbarrier.
#include "common/types.cuh"
#include "ptx/cp_async.cuh"
#include "ptx/mbarrier.cuh"

using namespace cki;

// in: 4 sections of 32 x 16 bytes. out: the same. bytes_of_thread: how many bytes of each thread's copy come from `in`.
extern "C" __global__ void __launch_bounds__(32) copies(const u8* in, const int* bytes_of_thread, u8* out) {
  __shared__ __align__(16) u8 tile[2048];
  __shared__ u64 barrier;
  const int t = threadIdx.x, bytes = bytes_of_thread[t];
  if (t == 0) ptx::mbarrier_init(&barrier, 32);
  for (int i = t; i < 2048; i += 32) tile[i] = 0xee;
  __syncthreads();

  ptx::cp_async<16>(tile + 16 * t, in + 16 * t, bytes);
  ptx::cp_async_commit_group();
  ptx::cp_async<8>(tile + 512 + 16 * t, in + 512 + 16 * t, min(bytes, 8));
  ptx::cp_async<4>(tile + 512 + 16 * t + 8, in + 512 + 16 * t + 8, min(bytes, 4));
  ptx::cp_async_commit_group();
  ptx::cp_async_wait_group<1>();   // the first group has landed
  *reinterpret_cast<uint4*>(out + 16 * t) = *reinterpret_cast<const uint4*>(tile + 16 * t);
  ptx::cp_async_wait_group<0>();
  *reinterpret_cast<uint4*>(out + 512 + 16 * t) = *reinterpret_cast<const uint4*>(tile + 512 + 16 * t);

  ptx::cp_async<16, 128>(tile + 1024 + 16 * t, in + 1024 + 16 * t);
  ptx::cp_async_wait_all();
  *reinterpret_cast<uint4*>(out + 1024 + 16 * t) = *reinterpret_cast<const uint4*>(tile + 1024 + 16 * t);

  ptx::cp_async<16, 256>(tile + 1536 + 16 * t, in + 1536 + 16 * t);
  ptx::cp_async_mbarrier_arrive_noinc(&barrier);
  ptx::mbarrier_wait_parity(&barrier, 0);
  const int other = (t + 5) % 32;   // a neighbour's copy: the barrier publishes it
  *reinterpret_cast<uint4*>(out + 1536 + 16 * other) = *reinterpret_cast<const uint4*>(tile + 1536 + 16 * other);
}
