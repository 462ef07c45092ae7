// The sum of a tile whose K is split over the blocks of a cluster.
//
// Every block leaves its part of the tile's sums, fp32, in its own shared memory, where its stages were: a unit of 16
// rows x 64 columns as the 32 accumulators of each lane, in pieces of 16 bytes side by side, so that neither stores nor
// loads meet in a bank. Then the blocks share out the units, and a warp adds the blocks' parts of a unit through
// distributed shared memory, rank 0 first: the same bits in every run. It has them as wgmma would have left them.
#pragma once

#include "common/types.cuh"
#include "gemm/hopper/tiles.cuh"
#include "ptx/cluster.cuh"

namespace cki::gemm {

template <int kBlockM, int kBlockN, int kSplit, int kWarps>
struct ClusterSum {
  static constexpr int kSums = 16 * kSlabColumns / 32;  // of a lane
  static constexpr int kPieces = kSums / 4;
  static constexpr int kAcross = kBlockN / kSlabColumns;
  static constexpr int kUnits = kBlockM / 16 * kAcross;
  static constexpr int kOwnUnits = (kUnits + kSplit - 1) / kSplit;  // of a block; the last may have fewer
  static constexpr int kBytes = kUnits * kSums * 32 * 4;

  float* memory;  // the same place in every block

  // Where a unit begins in the tile.
  static __device__ __forceinline__ int row_of(int unit) { return unit / kAcross * 16; }
  static __device__ __forceinline__ int column_of(int unit) { return unit % kAcross * kSlabColumns; }

  static __device__ __forceinline__ int piece_at(int unit, int piece) {
    return ((unit * kPieces + piece) * 32 + static_cast<int>(threadIdx.x) % 32) * 4;
  }

  // The warp's accumulators, which begin at (row, column) of the tile. The stages have been read by all warps.
  template <int kRowTiles, int kCount>
  __device__ __forceinline__ void keep(const float (&sum)[kRowTiles][kCount], int row, int column) const {
    const int first = row / 16 * kAcross + column / kSlabColumns;
#pragma unroll
    for (int i = 0; i < kRowTiles; ++i) {
#pragma unroll
      for (int at = 0; at < kCount; at += 4) {
        const int unit = first + i * 4 * kAcross + at / kSums;
        *reinterpret_cast<float4*>(memory + piece_at(unit, at % kSums / 4)) =
            make_float4(sum[i][at], sum[i][at + 1], sum[i][at + 2], sum[i][at + 3]);
      }
    }
  }

  // All blocks' parts of a unit, behind a cluster barrier. All loads before the first addition: one latency.
  __device__ __forceinline__ void add(float (&total)[kSums], int unit) const {
    float4 part[kSplit][kPieces];
#pragma unroll
    for (int rank = 0; rank < kSplit; ++rank) {
      const u32 peer = ptx::map_shared_rank(memory, static_cast<u32>(rank));
#pragma unroll
      for (int i = 0; i < kPieces; ++i) {
        part[rank][i] = ptx::load_shared_cluster_f32x4(peer + static_cast<u32>(piece_at(unit, i)) * 4);
      }
    }
#pragma unroll
    for (int i = 0; i < kPieces; ++i) {
      float4 sum = part[0][i];
#pragma unroll
      for (int rank = 1; rank < kSplit; ++rank) {
        sum.x += part[rank][i].x;
        sum.y += part[rank][i].y;
        sum.z += part[rank][i].z;
        sum.w += part[rank][i].w;
      }
      total[i * 4] = sum.x;
      total[i * 4 + 1] = sum.y;
      total[i * 4 + 2] = sum.z;
      total[i * 4 + 3] = sum.w;
    }
  }
};

// The other way for a cluster of two: each block finishes half of the warps' parts of the tile, and the same warps of the
// other block store their sums, as the accumulators of each lane in pieces of 16 bytes, into its shared memory, where a
// warp that finishes nothing there has its buffers. Nobody waits for a store before the barrier, nor reads from afar.
template <int kRowTiles, int kCount, int kWarps>
struct PushedSum {
  static constexpr int kOwned = kWarps / 2;  // warps that finish, of a block
  static constexpr int kPieces = kRowTiles * kCount / 4;
  static constexpr int kStride = kOutputBuffers * kWarpSlabBytes;  // of a warp's buffers
  static constexpr bool kFits = kPieces * 32 * 16 <= kStride;

  unsigned char* memory;  // the buffers, at the same place in both blocks

  // Which block finishes a warp's part.
  static __device__ __forceinline__ int owner_of(int warp) { return warp / kOwned; }

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

  // Behind the cluster's barrier, the owner: sum is of both blocks.
  __device__ __forceinline__ void add_to(float (&sum)[kRowTiles][kCount], int warp, int rank) const {
    const unsigned char* from = pieces_of(warp, 1 - rank);
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
};

}  // namespace cki::gemm
