// Copies of stages of a weight that lie inside it whole, 16 bytes at a time.
//
// Almost all stages of a large weight are such. copy_tile (gemm/tile_load.cuh) computes each piece's address and bounds
// anew: half of the instructions of a stage of 64 columns. Here a thread keeps one pointer, from which its pieces and its
// next stage are constant steps away.
#pragma once

#include "common/types.cuh"
#include "gemm/tile_load.cuh"
#include "ptx/cp_async.cuh"

namespace cki::gemm {

// Tiles of kRows rows of kChunks chunks, shared out over the threads as copy_tile does: the block's, or a warp's.
template <int kRows, int kChunks, Swizzle kSwizzle, int kThreads, class Element>
class WholeStages {
 public:
  // first: the first stage's first element.  row_stride, stage_step: elements from a row to the next, to the next stage.
  __device__ __forceinline__ WholeStages(const Element* first, i64 row_stride, i64 stage_step)
      : source_(first + (row() * row_stride + chunk() * kPerChunk)),
        target_(chunk_offset<kSwizzle, kChunks>(row(), chunk())),
        next_target_(chunk_offset<kSwizzle, kChunks>(row() + kRowStep, chunk()) - kRowBytes),
        rows_step_(kRowStep * row_stride),
        stage_step_(stage_step) {}

  // Towards the next stage, copied or not.
  __device__ __forceinline__ void advance() { source_ += stage_step_; }

  __device__ __forceinline__ void copy(unsigned char* tile) const {
    const Element* from = source_;
#pragma unroll
    for (int i = 0; i < kRows / kRowStep; ++i) {
      ptx::cp_async<16>(tile + (kAlternate && i % 2 != 0 ? next_target_ : target_) + i * kRowBytes, from);
      from += rows_step_;
    }
  }

 private:
  static constexpr int kPerChunk = 16 / static_cast<int>(sizeof(Element));
  static constexpr int kRowStep = kThreads / kChunks;
  static constexpr int kRowBytes = kRowStep * kChunks * 16;
  static constexpr int kPeriod = kSwizzle == Swizzle::kRows8 ? 8 : 4;
  static constexpr bool kAlternate = kRowStep % kPeriod != 0;  // rows of a thread have two permutations in turn
  static_assert(2 * kRowStep % kPeriod == 0);
  static __device__ __forceinline__ int thread() { return static_cast<int>(threadIdx.x) % kThreads; }
  static __device__ __forceinline__ int row() { return thread() / kChunks; }
  static __device__ __forceinline__ int chunk() { return thread() % kChunks; }

  const Element* source_;
  int target_;
  int next_target_;  // kAlternate: of the second row, less the rows' distance
  i64 rows_step_;
  i64 stage_step_;
};

}  // namespace cki::gemm
