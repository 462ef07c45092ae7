// The sum of a tile whose K is split over the blocks of a cluster, of which the first two finish a half of the warps' parts each.
//
// The same warps of the other blocks send their sums, the accumulators of each lane in pieces of 16 bytes, by stores that complete on
// a barrier of the owner's (st.async): who sends waits for nothing, who finishes for its bytes alone. (A barrier of the cluster, as in
// cluster_sum.cuh, makes each thread's earlier accesses to memory visible to the whole GPU: 1 to 1.5 us.) The owner adds them in the
// order of K to its own: the same bits in every run. Once a launch.
#pragma once

#include "common/types.cuh"
#include "ptx/cluster.cuh"
#include "ptx/mbarrier.cuh"

namespace cki::gemm {

template <int kCount, int kWarps, int kBlocks>
struct SentSum {
  static constexpr int kOwners = kBlocks == 1 ? 1 : 2;
  static constexpr int kOwned = kWarps / kOwners;  // warps that finish, of an owner
  static constexpr int kPieces = kCount / 4;
  static constexpr int kStride = kPieces * 32 * 16;  // of a warp's sums of one block
  static constexpr int kBytes = (kBlocks - 1) * kOwned * kStride;
  static constexpr int kBarrierBytes = kBlocks > 1 ? kOwned * 8 : 0;
  static_assert(kOwned * kOwners == kWarps && kCount % 4 == 0, "whole pieces, of all warps");

  unsigned char* memory;  // at the same place in all blocks; an owner's warp may use the first kStride of its own when it has its sum
  u64* arrived;           // of each warp that finishes

  // By one thread, before the block says that it has started (ptx::cluster_arrive_relaxed, behind ptx::fence_mbarrier_init).
  __device__ __forceinline__ void initialise(int rank) const {
    if (kBlocks > 1 && rank < kOwners) {
#pragma unroll
      for (int i = 0; i < kOwned; ++i) {
        ptx::mbarrier_init(arrived + i, 1);
        ptx::mbarrier_arrive_expect_tx(arrived + i, (kBlocks - 1) * kStride);
      }
    }
  }

  // Which block finishes a warp's part.
  static __device__ __forceinline__ int owner_of(int warp) { return warp / kOwned; }

  // By all warps with a part of the tile, each with its own, when all blocks have started (ptx::cluster_wait): the owner's sum is of
  // all blocks.
  __device__ __forceinline__ void exchange(float (&sum)[kCount], int warp, int rank) const {
    if constexpr (kBlocks > 1) {
      const int owner = owner_of(warp);
      if (owner != rank) {
        send(sum, warp, rank, owner);
      } else {
        ptx::mbarrier_wait_parity(arrived + warp % kOwned, 0);
        add_to(sum, warp);
      }
    }
  }

 private:
  // Where a lane's pieces of a warp's part lie, of the block that is the n-th but the owner.
  __device__ __forceinline__ unsigned char* pieces_of(int warp, int n) const {
    return memory + (n * kOwned + warp % kOwned) * kStride + static_cast<int>(threadIdx.x) % 32 * 16;
  }

  __device__ __forceinline__ void send(const float (&sum)[kCount], int warp, int rank, int owner) const {
    const u32 to = ptx::map_shared_rank(pieces_of(warp, rank - (rank > owner)), static_cast<u32>(owner));
    const u32 barrier = ptx::map_shared_rank(arrived + warp % kOwned, static_cast<u32>(owner));
#pragma unroll
    for (int i = 0; i < kPieces; ++i)
      ptx::store_async_cluster_f32x4(to + i * 32 * 16, make_float4(sum[i * 4], sum[i * 4 + 1], sum[i * 4 + 2], sum[i * 4 + 3]), barrier);
  }

  __device__ __forceinline__ void add_to(float (&sum)[kCount], int warp) const {
#pragma unroll
    for (int n = 0; n < kBlocks - 1; ++n) {
      const unsigned char* from = pieces_of(warp, n);
#pragma unroll
      for (int i = 0; i < kPieces; ++i) {
        const float4 part = *reinterpret_cast<const float4*>(from + i * 32 * 16);
        sum[i * 4] += part.x;
        sum[i * 4 + 1] += part.y;
        sum[i * 4 + 2] += part.z;
        sum[i * 4 + 3] += part.w;
      }
    }
  }
};

}  // namespace cki::gemm
