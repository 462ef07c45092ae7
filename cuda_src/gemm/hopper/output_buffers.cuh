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

// One lane issues, because bulk groups belong to a thread. The slabs of a tile, in their order, take the buffers in turn.
struct OutputBuffers {
  unsigned char* memory;
  u64* landed = nullptr;  // completes when a tile's residual is in the buffers
  u32 phase = 0;

  // All lanes: asks for the residual of slabs [kFirst, kEnd) of the warp's, kRowTiles below each other, as far as they are
  // inside rows x columns. Before a tile's products of those that have buffers of their own, when stores of the tile before
  // have been read, or nearly.
  template <int kRowTiles, int kBuffers, int kFirst, int kEnd>
  __device__ __forceinline__ void fetch(const TensorMap* map, int first_row, int first_column, int rows, int columns) const {
    if (threadIdx.x % 32 != 0) return;
    ptx::bulk_wait_group_read<0>();
    const int down = first_row >= rows ? 0 : min((rows - first_row + 63) / 64, kRowTiles);
    const int across = first_column >= columns ? 0 : (columns - first_column + kSlabColumns - 1) / kSlabColumns;
    u32 bytes = 0;
#pragma unroll
    for (int slab = kFirst; slab < kEnd; ++slab) {
      bytes += slab % kRowTiles < down && slab / kRowTiles < across ? kWarpSlabBytes : 0;
    }
    ptx::mbarrier_arrive_expect_tx(landed, bytes);
#pragma unroll
    for (int slab = kFirst; slab < kEnd; ++slab) {
      const int i = slab % kRowTiles, j = slab / kRowTiles;
      if (i >= down || j >= across) continue;
      ptx::tma_load_2d(buffer(slab % kBuffers), map, landed, first_column + j * kSlabColumns, first_row + i * 64);
    }
  }

  // All lanes: what was asked for is there.
  __device__ __forceinline__ void wait_fetched() {
    ptx::mbarrier_wait_parity(landed, phase);
    phase ^= 1;
    __syncwarp();  // the lane that begins the next phase must not leave others behind in this one
  }

  // All lanes: waits until the last store out of the slab's buffer has been read. Every slab before it has been stored, or
  // skipped.
  __device__ __forceinline__ void acquire(int slab) const {
    static_assert(kOutputBuffers == 2, "the store before may be under way, but for a tile's first slab, whose was another's");
    if (slab == 0) {
      ptx::bulk_wait_group_read<0>();
    } else {
      ptx::bulk_wait_group_read<kOutputBuffers - 1>();
    }
    __syncwarp();
  }

  __device__ __forceinline__ unsigned char* buffer(int index) const { return memory + index * kWarpSlabBytes; }

  // All lanes: a buffer has been written; store it.
  __device__ __forceinline__ void store(int index, const TensorMap* y_map, int column, int row) const {
    ptx::fence_proxy_async_shared();
    __syncwarp();
    if (threadIdx.x % 32 == 0) {
      ptx::tma_store_2d(y_map, buffer(index), column, row);
      ptx::bulk_commit_group();
    }
  }

  // All lanes: a slab without a store, which `acquire` counts.
  __device__ __forceinline__ void skip() const { ptx::bulk_commit_group(); }

  // Before the thread exits: shared memory must outlive the reads of the last stores.
  __device__ __forceinline__ void drain() const {
    ptx::bulk_wait_group_read<0>();
  }
};

}  // namespace cki::gemm
