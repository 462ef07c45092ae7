// One kernel for each form of launch that the launcher can make: dynamic shared memory, clusters, all blocks resident,
// a start before the previous kernel's end, a tensor map by value.
#include "common/types.cuh"
#include "ptx/address.cuh"
#include "ptx/cluster.cuh"
#include "ptx/grid_dependency.cuh"
#include "ptx/mbarrier.cuh"
#include "ptx/tma.cuh"

using namespace cki;

// out[i] = in[n - 1 - i] by way of n floats of dynamic shared memory; one block.
extern "C" __global__ void reverse_in_shared(const float* in, float* out, int n) {
  extern __shared__ __align__(16) unsigned char memory[];
  float* const values = reinterpret_cast<float*>(memory);
  for (int i = threadIdx.x; i < n; i += blockDim.x) values[i] = in[i];
  __syncthreads();
  for (int i = threadIdx.x; i < n; i += blockDim.x) out[i] = values[n - 1 - i];
}

// rank[block] = rank in its cluster, count[block] = blocks of its cluster.
extern "C" __global__ void cluster_ranks(int* rank, int* count) {
  if (threadIdx.x == 0) {
    rank[blockIdx.x] = static_cast<int>(ptx::cluster_cta_rank());
    count[blockIdx.x] = static_cast<int>(ptx::cluster_cta_count());
  }
}

// y[i] = x[i] + 1, reading x only after the previous kernel of the stream has ended.
extern "C" __global__ void add_one_after_previous(const float* x, float* y, int n) {
  ptx::griddepcontrol_wait();
  const int i = blockIdx.x * blockDim.x + threadIdx.x;
  if (i < n) y[i] = x[i] + 1.f;
  ptx::griddepcontrol_launch_dependents();
}

// One block copies the tile of 8 rows by 32 columns at (column, row); what lies outside of the tensor is 0.
extern "C" __global__ void copy_tile(const __grid_constant__ TensorMap map, float* out, int column, int row) {
  __shared__ __align__(128) float tile[8 * 32];
  __shared__ __align__(8) u64 full;
  if (threadIdx.x == 0) {
    ptx::mbarrier_init(&full, 1);
    ptx::fence_mbarrier_init();
    ptx::mbarrier_arrive_expect_tx(&full, sizeof(tile));
    ptx::tma_load_2d(tile, &map, &full, column, row);
  }
  __syncthreads();
  ptx::mbarrier_wait_parity(&full, 0);
  for (int i = threadIdx.x; i < 8 * 32; i += blockDim.x) out[i] = tile[i];
}
