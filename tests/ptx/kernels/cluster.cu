// ptx/cluster.cuh and the cluster forms of mbarriers and copies.
#include "common/types.cuh"
#include "ptx/bulk.cuh"
#include "ptx/cluster.cuh"
#include "ptx/mbarrier.cuh"
#include "ptx/tma.cuh"

using namespace cki;

// Each block of a cluster of kBlocks: ranks[block] = {rank, count, value read from the next block, sums of what the
// peers stored here} gathered[block]: a tile of which each block loads one part (32 x 16 bytes) for all, by TMA
// through a map of 2 to 5 dimensions, with and without a cache policy, and by bulk multicast.
extern "C" __global__ void __launch_bounds__(64)
    clusters(const __grid_constant__ TensorMap source, const u32* words, u32* ranks, u32* gathered, u32* gathered_bulk,
             int dimensions, int hint) {
  __shared__ __align__(1024) u32 tile[kBlocks * 128];
  __shared__ __align__(128) u32 bulk_tile[kBlocks * 128];
  __shared__ __align__(16) u32 mailbox[16];
  __shared__ __align__(16) float4 exported;
  __shared__ u64 full, arrivals, stored;
  constexpr u32 kPart = 512;
  const int t = threadIdx.x;
  const u32 rank = ptx::cluster_cta_rank(), count = ptx::cluster_cta_count();
  if (t == 0) {
    ptx::mbarrier_init(&full, 1);
    ptx::mbarrier_init(&arrivals, kBlocks);
    ptx::mbarrier_init(&stored, 1);
    ptx::fence_mbarrier_init();
    ptx::mbarrier_arrive_expect_tx(&full, 2 * kBlocks * kPart);
    exported = make_float4(rank, rank + 0.5f, rank + 0.25f, rank + 0.125f);
  }
  if (t < 16) mailbox[t] = 0;
  ptx::cluster_sync();

  if (t == 0) {
    const u16 everyone = (1u << kBlocks) - 1;
    const int row = rank * 32;
    const u64 policy = ptx::kCacheEvictLast;
    u32* part = tile + rank * 128;
    switch (dimensions * 2 + hint) {
      case 4: ptx::tma_load_multicast_2d(part, &source, &full, 0, row, everyone); break;
      case 5: ptx::tma_load_multicast_2d(part, &source, &full, 0, row, everyone, policy); break;
      case 6: ptx::tma_load_multicast_3d(part, &source, &full, 0, row, 0, everyone); break;
      case 7: ptx::tma_load_multicast_3d(part, &source, &full, 0, row, 0, everyone, policy); break;
      case 8: ptx::tma_load_multicast_4d(part, &source, &full, 0, row, 0, 0, everyone); break;
      case 9: ptx::tma_load_multicast_4d(part, &source, &full, 0, row, 0, 0, everyone, policy); break;
      case 10: ptx::tma_load_multicast_5d(part, &source, &full, 0, row, 0, 0, 0, everyone); break;
      default: ptx::tma_load_multicast_5d(part, &source, &full, 0, row, 0, 0, 0, everyone, policy); break;
    }
    // Not `words + rank * 128`: ptxas 13.0 loses the upper half of an address that shares its index with a shared one
    // here.
    ptx::bulk_load_multicast(bulk_tile + rank * 128, words + blockIdx.x % kBlocks * 128, kPart, &full, everyone);
    const u32 next = (rank + 1) % kBlocks;
    const u32 address = ptx::map_shared_rank(&exported, next);
    const float4 v = ptx::load_shared_cluster_f32x4(address);
    const float second = ptx::load_shared_cluster_f32(address + 4);
    const u32 bits = ptx::load_shared_cluster_u32(address + 8);
    ranks[blockIdx.x * 4] = rank;
    ranks[blockIdx.x * 4 + 1] = count;
    ranks[blockIdx.x * 4 + 2] =
        static_cast<u32>(v.x * 1000 + v.w * 8) + static_cast<u32>(second * 2) + (bits == __float_as_uint(next + 0.25f));
    // One word for each peer, in three widths, then an arrival at its barrier.
    for (u32 peer = 0; peer < kBlocks; ++peer) {
      ptx::store_shared_cluster_u32(ptx::map_shared_rank(mailbox + rank, peer), 10 + rank);
      ptx::mbarrier_arrive_cluster(&arrivals, peer);
    }
  }
  while (!ptx::mbarrier_try_wait_parity_cluster(&arrivals, 0)) {
  }
  while (!ptx::mbarrier_try_wait_parity_cluster(&full, 0)) {
  }
  if (t == 0) {
    u32 sum = 0;
    for (int i = 0; i < kBlocks; ++i) sum += mailbox[i];
    ranks[blockIdx.x * 4 + 3] = sum;
  }
  for (int i = t; i < kBlocks * 128; i += 64) {
    gathered[blockIdx.x * kBlocks * 128 + i] = tile[i];
    gathered_bulk[blockIdx.x * kBlocks * 128 + i] = bulk_tile[i];
  }
  ptx::cluster_sync();
  // Stores of 4 and 16 bytes into the previous block, seen behind the cluster barrier.
  if (t == 0) {
    const u32 previous = ptx::map_shared_rank(mailbox, (rank + kBlocks - 1) % kBlocks);
    ptx::store_shared_cluster_f32(previous + 16, 1.5f);
    ptx::store_shared_cluster_f32x4(previous + 32, make_float4(1.0f, 2.0f, 4.0f, 8.0f));
  }
  ptx::cluster_arrive();
  ptx::cluster_wait();
  if (t == 0) {
    const float* box = reinterpret_cast<const float*>(mailbox);
    ranks[blockIdx.x * 4 + 3] += static_cast<u32>(box[4] * 2 + box[8] + box[9] + box[10] + box[11]) * 10000;
  }
  ptx::cluster_arrive_relaxed();
  ptx::cluster_wait();
  // Stores into all blocks that complete on a barrier there, each beside the others'.
  float4* halls = reinterpret_cast<float4*>(tile);
  if (t == 0) {
    ptx::mbarrier_arrive_expect_tx(&stored, 16 * kBlocks);
    for (u32 peer = 0; peer < kBlocks; ++peer)
      ptx::store_async_cluster_f32x4(ptx::map_shared_rank(halls + rank, peer), make_float4(rank, peer, 0.5f, 2.0f),
                                     ptx::map_shared_rank(&stored, peer));
  }
  ptx::mbarrier_wait_parity(&stored, 0);
  if (t == 0) {
    u32 right = 0;
    for (u32 peer = 0; peer < kBlocks; ++peer) {
      const float4 v = halls[peer];
      right += v.x == peer && v.y == rank && v.z == 0.5f && v.w == 2.0f;
    }
    ranks[blockIdx.x * 4 + 3] += right * 1000000;
  }
}
