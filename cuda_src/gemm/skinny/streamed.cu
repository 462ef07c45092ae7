// y[M, N] = act(x[M, K] w[K, N] + bias[N]) + residual[M, N] for few rows (M = 1 to 64) on Hopper (sm_90a): w by TMA.
//
// f16 or bf16 with fp32 sums: the same function as gemm/skinny/linear.cu, for matrices whose rows TMA can describe.
//
// Why beside linear.cu. There every thread issues its share of a stage's copies, and all warps meet at a barrier before
//          each stage: a block takes 0.10 us for a stage and 1 us for 72 KB, two on an SM 58 KB a microsecond at most
//          (H200, cki/heuristics/linear_skinny.py). Memory gives each SM 35 KB; but a product that does not occupy all
//          SMs needs more of those that it has, and each launch must catch up the time of its start. TMA brings 110 KB.
//          Not measured yet: bench/gemm.py --skinny has its tiles.
//
// Work.    A cluster of kSplit blocks computes a kBlockM x kBlockN tile of y, each block from its own part of K. With
//          kSplit = 1 blocks are persistent: block b computes tiles b, b + gridDim, ..., and the copies of the next tile are
//          under way while one is finished.
// Roles.   The last warp issues copies: it alone prepares the barriers, so the first go out before the other warps know of
//          them. The others take whole stages in turn, one warp each, and do not meet inside a tile: a warp's chain of
//          loads and products overlaps the others', and a stage is free when one warp has read it.
// Ring.    kStages stages of 64 elements of K: x, kBlockM rows of 128 bytes; w as it is stored, rows of 128 bytes along K
//          ([N, K]), or slabs of 64 columns with a row of 128 bytes for each k ([K, N]). All are swizzled by 128 bytes,
//          the permutation that ldmatrix wants (Swizzle::kRows8). TMA fills what lies outside with zeros.
// Sums.    fp32: warps' parts are added in shared memory beside the ring, then the blocks' through distributed shared
//          memory, in a fixed order (finish.cuh): the same bits in every run.
// Overlap. kProgrammatic: the launch may begin while the one before it ends. One prefetch for a whole stage brings the ring's
//          first weights towards L2, which is no read; what the other may have written is read, and y is written, only
//          behind griddepcontrol_wait.
//
// Grid: (kSplit * tiles across, or fewer with kSplit = 1; ceil(M / kBlockM)), clusters of (kSplit, 1).
// Prelude: Element (cki::f16, cki::bf16), Bias (Element or float), kBlockM, kBlockN (multiples of 16 and 64), kWarps,
//   kStages, kMinBlocks, kSplit, kProgrammatic, kWeightAlongN, kHasBias, kHasResidual, kActivation, kVectorY,
//   kVectorResidual (1 or 2).
// Boxes: x_map 64 x kBlockM; w_map 64 columns x 64 along N, 64 x kBlockN along K.
// Dynamic shared memory: kStages * (kBlockM + kBlockN) * 128 bytes, kWarps * kBlockM * (kBlockN + 8) * 4 for the sums, and
//   kStages * 16.
#include "common/convert_element.cuh"
#include "common/stage_ring.cuh"
#include "common/types.cuh"
#include "gemm/activation.cuh"
#include "gemm/epilogue.cuh"
#include "gemm/fragments.cuh"
#include "gemm/skinny/finish.cuh"
#include "gemm/tile_load.cuh"
#include "ptx/barrier.cuh"
#include "ptx/cluster.cuh"
#include "ptx/elect.cuh"
#include "ptx/fence.cuh"
#include "ptx/grid_dependency.cuh"
#include "ptx/mbarrier.cuh"
#include "ptx/tma.cuh"

using namespace cki;

constexpr int kConsumers = kWarps * 32;  // threads
constexpr int kTilesM = kBlockM / 16;    // m16n8 products of a warp
constexpr int kTilesN = kBlockN / 8;
constexpr int kStageK = 64;              // elements
constexpr int kSlabColumns = 64;         // of a weight along N
constexpr int kSlabBytes = kStageK * gemm::kTileRowBytes;
constexpr int kBytesX = kBlockM * gemm::kTileRowBytes;
constexpr int kStageBytes = kBytesX + kBlockN * gemm::kTileRowBytes;
static_assert(sizeof(Element) == 2, "a stage's row is 64 elements");
static_assert(kBlockM % 16 == 0 && kBlockN % kSlabColumns == 0 && kBlockN <= 256, "whole products, slabs and boxes");
// Else a warp could come to a stage before the copy of the round before has landed there, for which another warp waits, and
// take that round's barrier for its own: a wait names a phase by its parity alone. Between tiles all warps meet.
static_assert(kStages % kWarps == 0, "inside a tile a stage belongs to one warp");

using Ring = StageRing<kStages>;
using Finish = gemm::SkinnyFinish<kBlockM, kBlockN, kWarps, kSplit, kConsumers>;
using Sums = float[kTilesM][kTilesN][4];
using Rows = gemm::RowOffset<1>;

// Where the sums lie in shared memory, and the barriers.
constexpr int kParts = kStages * kStageBytes;
constexpr int kRing = kParts + kWarps * Finish::kPlane * static_cast<int>(sizeof(float));

// One thread: starts the copies of a stage.
__device__ __forceinline__ void load_stage(unsigned char* stage, const TensorMap* x_map, const TensorMap* w_map,
                                           u64* full, int row, int column, int k) {
  ptx::mbarrier_arrive_expect_tx(full, kStageBytes);
  unsigned char* weight = stage + kBytesX;
  if constexpr (kWeightAlongN) {
#pragma unroll
    for (int slab = 0; slab < kBlockN / kSlabColumns; ++slab)
      ptx::tma_load_2d(weight + slab * kSlabBytes, w_map, full, column + slab * kSlabColumns, k);
  } else {
    ptx::tma_load_2d(weight, w_map, full, k, column);
  }
  ptx::tma_load_2d(stage, x_map, full, k, row);
}

__device__ __forceinline__ void prefetch_stage(const TensorMap* w_map, int column, int k) {
  if constexpr (kWeightAlongN) {
#pragma unroll
    for (int slab = 0; slab < kBlockN / kSlabColumns; ++slab)
      ptx::tma_prefetch_2d(w_map, column + slab * kSlabColumns, k);
  } else {
    ptx::tma_prefetch_2d(w_map, k, column);
  }
}

// sum += the products of a whole stage.
__device__ __forceinline__ void add_stage(Sums& sum, const unsigned char* stage) {
  const unsigned char* weight = stage + kBytesX;
#pragma unroll
  for (int step = 0; step < gemm::kStepsPerStage; ++step) {
    u32 a[kTilesM][4];
    gemm::load_x(a, stage, 0, step);
#pragma unroll
    for (int pair = 0; pair < kTilesN / 2; ++pair) {
      u32 b[2][2];
      if constexpr (kWeightAlongN) {
        const int column = pair * 16;
        gemm::load_weight<Element, kSlabColumns, true>(b, weight + column / kSlabColumns * kSlabBytes,
                                                       column % kSlabColumns, step);
      } else {
        gemm::load_weight<Element, kBlockN, false>(b, weight, pair * 16, step);
      }
      gemm::add_products(sum, pair * 2, a, b, ElementTag<Element>{});
    }
  }
}

// Moves the cursor on, by at most kStages.
__device__ __forceinline__ void skip(Ring& ring, int count) {
  ring.stage += count;
  if (ring.stage >= kStages) {
    ring.stage -= kStages;
    ring.phase ^= 1;
  }
}

extern "C" __global__ void __launch_bounds__(kConsumers + 32, kMinBlocks)
    linear_streamed(const __grid_constant__ TensorMap x_map, const __grid_constant__ TensorMap w_map, const Bias* bias,
                    const Element* residual, Element* y, int rows, int columns, int depth, i64 bias_stride,
                    i64 residual_stride, i64 residual_column_stride, i64 y_stride, i64 y_column_stride) {
  extern __shared__ __align__(1024) unsigned char smem[];
  // The shuffle tells the compiler that the number, and the branches on it, are uniform in the warp.
  const int warp = __shfl_sync(0xffffffffu, static_cast<int>(threadIdx.x) / 32, 0);
  const int rank = static_cast<int>(blockIdx.x) % kSplit;  // in the cluster: which part of K
  const int first_row = static_cast<int>(blockIdx.y) * kBlockM;
  const int tiles = (columns + kBlockN - 1) / kBlockN;
  const int step = static_cast<int>(gridDim.x) / kSplit;
  const int all_k_tiles = (depth + kStageK - 1) / kStageK;
  const int first_k = static_cast<int>(static_cast<i64>(all_k_tiles) * rank / kSplit);
  const int k_tiles = static_cast<int>(static_cast<i64>(all_k_tiles) * (rank + 1) / kSplit) - first_k;
  Ring ring(smem + kRing);

  if (warp == kWarps) {
    const bool issues = ptx::elect_one();
    if (issues) {
      ptx::prefetch_tensormap(&w_map);
      ptx::prefetch_tensormap(&x_map);
      ring.initialise(1);
      ptx::fence_mbarrier_init();
      ptx::fence_proxy_async_shared();
    }
    __syncwarp();
    ptx::bar_arrive(2, kConsumers + 32);
    if (issues) {
      if constexpr (kProgrammatic) {
        for (int k = 0; k < min(k_tiles, kStages); ++k)
          prefetch_stage(&w_map, static_cast<int>(blockIdx.x) / kSplit * kBlockN, (first_k + k) * kStageK);
      }
      ptx::griddepcontrol_wait();
      ptx::griddepcontrol_launch_dependents();
      for (int tile = static_cast<int>(blockIdx.x) / kSplit; tile < tiles; tile += step) {
        for (int k = 0; k < k_tiles; ++k) {
          ring.wait_empty();
          load_stage(smem + ring.stage * kStageBytes, &x_map, &w_map, ring.full + ring.stage, first_row,
                     tile * kBlockN, (first_k + k) * kStageK);
          ring.advance();
        }
      }
    }
    __syncwarp();
    if constexpr (kSplit > 1) {  // this warp's share in the barriers of `write`
      ptx::cluster_sync();
      ptx::cluster_arrive_relaxed();
      ptx::cluster_wait();
    }
    return;
  }

  ptx::bar_sync(2, kConsumers + 32);
  ptx::griddepcontrol_wait();
  const gemm::Matrix<const Element, Rows> added = {
      residual, {{0, 0, residual_stride}, 1, 1}, kVectorResidual == 2 ? 1 : residual_column_stride};
  const gemm::Matrix<Element, Rows> result = {y, {{0, 0, y_stride}, 1, 1}, kVectorY == 2 ? 1 : y_column_stride};
  float* parts = reinterpret_cast<float*>(smem + kParts);
  for (int tile = static_cast<int>(blockIdx.x) / kSplit; tile < tiles; tile += step) {
    const Finish finish = {first_row, rows, tile * kBlockN, columns, rank};
    // The finish reads these behind the last product, where nothing hides a latency.
    finish.template prefetch<kHasBias, kHasResidual>(bias, bias_stride, added);
    Sums sum = {};
    Ring mine = ring;
    skip(mine, warp);
    for (int k = warp; k < k_tiles; k += kWarps) {
      mine.wait_full();
      add_stage(sum, smem + mine.stage * kStageBytes);
      __syncwarp();
      if (threadIdx.x % 32 == 0) ptx::mbarrier_arrive(mine.empty + mine.stage);
      skip(mine, kWarps);
    }
    const int position = ring.stage + k_tiles;  // where the next tile begins
    ring.phase ^= static_cast<u32>(position / kStages) & 1;
    ring.stage = position % kStages;

    finish.keep_part(sum, parts, warp, 0);
    ptx::bar_sync(1, kConsumers);
    const auto no_repair = [](int, int) { return 0.0f; };
    finish.template write<static_cast<gemm::Activation>(kActivation), kHasBias, kHasResidual, false, kVectorY,
                          kVectorResidual>(parts, bias, bias_stride, added, result, no_repair);
    if constexpr (kSplit == 1) ptx::bar_sync(1, kConsumers);  // the parts have been read
  }
}
