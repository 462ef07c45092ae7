// The sum of a tile whose K is split over the blocks of a cluster.
//
// Each block finishes as many of the warps' parts of the tile. The same warps of the other blocks store their sums, as the
// accumulators of each lane in pieces of 16 bytes, into its shared memory, where warps that finish nothing there have
// their buffers. Nobody waits for a store before the one barrier, nor reads from afar. (Sums in both blocks' memory, which
// the cluster's warps then read and added, cost 0.6 us more.) The owner adds them in the order of K to its own: the same
// bits in every run.
#pragma once

#include "common/types.cuh"
#include "gemm/hopper/tiles.cuh"
#include "ptx/cluster.cuh"
#include "ptx/mbarrier.cuh"

namespace cki::gemm {

template <int kRowTiles, int kCount, int kWarps, int kBlocks>
struct PushedSum {
  static constexpr int kOwned = kWarps / kBlocks;  // warps that finish, of a block
  static constexpr int kPieces = kRowTiles * kCount / 4;
  static constexpr int kStride = kOutputBuffers * kWarpSlabBytes;  // of a warp's buffers
  static constexpr bool kFits = kOwned * kBlocks == kWarps && kPieces * 32 * 16 <= kStride;

  unsigned char* memory;  // the buffers, at the same place in all blocks

  // Which block finishes a warp's part.
  static __device__ __forceinline__ int owner_of(int warp) { return warp / kOwned; }

  // By all warps with a part of the tile, each with its own: the owner's sum is of all blocks. A block says that it has
  // started by ptx::cluster_arrive_relaxed, before; nobody writes into it until then.
  __device__ __forceinline__ void exchange(float (&sum)[kRowTiles][kCount], int warp, int rank) const {
    ptx::cluster_wait();
    if (owner_of(warp) != rank) push(sum, warp, rank);
    ptx::cluster_sync();
    if (owner_of(warp) == rank) add_to(sum, warp, rank);
  }

  // By warps that compute nothing: their share in the barriers of `exchange`.
  static __device__ __forceinline__ void pass_by() {
    ptx::cluster_wait();
    ptx::cluster_sync();
  }

 private:
  // Where a lane's pieces of a warp's part lie, when they come from block `rank`.
  __device__ __forceinline__ unsigned char* pieces_of(int warp, int rank) const {
    return memory + (rank * kOwned + warp % kOwned) * kStride + static_cast<int>(threadIdx.x) % 32 * 16;
  }

  // To the warp's owner. rank: of this block, which is another.
  __device__ __forceinline__ void push(const float (&sum)[kRowTiles][kCount], int warp, int rank) const {
    const u32 peer = ptx::map_shared_rank(pieces_of(warp, rank), static_cast<u32>(owner_of(warp)));
#pragma unroll
    for (int piece = 0; piece < kPieces; ++piece) {
      const float* part = sum[piece * 4 / kCount] + piece * 4 % kCount;
      ptx::store_shared_cluster_f32x4(peer + piece * 32 * 16, make_float4(part[0], part[1], part[2], part[3]));
    }
  }

  // Behind the cluster's barrier, the owner: sum is of all blocks.
  __device__ __forceinline__ void add_to(float (&sum)[kRowTiles][kCount], int warp, int rank) const {
#pragma unroll
    for (int i = 1; i < kBlocks; ++i) {
      const unsigned char* from = pieces_of(warp, i <= rank ? i - 1 : i);
#pragma unroll
      for (int piece = 0; piece < kPieces; ++piece) {
        const float4 part = *reinterpret_cast<const float4*>(from + piece * 32 * 16);
        float* total = sum[piece * 4 / kCount] + piece * 4 % kCount;
        total[0] += part.x;
        total[1] += part.y;
        total[2] += part.z;
        total[3] += part.w;
      }
    }
  }
};

// The same once a launch, by stores that complete on a barrier of the owner's (st.async): who sends waits for nothing, who finishes for
// its bytes alone. (The release of a cluster's barrier waits for all of a thread's accesses: 1 to 1.5 us.) The first two blocks finish
// a half of the warps' parts each.
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
