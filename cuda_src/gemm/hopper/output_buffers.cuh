// A warp's buffers in shared memory for slabs of 16 rows x 64 columns on their way to global memory by TMA, or from there,
// where a residual is brought into the buffers out of which the result is stored.
#pragma once

#include "common/types.cuh"
#include "gemm/hopper/tiles.cuh"
#include "ptx/bulk.cuh"
#include "ptx/fence.cuh"
#include "ptx/mbarrier.cuh"
#include "ptx/tma.cuh"

namespace cki::gemm {

// One lane issues and waits, because bulk groups belong to a thread.
struct OutputBuffers {
  unsigned char* memory;
  u64* landed = nullptr;  // completes when a tile's residual is in the buffers
  u32 phase = 0;
  int next = 0;

  // All lanes, before a tile's products: asks for the residual of the warp's slabs, kRowTiles below each other, that are
  // inside rows x columns. Stores of the tile before have been read by then, or nearly.
  template <int kRowTiles, int kAcross>
  __device__ __forceinline__ void fetch(const TensorMap* map, int first_row, int first_column, int rows, int columns) {
    next = 0;
    if (threadIdx.x % 32 != 0) return;
    ptx::bulk_wait_group_read<0>();
    const int down = first_row >= rows ? 0 : min((rows - first_row + 63) / 64, kRowTiles);
    const int across = first_column >= columns ? 0 : min((columns - first_column + kSlabColumns - 1) / kSlabColumns, kAcross);
    ptx::mbarrier_arrive_expect_tx(landed, static_cast<u32>(down * across * kWarpSlabBytes));
#pragma unroll
    for (int slab = 0; slab < kRowTiles * kAcross; ++slab) {
      const int i = slab % kRowTiles, j = slab / kRowTiles;
      if (i >= down || j >= across) continue;
      ptx::tma_load_2d(memory + slab * kWarpSlabBytes, map, landed, first_column + j * kSlabColumns, first_row + i * 64);
    }
  }

  // All lanes: what was asked for is there.
  __device__ __forceinline__ void wait_fetched() {
    ptx::mbarrier_wait_parity(landed, phase);
    phase ^= 1;
    __syncwarp();  // the lane that begins the next phase must not leave others behind in this one
  }

  // All lanes: the buffer to fill next; its last store has been read. kCount: of the buffers.
  template <int kCount>
  __device__ __forceinline__ unsigned char* acquire() const {
    if (threadIdx.x % 32 == 0) ptx::bulk_wait_group_read<kCount - 1>();
    __syncwarp();
    return memory + next * kWarpSlabBytes;
  }

  // All lanes: the buffer has been written; store it. kCount: of the buffers.
  template <int kCount>
  __device__ __forceinline__ void store(const TensorMap* y_map, int column, int row) {
    ptx::fence_proxy_async_shared();
    __syncwarp();
    if (threadIdx.x % 32 == 0) {
      ptx::tma_store_2d(y_map, memory + next * kWarpSlabBytes, column, row);
      ptx::bulk_commit_group();
    }
    next = (next + 1) % kCount;
  }

  // Before the thread exits: shared memory must outlive the reads of the last stores.
  __device__ __forceinline__ void drain() const {
    if (threadIdx.x % 32 == 0) ptx::bulk_wait_group_read<0>();
  }
};

}  // namespace cki::gemm
