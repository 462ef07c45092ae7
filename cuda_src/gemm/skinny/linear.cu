// y[M, N] = act(x[M, K] w[K, N] + bias[N]) + residual[M, N] for few rows (M = 1 to 64), bound by reading w; sm_80 and up.
//
// Measured. H200, bf16, 1 to 16 rows of Llama-8B's products: 0.84 to 1.0 of the rate of a copy (docs/linear.md).
// Why this kernel. The generic one cuts y alone: 64 blocks for N = 4096, half of the SMs. Here the sum over K is cut too,
//          so that every SM has a block whatever N is, and x, which every block reads for itself, is read by few
//          blocks of many columns instead of many of few.
//
// Work.    A cluster of kSplit blocks computes a kBlockM x kBlockN tile of y, each block from its own part of K. In a
//          block kWarpsN x kWarpsK warps share the columns, and the K steps of every stage: then a stage is a short
//          chain of dependent instructions, and x's fragments are loaded once.
// K loop.  A ring of kStages stages in dynamic shared memory, each with 128 bytes of K of w and x, filled by cp.async
//          kStages - 1 ahead (gemm/tile_load.cuh; whole_stages.cuh for nearly all of w): with 64 columns and 8 stages, two
//          blocks an SM, 112 KB in flight.
//          kOwnRings: each warp has such a ring, and every kWarpsK-th stage; no warp waits for another before the sums.
//          kRefill: and fills a stage anew when it has read it, not a stage later, so that all kStages are under way.
//          Products are m16n8 with x's rows, zeros below M, as the 16: the tensor cores have time to spare.
// Sums.    fp32. Parts are added in shared memory over the warps, then over the cluster's blocks through distributed
//          shared memory, in a fixed order (finish.cuh): the same bits in every run, no workspace, no second launch.
//          Clusters need sm_90; before it kSplit is 1, and narrow tiles make the blocks.
// fp32.    3xTF32 (gemm/fragments.cuh), each stage added by a rounded fp32 addition; sums that come out as NaN are
//          computed again by plain additions (gemm/nonfinite.cuh says why).
// Overlap. kProgrammatic (sm_90): the launch may begin while the one before it ends. What that one may have written is read
//          only behind griddepcontrol_wait, but the first weights are on their way to L2 by then (prefetch.cuh). The next
//          one may begin when kLeft of this one's copies are left, so that it asks for its first weights (kStagesAhead)
//          when memory has nothing else to do; with -1 at once.
//
// Layouts. As in gemm/linear.cu: rows of x, residual and y over up to three axes (kRowAxes 1 or 3, extents
//          rows / extent1 / extent2 outermost first), columns with strides of their own; w is [K, N] with rows along N
//          (kWeightAlongN) or [N, K] with rows along K, w_stride between rows. All strides in elements.
//
// Grid: (ceil(N / kBlockN) * kSplit, ceil(M / kBlockM)), clusters of (kSplit, 1).
// Prelude: Element (cki::f16, cki::bf16, float), Bias (Element or float), kBlockM, kBlockN, kWarpsN, kWarpsK, kStages,
//   kOwnRings, kRefill, kMinBlocks, kSplit, kProgrammatic, kStagesAhead, kLeft, kCopyBytesX, kCopyBytesW (16, 8, 4, or the
//   element's size), kUnitStrideX, kUnitStrideW, kWeightAlongN, kRowAxes, kHasBias, kHasResidual, kActivation, kVectorY,
//   kVectorResidual (1 or 2).
// Dynamic shared memory: kStages * (kBlockM + kBlockN) * 128 bytes a ring, at least kWarpsK * kBlockM * (kBlockN + 8) * 4.
#include "common/convert_element.cuh"
#include "common/types.cuh"
#include "gemm/activation.cuh"
#include "gemm/epilogue.cuh"
#include "gemm/fragments.cuh"
#include "gemm/skinny/finish.cuh"
#include "gemm/skinny/prefetch.cuh"
#include "gemm/skinny/whole_stages.cuh"
#include "gemm/tile_load.cuh"
#include "ptx/cluster.cuh"
#include "ptx/cp_async.cuh"
#include "ptx/grid_dependency.cuh"

using namespace cki;

constexpr int kThreads = kWarpsN * kWarpsK * 32;
constexpr int kTilesM = kBlockM / 16;  // m16n8 products of a warp
constexpr int kTilesN = kBlockN / kWarpsN / 8;
constexpr int kRings = kOwnRings ? kWarpsK : 1;
constexpr int kCopiers = kOwnRings ? 32 : kThreads;
constexpr int kLead = kRefill ? kStages : kStages - 1;  // stages under way
constexpr int kSteps = gemm::kStepsPerStage / (kOwnRings ? 1 : kWarpsK);  // of a stage, for a warp
constexpr int kStageK = gemm::kTileRowBytes / static_cast<int>(sizeof(Element));
constexpr int kStageBytes = (kBlockM + kBlockN) * gemm::kTileRowBytes;
constexpr bool kSumPerStage = sizeof(Element) == 4;
static_assert(kTilesM * 16 == kBlockM && kTilesN * kWarpsN * 8 == kBlockN, "warps split the columns evenly");
static_assert(kOwnRings || kSteps * kWarpsK == gemm::kStepsPerStage, "warps split a stage's steps evenly");
static_assert(!kOwnRings || kWarpsN == 1, "a warp copies what it multiplies");
static_assert(!kRefill || kOwnRings, "nobody else reads the stage");
static_assert(kTilesN % 2 == 0, "one ldmatrix.x4 brings 16 columns of w");
static_assert(kStages >= 2, "a stage is filled while another is read");

using Weight = gemm::WeightTile<Element, kBlockN, kWeightAlongN>;
using Rows = gemm::RowOffset<kRowAxes>;
using WeightRows = gemm::RowOffset<1>;
using Sums = float[kTilesM][kTilesN][4];

// sum += the warp's K steps of one stage, for its columns from `column` on.
__device__ __forceinline__ void add_stage(Sums& sum, const unsigned char* x_tile, const unsigned char* w_tile,
                                          int first_step, int column) {
#pragma unroll
  for (int i = 0; i < kSteps; ++i) {
    u32 a[kTilesM][4];
    gemm::load_x(a, x_tile, 0, first_step + i);
#pragma unroll
    for (int pair = 0; pair < kTilesN / 2; ++pair) {
      u32 b[2][2];
      gemm::load_weight<Element, kBlockN, kWeightAlongN>(b, w_tile, column + pair * 16, first_step + i);
      gemm::add_products(sum, pair * 2, a, b, ElementTag<Element>{});
    }
  }
}

extern "C" __global__ void __launch_bounds__(kThreads, kMinBlocks)
    linear_skinny(const Element* x, const Element* w, const Bias* bias, const Element* residual, Element* y, int rows,
                  int extent1, int extent2, int columns, int depth, i64 x_stride0, i64 x_stride1, i64 x_stride2,
                  i64 residual_stride0, i64 residual_stride1, i64 residual_stride2, i64 y_stride0, i64 y_stride1,
                  i64 y_stride2, i64 w_stride, i64 x_column_stride, i64 residual_column_stride, i64 y_column_stride,
                  i64 w_column_stride, i64 bias_stride) {
  extern __shared__ __align__(128) unsigned char shared[];

  const int rank = static_cast<int>(blockIdx.x) % kSplit;  // in the cluster: which part of K
  const int first_column = static_cast<int>(blockIdx.x) / kSplit * kBlockN;
  const int first_row = static_cast<int>(blockIdx.y) * kBlockM;
  const int k_tiles = (depth + kStageK - 1) / kStageK;
  const int first_tile = static_cast<int>(static_cast<i64>(k_tiles) * rank / kSplit);
  const int block_tiles = static_cast<int>(static_cast<i64>(k_tiles) * (rank + 1) / kSplit) - first_tile;

  const gemm::Matrix<const Element, Rows> added = {
      residual, {{residual_stride0, residual_stride1, residual_stride2}, extent1, extent2},
      kVectorResidual == 2 ? 1 : residual_column_stride};
  const gemm::Matrix<Element, Rows> result = {
      y, {{y_stride0, y_stride1, y_stride2}, extent1, extent2}, kVectorY == 2 ? 1 : y_column_stride};
  const gemm::SkinnyFinish<kBlockM, kBlockN, kWarpsK, kSplit, kThreads> finish = {first_row, rows, first_column, columns,
                                                                                  rank};

  if constexpr (kProgrammatic) {
    if constexpr (kCopyBytesW == 16) {
      const int k = first_tile * kStageK, k_end = min(depth, k + min(block_tiles, kStagesAhead) * kStageK);
      gemm::prefetch_weight<kBlockN, kWeightAlongN, kThreads, (kLeft >= 0)>(w, w_stride, k, k_end, first_column, columns);
    }
    ptx::griddepcontrol_wait();
  }

  const int warp = static_cast<int>(threadIdx.x) / 32;
  const int warp_column = warp % kWarpsN * (kTilesN * 8);
  const int warp_k = warp / kWarpsN;
  const int ring = kOwnRings ? warp_k : 0;
  const int tiles = (block_tiles - ring + kRings - 1) / kRings;  // of the ring: its stages
  const int first_k = (first_tile + ring) * kStageK;
  unsigned char* const memory = shared + ring * (kStages * kStageBytes);

  const Rows x_rows = {{x_stride0, x_stride1, x_stride2}, extent1, extent2};
  const WeightRows w_rows = {{0, 0, w_stride}, 1, 1};
  gemm::WholeStages<Weight::kRows, Weight::kChunks, Weight::kSwizzle, kCopiers, Element> whole(
      w + (kWeightAlongN ? first_k * w_stride + first_column : first_column * w_stride + first_k), w_stride,
      kRings * (kWeightAlongN ? kStageK * w_stride : kStageK));
  const bool whole_columns = kCopyBytesW == 16 && first_column + kBlockN <= columns;
  const auto load_stage = [&](int tile, int slot) {
    unsigned char* x_tile = memory + slot * kStageBytes;
    unsigned char* w_tile = x_tile + kBlockM * gemm::kTileRowBytes;
    const int k = first_k + tile * (kRings * kStageK);
    if (whole_columns && k + kStageK <= depth) {
      whole.copy(w_tile);
    } else {
      gemm::copy_tile<Weight::kRows, Weight::kChunks, kCopyBytesW, Weight::kSwizzle, kCopiers>(
          w_tile, w, w_rows, kUnitStrideW ? 1 : w_column_stride, kWeightAlongN ? k : first_column,
          kWeightAlongN ? depth : columns, kWeightAlongN ? first_column : k, kWeightAlongN ? columns : depth);
    }
    whole.advance();
    gemm::copy_tile<kBlockM, gemm::kTileRowBytes / 16, kCopyBytesX, gemm::Swizzle::kRows8, kCopiers>(
        x_tile, x, x_rows, kUnitStrideX ? 1 : x_column_stride, first_row, rows, k, depth);
  };

  Sums sum = {};

  if constexpr (kProgrammatic && kLeft < 0) ptx::griddepcontrol_launch_dependents();
  // The finish reads these behind the last product, where nothing hides a latency.
  finish.template prefetch<kHasBias, kHasResidual>(bias, bias_stride, added);
  // The first turns only fill the ring: with the copies in one place the loop is a quarter of the code, which a launch
  // after other kernels has to fetch from L2 before it can ask for its first weights. A group is committed for every
  // stage, also an empty one behind the end: the count of groups then says which stage has landed.
  int slot = 0;       // of the stage that is read
  int next_slot = 0;  // of the one that is filled
#pragma unroll 1
  for (int tile = -kLead; tile < tiles; ++tile) {
    const auto fill = [&] {
      if (tile + kLead < tiles) load_stage(tile + kLead, next_slot);
      if constexpr (kProgrammatic && kLeft >= 0) {
        if (tile + kLead + 1 == max(tiles - kLeft, 1)) ptx::griddepcontrol_launch_dependents();
      }
      ptx::cp_async_commit_group();
      next_slot = next_slot + 1 < kStages ? next_slot + 1 : 0;
    };
    if (tile >= 0) {
      ptx::cp_async_wait_group<kLead - 1>();
      // Stage `tile` is there for all, and nobody reads the stage that is filled next.
      if constexpr (kOwnRings) {
        __syncwarp();
      } else {
        __syncthreads();
      }
    }
    if constexpr (!kRefill) fill();
    if (tile < 0) {
      if constexpr (kRefill) fill();
      continue;
    }
    const unsigned char* x_tile = memory + slot * kStageBytes;
    const unsigned char* w_tile = x_tile + kBlockM * gemm::kTileRowBytes;
    slot = slot + 1 < kStages ? slot + 1 : 0;
    if constexpr (kSumPerStage) {
      Sums part = {};
      add_stage(part, x_tile, w_tile, kOwnRings ? 0 : warp_k * kSteps, warp_column);
#pragma unroll
      for (int i = 0; i < kTilesM; ++i) {
#pragma unroll
        for (int j = 0; j < kTilesN; ++j) {
#pragma unroll
          for (int e = 0; e < 4; ++e) sum[i][j][e] += part[i][j][e];
        }
      }
    } else {
      add_stage(sum, x_tile, w_tile, kOwnRings ? 0 : warp_k * kSteps, warp_column);
    }
    if constexpr (kRefill) {
      __syncwarp();
      fill();
    }
  }

  // The ring's memory becomes that of the parts: every copy into it has been waited for, every warp has read its last stage.
  __syncthreads();
  float* parts = reinterpret_cast<float*>(shared);
  finish.keep_part(sum, parts, warp_k, warp_column);
  __syncthreads();
  const auto plain_dot = [&](int row, int column) {
    const Element* x_row = x + x_rows(row);
    const Element* w_column = w + column * (kWeightAlongN ? w_column_stride : w_stride);
    const i64 w_step = kWeightAlongN ? w_stride : w_column_stride;
    float dot = 0.0f;
#pragma unroll 1
    for (int k = 0; k < depth; ++k) dot = fmaf(to_float(x_row[k * x_column_stride]), to_float(w_column[k * w_step]), dot);
    return dot;
  };
  finish.template write<static_cast<gemm::Activation>(kActivation), kHasBias, kHasResidual, kSumPerStage, kVectorY,
                        kVectorResidual>(parts, bias, bias_stride, added, result, plain_dot);
}
