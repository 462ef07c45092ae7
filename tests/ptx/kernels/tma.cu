// ptx/tma.cuh: tiles of every rank, into shared memory and out again.
#include "common/types.cuh"
#include "ptx/fence.cuh"
#include "ptx/mbarrier.cuh"
#include "ptx/tma.cuh"

using namespace cki;

// Loads the box at (c0..c4) through `source`, dumps `footprint` bytes of shared memory, then stores (add 0) or adds
// (1) the tile at the same coordinates through `target`, or leaves it (2). hint: use the form with a cache policy.
extern "C" __global__ void __launch_bounds__(128)
    tile_copy(const __grid_constant__ TensorMap source, const __grid_constant__ TensorMap target, u32* dump, int bytes,
              int footprint, int rank, int c0, int c1, int c2, int c3, int c4, int add, int hint) {
  extern __shared__ __align__(1024) u8 tile[];
  __shared__ u64 full;
  const int t = threadIdx.x;
  for (int i = t; i < footprint / 4; i += 128) reinterpret_cast<u32*>(tile)[i] = 0xcdcdcdcdu;
  if (t == 0) {
    ptx::prefetch_tensormap(&source);
    if (rank == 2) ptx::tma_prefetch_2d(&source, c0, c1);
    ptx::mbarrier_init(&full, 1);
    ptx::fence_mbarrier_init();
  }
  ptx::fence_proxy_async_shared();
  __syncthreads();
  if (t == 0) {
    ptx::mbarrier_arrive_expect_tx(&full, bytes);
    const u64 policy = ptx::kCacheEvictFirst;
    switch (rank * 2 + hint) {
      case 2: ptx::tma_load_1d(tile, &source, &full, c0); break;
      case 3: ptx::tma_load_1d(tile, &source, &full, c0, policy); break;
      case 4: ptx::tma_load_2d(tile, &source, &full, c0, c1); break;
      case 5: ptx::tma_load_2d(tile, &source, &full, c0, c1, policy); break;
      case 6: ptx::tma_load_3d(tile, &source, &full, c0, c1, c2); break;
      case 7: ptx::tma_load_3d(tile, &source, &full, c0, c1, c2, policy); break;
      case 8: ptx::tma_load_4d(tile, &source, &full, c0, c1, c2, c3); break;
      case 9: ptx::tma_load_4d(tile, &source, &full, c0, c1, c2, c3, policy); break;
      case 10: ptx::tma_load_5d(tile, &source, &full, c0, c1, c2, c3, c4); break;
      default: ptx::tma_load_5d(tile, &source, &full, c0, c1, c2, c3, c4, policy); break;
    }
  }
  ptx::mbarrier_wait_parity(&full, 0);
  for (int i = t; i < footprint / 4; i += 128) dump[i] = reinterpret_cast<const u32*>(tile)[i];
  if (t == 0 && add < 2) {
    switch (rank * 2 + add) {
      case 2: ptx::tma_store_1d(&target, tile, c0); break;
      case 3: ptx::tma_reduce_add_1d(&target, tile, c0); break;
      case 4: ptx::tma_store_2d(&target, tile, c0, c1); break;
      case 5: ptx::tma_reduce_add_2d(&target, tile, c0, c1); break;
      case 6: ptx::tma_store_3d(&target, tile, c0, c1, c2); break;
      case 7: ptx::tma_reduce_add_3d(&target, tile, c0, c1, c2); break;
      case 8: ptx::tma_store_4d(&target, tile, c0, c1, c2, c3); break;
      case 9: ptx::tma_reduce_add_4d(&target, tile, c0, c1, c2, c3); break;
      case 10: ptx::tma_store_5d(&target, tile, c0, c1, c2, c3, c4); break;
      default: ptx::tma_reduce_add_5d(&target, tile, c0, c1, c2, c3, c4); break;
    }
    ptx::bulk_commit_group();
    ptx::bulk_wait_group<0>();
  }
}
