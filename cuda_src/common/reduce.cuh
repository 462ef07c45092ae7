// Sums and maxima over the lanes of a warp and over the warps of a block. Every participant gets the same result, bit for
// bit: the butterfly adds in a fixed order, and all threads add the warps' parts in the same order.
#pragma once

#include "common/types.cuh"

namespace cki {

constexpr u32 kFullWarp = 0xffffffffu;

struct Sum {
  static __device__ __forceinline__ float identity() { return 0.0f; }
  static __device__ __forceinline__ float combine(float a, float b) { return a + b; }
};

// A NaN is dropped when the other side is a number, as fmaxf does.
struct Max {
  static __device__ __forceinline__ float identity() { return __uint_as_float(0xff800000u); }  // -infinity
  static __device__ __forceinline__ float combine(float a, float b) { return fmaxf(a, b); }
};

// Over aligned groups of `Lanes` lanes (1, 2, 4, ... 32). All 32 lanes of the warp must call it.
template <typename Operation, int Lanes = 32>
__device__ __forceinline__ float warp_reduce(float value) {
  static_assert(Lanes >= 1 && Lanes <= 32 && (Lanes & (Lanes - 1)) == 0, "a power of two up to 32");
#pragma unroll
  for (int distance = Lanes / 2; distance > 0; distance /= 2)
    value = Operation::combine(value, __shfl_xor_sync(kFullWarp, value, distance));
  return value;
}

template <int Lanes = 32>
__device__ __forceinline__ float warp_sum(float value) {
  return warp_reduce<Sum, Lanes>(value);
}

template <int Lanes = 32>
__device__ __forceinline__ float warp_max(float value) {
  return warp_reduce<Max, Lanes>(value);
}

// Over a block of `Warps` warps, N values at a time; every thread of the block must call it. It holds one __syncthreads,
// between writing and reading `scratch` (shared memory). A second reduction may start at once in another scratch; the same
// scratch may be used again after any later __syncthreads: two scratches used in turn need no barrier besides the
// reductions' own.
template <typename Operation, int N, int Warps>
__device__ __forceinline__ void block_reduce(float (&values)[N], float (&scratch)[N][Warps]) {
  static_assert(Warps >= 1 && Warps <= 32, "at most 1024 threads");
  const int thread = threadIdx.x + blockDim.x * (threadIdx.y + blockDim.y * threadIdx.z);
#pragma unroll
  for (int n = 0; n < N; ++n) {
    values[n] = warp_reduce<Operation>(values[n]);
    if (thread % 32 == 0) scratch[n][thread / 32] = values[n];
  }
  __syncthreads();
#pragma unroll
  for (int n = 0; n < N; ++n) {
    if constexpr (Warps <= 8) {  // few parts: broadcast reads cost less than a second butterfly
      values[n] = scratch[n][0];
#pragma unroll
      for (int warp = 1; warp < Warps; ++warp) values[n] = Operation::combine(values[n], scratch[n][warp]);
    } else {
      values[n] = thread % 32 < Warps ? scratch[n][thread % 32] : Operation::identity();
      values[n] = warp_reduce<Operation>(values[n]);
    }
  }
}

template <typename Operation, int Warps>
__device__ __forceinline__ float block_reduce(float value, float (&scratch)[1][Warps]) {
  float values[1] = {value};
  block_reduce<Operation>(values, scratch);
  return values[0];
}

template <int Warps>
__device__ __forceinline__ float block_sum(float value, float (&scratch)[1][Warps]) {
  return block_reduce<Sum>(value, scratch);
}

template <int Warps>
__device__ __forceinline__ float block_max(float value, float (&scratch)[1][Warps]) {
  return block_reduce<Max>(value, scratch);
}

}  // namespace cki
