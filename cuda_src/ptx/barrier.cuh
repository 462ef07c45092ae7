// Named barriers of a block (PTX bar.sync, bar.arrive). Barrier 0 is __syncthreads().
#pragma once

namespace cki::ptx {

// Waits until `threads` threads (a multiple of 32) have arrived at barrier `id` (0..15). Whole warps call it,
// converged.
__device__ __forceinline__ void bar_sync(int id, int threads) {
  asm volatile("bar.sync %0, %1;" : : "r"(id), "r"(threads) : "memory");
}

// Counts as arrived without waiting: the producer's side of a bar_sync with the same `id` and `threads`.
__device__ __forceinline__ void bar_arrive(int id, int threads) {
  asm volatile("bar.arrive %0, %1;" : : "r"(id), "r"(threads) : "memory");
}

}  // namespace cki::ptx
