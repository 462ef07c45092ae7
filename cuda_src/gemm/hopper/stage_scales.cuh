// Scales of the stages of a ring of e4m3 codes: a warp beside the one that asks for codes brings them.
//
// A stage has kRoom floats for scales of x's rows, of which kRows are brought, then those of kBlocks blocks of 128 columns of w,
// and none, for whole units of 16 bytes. cp.async writes them when the stage's `empty` has completed: every thread that reads
// scales arrives there for itself. (One lane's arrival for a warp, behind __syncwarp, is an order that racecheck does not follow.)
#pragma once

#include "common/stage_ring.cuh"
#include "common/types.cuh"
#include "ptx/cp_async.cuh"

namespace cki::gemm {

template <int kRoom, int kRows, int kBlocks>
struct StageScales {
  static constexpr int kStage = kRoom + 4;  // floats
  static_assert(kRows % 32 == 0 && kRows <= kRoom && kBlocks <= 2, "what a warp's lanes bring");

  const float *x, *w, *ups;  // of a tile's first row, its columns, and with two blocks those of its ups
  i64 x_row, x_k, w_k;

  // One warp: a tile's scales, stage by stage. rows: that exist, from the first on. Its lanes' copies arrive at `full`.
  template <int kStages>
  __device__ __forceinline__ void copy(float* scales, StageRing<kStages>& ring, int rows, int k_tiles) const {
    const int lane = static_cast<int>(threadIdx.x) % 32;
#pragma unroll 1
    for (int k = 0; k < k_tiles; ++k) {
      ring.wait_empty();
      float* stage = scales + ring.stage * kStage;
#pragma unroll
      for (int i = 0; i < kRows / 32; ++i) {
        const int row = lane + i * 32;
        ptx::cp_async<4>(stage + row, x + min(row, rows - 1) * x_row + k * x_k);
      }
      if (lane < kBlocks) ptx::cp_async<4>(stage + kRoom + lane, (lane == 0 ? w : ups) + k * w_k);
      ptx::cp_async_mbarrier_arrive_noinc(ring.full + ring.stage);
      ring.advance();
    }
  }

  // Behind the last tile: copies have landed when what they brought has been read.
  template <int kStages>
  static __device__ __forceinline__ void drain(StageRing<kStages>& ring) {
#pragma unroll 1
    for (int i = 0; i < kStages; ++i) {
      ring.wait_empty();
      ring.advance();
    }
  }
};

}  // namespace cki::gemm
