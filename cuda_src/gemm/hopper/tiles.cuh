// Where the tiles of x and of the weight lie in shared memory, how TMA brings them and how wgmma multiplies them.
//
// A stage holds 64 elements of K of both operands. x is K-major, rows of 128 bytes. The weight lies as it is stored:
// rows of 128 bytes along K ([N, K]), or slabs of 64 columns with one row of 128 bytes for each k ([K, N], MN-major).
// All are swizzled by 128 bytes. TMA fills what lies outside the matrices with zeros, so products need no bounds.
#pragma once

#include "common/stage_ring.cuh"
#include "common/types.cuh"
#include "common/wgmma_descriptor.cuh"
#include "ptx/mbarrier.cuh"
#include "ptx/tma.cuh"
#include "ptx/wgmma.cuh"

namespace cki::gemm {

constexpr int kStageDepth = 64;                // elements of K in a stage
constexpr int kSpan = 128;                     // bytes of a row: the swizzle
constexpr int kSlabColumns = kSpan / 2;        // 16-bit elements of such a row
constexpr int kStepDepth = 16;                 // elements of K in one wgmma
constexpr int kWarpSlabBytes = 16 * kSpan;     // a warp's 16 rows x 64 columns of y on their way out
constexpr int kOutputBuffers = 2;              // of each warp, where they do not receive a residual
constexpr int kResidualBuffers = 4;            // where they do, at most; a wider tile's last slabs come when the first have gone

template <int kBlockM, int kBlockN, int kStageCount, int kConsumerWarps, int kBuffers = kOutputBuffers>
struct HopperLayout {
  static constexpr int kBytesX = kBlockM * kSpan;
  static constexpr int kBytesW = kBlockN * kSpan;
  static constexpr int kStageBytes = kBytesX + kBytesW;
  static constexpr int kOutput = kStageCount * kStageBytes;
  static constexpr int kRing = kOutput + kConsumerWarps * kBuffers * kWarpSlabBytes;
  static constexpr int kBytes = kRing + StageRing<kStageCount>::kBytes;
  static_assert(kBlockM % 64 == 0 && kBlockM <= 256, "whole wgmma tiles, and one TMA box for x");
  static_assert(kBlockN % kSlabColumns == 0 && kBlockN <= 256, "whole slabs, and one wgmma across");
};

// Opaque copies of the thread's number and the lane: else the compiler computes what depends on them before the loop over all
// tiles, and keeps it in registers through the products, which have none to spare.
__device__ __forceinline__ int opaque_thread() {
  u32 thread[1] = {threadIdx.x};
  ptx::wgmma_fence_registers(thread);
  return static_cast<int>(thread[0]);
}
__device__ __forceinline__ int opaque_lane() {
  u32 lane[1] = {threadIdx.x % 32};
  ptx::wgmma_fence_registers(lane);
  return static_cast<int>(lane[0]);
}

// The weight's columns in a tile: `width` of them from `first` on, and as many from `second` on. The tile ends behind `end`
// of them, a whole number of boxes.
struct TileColumns {
  int first, second, width, end;
  __device__ __forceinline__ int operator()(int at) const { return at < width ? first + at : second + (at - width); }
};

// Calls copy(offset, c0, c1) for each box of a tile's weight that block `rank` of kSharers brings: where it goes, from
// where. Along N a box has 64 columns, along K one of kBoxes equal parts of them. Fewer slabs of 64 columns than
// sharers are shared out by their rows, of K.
template <class Layout, bool kWeightAlongN, int kSharers, int kBoxes, class Copy>
__device__ __forceinline__ void for_each_weight_box(const TileColumns& columns, int k, int rank, const Copy& copy) {
  constexpr int kAll = Layout::kBytesW / kSpan, kWidth = kWeightAlongN ? kSlabColumns : kAll / kBoxes;
  constexpr bool kShareRows = kWeightAlongN && kAll / kWidth % kSharers != 0;
  constexpr int kRows = kStageDepth / kSharers, kOwn = kShareRows ? kAll / kWidth : kAll / kWidth / kSharers;
  static_assert(kShareRows || kOwn * kSharers * kWidth == kAll, "blocks share out whole boxes");
#pragma unroll
  for (int i = 0; i < kOwn; ++i) {
    const int at = ((kShareRows ? 0 : rank * kOwn) + i) * kWidth, row = kShareRows ? rank * kRows : 0;
    if (at >= columns.end) continue;
    copy((at + row) * kSpan, kWeightAlongN ? columns(at) : k, kWeightAlongN ? k + row : columns(at));
  }
}

// One thread: starts the copies of a stage, which complete on `full`. row, columns, k: where the tile begins.
//
// kRowsX: of x that are copied, the first of a tile; TMA takes long over boxes that lie mostly outside. Products of the
// others are of what the stage held before, and are never stored.
//
// kSharers blocks of a cluster have tiles of the same columns: each copies one of kSharers parts of the weight, of rank
// `rank`, into the shared memory of all, where it completes on their barriers too.
template <class Layout, int kRowsX, bool kWeightAlongN, int kSharers, int kBoxes>
__device__ __forceinline__ void load_stage(unsigned char* stage, const TensorMap* x_map, const TensorMap* w_map,
                                           u64* full, int row, const TileColumns& columns, int k, int rank) {
  ptx::mbarrier_arrive_expect_tx(full, kRowsX * kSpan + columns.end * kSpan);
  ptx::tma_load_2d(stage, x_map, full, k, row);
  unsigned char* weight = stage + Layout::kBytesX;
  for_each_weight_box<Layout, kWeightAlongN, kSharers, kBoxes>(columns, k, rank, [&](int offset, int c0, int c1) {
    if constexpr (kSharers == 1) {
      ptx::tma_load_2d(weight + offset, w_map, full, c0, c1);
    } else {
      ptx::tma_load_multicast_2d(weight + offset, w_map, full, c0, c1, static_cast<u16>((1 << kSharers) - 1));
    }
  });
}

// One thread: this block's part of a stage's weight on its way to L2.
template <class Layout, bool kWeightAlongN, int kSharers, int kBoxes>
__device__ __forceinline__ void prefetch_weight(const TensorMap* w_map, const TileColumns& columns, int k, int rank) {
  for_each_weight_box<Layout, kWeightAlongN, kSharers, kBoxes>(
      columns, k, rank, [&](int, int c0, int c1) { ptx::tma_prefetch_2d(w_map, c0, c1); });
}

// The descriptor with another lower word, which has the start address; the upper is the same for all tiles here.
__device__ __forceinline__ u64 with_lower(u64 descriptor, u32 lower) {
  return (descriptor & 0xffffffff00000000ull) | lower;
}

// wgmma_descriptor_advance in 32 bits: the start address does not leave the lower word.
__device__ __forceinline__ u64 step_on(u64 descriptor, u32 bytes) {
  return with_lower(descriptor, static_cast<u32>(descriptor) + (bytes >> 4));
}

// By how much the descriptor of a stage's weight, from `column` of it on, is ahead of that of its x, from `row` on: so a loop
// carries one of them. Both have rows of kSpan bytes, and their eighths are as far apart; only along N the slabs' distance
// counts, which is in the lower word too.
template <class Layout, bool kWeightAlongN>
__device__ __forceinline__ u32 weight_ahead(int row, int column) {
  constexpr u32 kSlabs = kWeightAlongN ? (kStageDepth * kSpan - 16) / 16 << 16 : 0;  // along K it is 16, as x's
  return static_cast<u32>(Layout::kBytesX + (column - row) * kSpan) / 16 + kSlabs;
}

// The first of some accumulators.
template <int kFirst, int kCount>
__device__ __forceinline__ float (&first_of(float (&sum)[kCount]))[kFirst] {
  static_assert(kFirst <= kCount);
  return reinterpret_cast<float(&)[kFirst]>(sum);
}

// Starts sum[i] (+)= rows [64 i, +64) of x times the weight's first kBlockN columns, over one stage. x: its descriptor; the
// weight's is w_ahead beyond. `accumulate`: false overwrites sum.
template <class Element, int kBlockN, bool kWeightAlongN, int kRowTiles, int kCount>
__device__ __forceinline__ void multiply_stage(float (&sum)[kRowTiles][kCount], u64 x, u32 w_ahead, bool accumulate) {
  constexpr Major kMajorW = kWeightAlongN ? Major::mn : Major::k;
  constexpr int kStepW = kWeightAlongN ? kStepDepth * kSpan : kStepDepth * 2;
  const u64 w = with_lower(x, static_cast<u32>(x) + w_ahead);
#pragma unroll
  for (int step = 0; step < kStageDepth / kStepDepth; ++step) {
#pragma unroll
    for (int i = 0; i < kRowTiles; ++i) {
      ptx::wgmma<kBlockN, Element, Major::k, kMajorW>(
          first_of<kBlockN / 2>(sum[i]), step_on(x, i * 64 * kSpan + step * kStepDepth * 2), step_on(w, step * kStepW),
          accumulate || step > 0);
    }
  }
}

}  // namespace cki::gemm
