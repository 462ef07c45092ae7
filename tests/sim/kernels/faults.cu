// Kernels that are right when `fault` is 0; other values plant one fault each. Markers name the lines that reports must name.

// A block-wide sum through shared memory, twice, so that the second call could overwrite what the first still reads.
__device__ __forceinline__ float block_sum(float value, int fault) {
  __shared__ float part[8];
  for (int offset = 16; offset; offset >>= 1) value += __shfl_xor_sync(0xffffffffu, value, offset);
  if (fault != 2) __syncthreads();
  if (threadIdx.x % 32 == 0) part[threadIdx.x / 32] = value;  // write part
  if (fault != 1) __syncthreads();
  value = threadIdx.x % 32 < blockDim.x / 32 ? part[threadIdx.x % 32] : 0.0f;  // read part
  for (int offset = 16; offset; offset >>= 1) value += __shfl_xor_sync(0xffffffffu, value, offset);
  return value;
}

extern "C" __global__ void block_sums(const float* x, float* y, int fault) {
  const float first = block_sum(x[threadIdx.x], fault);
  const float second = block_sum(x[threadIdx.x] * first, fault);
  y[threadIdx.x] = second;
}

extern "C" __global__ void warp_exchange(float* y, int fault) {
  __shared__ float values[32];
  const int lane = threadIdx.x;
  values[lane] = static_cast<float>(lane);  // write values
  if (fault == 0) __syncwarp();
  if (fault == 2) __shfl_sync(0xffffffffu, lane, 0);
  y[lane] = values[31 - lane];  // read values
}

extern "C" __global__ void warp_masks(float* y, int fault) {
  const int lane = threadIdx.x;
  float value = static_cast<float>(lane);
  if (fault == 0) {
    value = lane < 16 ? __shfl_xor_sync(0x0000ffffu, value, 1) : __shfl_xor_sync(0xffff0000u, value, 2);
  } else if (fault == 1) {
    if (lane < 16)
      value = __shfl_xor_sync(0x0000ffffu, value, 1);  // narrow mask
    else
      value = __shfl_xor_sync(0xffffffffu, value, 1);  // wide mask
  } else if (fault == 2) {
    if (lane < 16)
      value = __shfl_xor_sync(0xffffffffu, value, 1);  // shuffle meets vote
    else
      value = static_cast<float>(__any_sync(0xffffffffu, lane == 3));  // vote meets shuffle
  } else {
    value = __shfl_xor_sync(0x0000ffffu, value, 1);  // caller outside mask
  }
  __syncwarp();  // all lanes again
  y[lane] = value;
}

extern "C" __global__ void named_barrier(float* y, int fault) {
  __shared__ float values[128];
  values[threadIdx.x] = static_cast<float>(threadIdx.x);
  const int threads = fault == 2 && threadIdx.x >= 64 ? 96 : 128;
  if (fault != 1 || threadIdx.x != 77) cki_sim_bar_sync(1, threads);  // named barrier
  y[threadIdx.x] = values[127 - threadIdx.x];
}

__device__ float last_of(const float* end, int beyond) {
  return end[beyond - 1];  // through a pointer
}

__device__ void store_at(float* begin, int offset, float value) {
  begin[offset] = value;  // stored through a pointer
}

extern "C" __global__ void bounds(const float* x, float* y, int n, int fault) {
  extern __shared__ float dynamic[];
  __shared__ float fixed[32];
  __shared__ __align__(16) float other[4], third[5];
  const int i = static_cast<int>(threadIdx.x);
  const bool last = i == n - 1;
  float local[4];
  for (int k = 0; k < 4; ++k) local[k] = x[i] * static_cast<float>(k);
  dynamic[i] = x[i];
  if (i < 32) fixed[i] = x[i];
  if (i < 4) third[i] = other[i] = x[i];
  __syncthreads();
  float sum = 0.0f;
  sum += dynamic[last && fault == 1 ? n + 3 : i];          // dynamic shared
  sum += fixed[last && fault == 2 ? 33 : i % 32];          // static shared
  sum += local[last && fault == 3 ? 5 : i % 4];            // local array
  sum += x[last && fault == 4 ? n : i];                    // read global
  if (last && fault == 5) y[-1] = sum;                     // write global
  sum += last_of(fixed + 32, last && fault == 6);
  sum += last_of(other + 4, last && fault == 7) + last_of(third + 4, last && fault == 8 ? 2 : 0);
  __syncthreads();
  if (last) store_at(other, fault == 9 ? 4 : 0, sum);
  y[i] = sum;
}
