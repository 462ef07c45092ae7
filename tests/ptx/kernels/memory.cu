// ptx/memory.cuh: every width of load and store, and flags between two blocks.
#include "common/types.cuh"
#include "ptx/fence.cuh"
#include "ptx/memory.cuh"

using namespace cki;

// Copies: in and out hold kForms sections of 64 words, each moved with its own instruction by 16 threads.
// flags: [0] turn, [1] sum, [2] and [3] what the blocks saw; payload: written plainly by one block, read by the other.
extern "C" __global__ void __launch_bounds__(16) accesses(const u32* in, u32* out, u32* flags, u32* payload) {
  const int t = threadIdx.x;
  if (blockIdx.x == 0) {
    ptx::prefetch_global_l2(in);
    ptx::store_global_16(out + 4 * t, ptx::load_global_nc_16(in + 4 * t));
    ptx::store_global_streaming_16(out + 64 + 4 * t, ptx::load_global_nc_no_allocate_16(in + 64 + 4 * t));
    ptx::store_global_no_allocate_16(out + 128 + 4 * t, ptx::load_global_16(in + 128 + 4 * t));
    ptx::store_global_8(out + 192 + 2 * t, ptx::load_global_nc_8(in + 192 + 2 * t));
    ptx::store_global_8(out + 224 + 2 * t, ptx::load_global_nc_no_allocate_8(in + 224 + 2 * t));
    ptx::store_global_8(out + 256 + 2 * t, ptx::load_global_8(in + 256 + 2 * t));
    ptx::store_global_4(out + 288 + t, ptx::load_global_nc_4(in + 288 + t));
    ptx::store_global_4(out + 304 + t, ptx::load_global_nc_no_allocate_4(in + 304 + t));
    ptx::store_global_4(out + 320 + t, ptx::load_global_4(in + 320 + t));
    const u16* in_2 = reinterpret_cast<const u16*>(in + 336);
    u16* out_2 = reinterpret_cast<u16*>(out + 336);
    ptx::store_global_2(out_2 + t, ptx::load_global_nc_2(in_2 + t));
    ptx::store_global_2(out_2 + 16 + t, ptx::load_global_nc_2(in_2 + 16 + t));
  }
  // Ping-pong: block 0 publishes the payload and passes the turn, block 1 answers.
  if (t == 0) {
    if (blockIdx.x == 0) {
      payload[0] = 0x1234;
      ptx::store_release_gpu(flags, 1);
      while (ptx::load_acquire_gpu(flags) != 2) {
      }
      flags[2] = payload[1];
    } else {
      while (ptx::load_relaxed_gpu(flags) != 1) {
      }
      ptx::fence_acq_rel_gpu();
      flags[3] = payload[0];
      payload[1] = 0x5678;
      ptx::fence_acq_rel_system();
      ptx::store_relaxed_gpu(flags, 2);
    }
  }
  ptx::red_add_relaxed_gpu(flags + 1, 1);
  ptx::red_add_release_gpu(flags + 1, 2);
  flags[4 + blockIdx.x * 16 + t] = ptx::atom_add_acq_rel_gpu(flags + 36, 1);
}
