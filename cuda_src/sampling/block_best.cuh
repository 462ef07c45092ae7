// The best of what the threads of a block hold: the largest value, among equal ones that of the lowest token. And sums of
// integers. Each returns the same to every thread, and begins and ends with a barrier or its like, so that calls may follow
// one another on the same scratch.
#pragma once

#include "common/reduce.cuh"

namespace cki {

constexpr int kWarps = kThreads / 32;

struct Scored {
  float value;
  int token;
};

struct BlockScratch {
  float values[kWarps];
  int tokens[kWarps];
};

constexpr int kNoToken = 0x7fffffff;

__device__ __forceinline__ Scored better_of(Scored a, Scored b) {
  return b.value > a.value || (b.value == a.value && b.token < a.token) ? b : a;
}

__device__ __forceinline__ Scored warp_best(Scored best) {
#pragma unroll
  for (int distance = 16; distance > 0; distance /= 2)
    best = better_of(best, {__shfl_xor_sync(kFullWarp, best.value, distance),
                            __shfl_xor_sync(kFullWarp, best.token, distance)});
  return best;
}

__device__ __forceinline__ Scored block_best(Scored best, BlockScratch& scratch) {
  best = warp_best(best);
  __syncthreads();  // the scratch's last readers are done
  if (threadIdx.x % 32 == 0) {
    scratch.values[threadIdx.x / 32] = best.value;
    scratch.tokens[threadIdx.x / 32] = best.token;
  }
  __syncthreads();
  const int lane = threadIdx.x % 32;
  best = lane < kWarps ? Scored{scratch.values[lane], scratch.tokens[lane]} : Scored{Max::identity(), kNoToken};
  return warp_best(best);
}

__device__ __forceinline__ float block_total(float value, BlockScratch& scratch) {
  value = warp_sum(value);
  __syncthreads();
  if (threadIdx.x % 32 == 0) scratch.values[threadIdx.x / 32] = value;
  __syncthreads();
  const int lane = threadIdx.x % 32;
  return warp_sum(lane < kWarps ? scratch.values[lane] : 0.0f);
}

__device__ __forceinline__ int block_total(int value, BlockScratch& scratch) {
  value = __reduce_add_sync(kFullWarp, value);
  __syncthreads();
  if (threadIdx.x % 32 == 0) scratch.tokens[threadIdx.x / 32] = value;
  __syncthreads();
  const int lane = threadIdx.x % 32;
  return __reduce_add_sync(kFullWarp, lane < kWarps ? scratch.tokens[lane] : 0);
}

}  // namespace cki
