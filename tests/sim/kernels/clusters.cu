// Distributed shared memory, cluster barriers, and blocks that wait for each other through global memory.
#include "ptx/cluster.cuh"
#include "ptx/memory.cuh"

using namespace cki;

// Each block sums its part; the cluster's blocks read each other's sums. fault 1: no cluster barrier before the remote read;
// fault 2: none before a block may leave; fault 3: the last block leaves at once; fault 4: one thread skips the last barrier.
extern "C" __global__ void cluster_sum(const float* x, float* y, int fault) {
  __shared__ float part[32];
  const u32 rank = ptx::cluster_cta_rank(), size = ptx::cluster_cta_count();
  if (fault == 3 && rank == size - 1) return;
  part[threadIdx.x] = x[blockIdx.x * blockDim.x + threadIdx.x];  // write own part
  if (fault != 1) ptx::cluster_sync();
  float total = 0.0f;
  for (u32 peer = 0; peer < size; ++peer)
    total += ptx::load_shared_cluster_f32(ptx::map_shared_rank(&part[threadIdx.x], peer));  // read the peer's part
  y[blockIdx.x * blockDim.x + threadIdx.x] = total;
  if (fault == 2 || (fault == 4 && rank == 1 && threadIdx.x == 3)) return;
  ptx::cluster_sync();  // last barrier
}

// Each thread stores into the next block's memory, through a generic pointer and by atomics.
extern "C" __global__ void cluster_ring(int* y) {
  __shared__ int box[32];
  __shared__ int counter;
  const u32 rank = ptx::cluster_cta_rank(), size = ptx::cluster_cta_count(), next = (rank + 1) % size;
  if (threadIdx.x == 0) counter = 0;
  ptx::cluster_sync();
  int* remote = static_cast<int*>(cki_sim_mapa_pointer(box, next));
  remote[threadIdx.x] = static_cast<int>(rank * 100 + threadIdx.x);
  atomicAdd(static_cast<int*>(cki_sim_mapa_pointer(&counter, 0)), 1);
  ptx::cluster_sync();
  const u32 block = blockIdx.x + gridDim.x * blockIdx.y;
  y[block * blockDim.x + threadIdx.x] = box[threadIdx.x] + 10000 * counter;
}

// A grid-wide barrier: needs a cooperative launch.
extern "C" __global__ void grid_barrier(u32* arrived, int* y, int rounds) {
  __shared__ int seen;
  for (int round = 1; round <= rounds; ++round) {
    __syncthreads();
    if (threadIdx.x == 0) {
      ptx::red_add_release_gpu(arrived, 1);
      while (ptx::load_acquire_gpu(arrived) < gridDim.x * static_cast<u32>(round)) {  // poll
      }
      seen = round;
    }
    __syncthreads();
  }
  y[blockIdx.x * blockDim.x + threadIdx.x] = seen;
}

// Block b waits for block b - 1 (allowed: earlier blocks start first) or, backwards, for block b + 1 (not allowed).
extern "C" __global__ void chain(u32* flags, int* y, int backwards) {
  if (threadIdx.x == 0) {
    const int b = static_cast<int>(blockIdx.x), other = backwards ? b + 1 : b - 1;
    if (other >= 0 && other < static_cast<int>(gridDim.x))
      while (ptx::load_acquire_gpu(&flags[other]) == 0) {  // poll chain
      }
    y[b] = (other >= 0 && other < static_cast<int>(gridDim.x) ? y[other] : 0) + 1;
    ptx::store_release_gpu(&flags[b], 1);
  }
}

// Polls with a vote in between; nobody ever sets the flag.
extern "C" __global__ void poll_forever(u32* flag, int* y) {
  u32 value = 0;
  do {
    value = threadIdx.x == 0 ? ptx::load_acquire_gpu(flag) : 0;
    value = __shfl_sync(0xffffffffu, value, 0);
  } while (value == 0);
  y[threadIdx.x] = static_cast<int>(value);
}

// The last block to finish sums what the others wrote.
extern "C" __global__ void last_block(const float* x, float* part, u32* count, float* y) {
  __shared__ bool last;
  if (threadIdx.x == 0) {
    part[blockIdx.x] = x[blockIdx.x];
    __threadfence();
    last = atomicAdd(count, 1u) == gridDim.x - 1;
  }
  __syncthreads();
  if (last && threadIdx.x == 0) {
    __threadfence();
    float total = 0.0f;
    for (u32 b = 0; b < gridDim.x; ++b) total += part[b];
    *y = total;
  }
}
