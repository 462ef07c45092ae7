// y[M, N] = act(x[M, K] w[K, N] + bias[N]) + residual[M, N] of fp32 on Hopper (sm_90a): 3xTF32 by wgmma.
//
// The same function as gemm/linear.cu, for matrices whose rows TMA can describe. Roles, ring, order of tiles and launch are
// those of gemm/hopper/linear.cu, in its cooperative form; what is added is a warpgroup that splits.
//
// Split.   x = high + low, both tf32, as in common/split_tf32.cuh, and so is w. wgmma reads both from shared memory, K-major: so
//          the splitters turn what TMA has brought into high parts, where it lies, and low parts beside them, each
//          element once for a tile. A weight [K, N] lands where its low parts go, from where they take it into registers,
//          4 x 4 elements at a time, and store both parts transposed.
// Sums.    A stage is 32 elements of K: low high' + high low' + high high', in accumulators of their own, which are
//          added to the tile's sums in fp32, because tensor cores cut sums off. The other consumer's products run meanwhile.
// Infinite. Sums that come out as NaN are computed again by plain additions (gemm/nonfinite.cuh says why).
// Ring.    TMA -> `full` -> splitters -> `split` -> consumers -> `empty` -> TMA. 64 KB a stage.
//
// Prelude: kStages, kWeightAlongN (w is [K, N], else [N, K]), kHasBias, kHasResidual, kActivation, kVectorY,
//   kVectorResidual (1 or 2: elements an access), kProducerRegisters, kSplitterRegisters, kConsumerRegisters.
// Boxes: x_map 32 x 128; w_map 32 x 128 along K, 32 columns x 32 along N.
// Dynamic shared memory: kStages * kStageBytes, and three barriers a stage.
#include "common/stage_ring.cuh"
#include "common/types.cuh"
#include "common/wgmma_descriptor.cuh"
#include "gemm/activation.cuh"
#include "gemm/epilogue.cuh"
#include "gemm/hopper/split_stage.cuh"
#include "gemm/hopper/tiles.cuh"
#include "gemm/nonfinite.cuh"
#include "gemm/rasterize.cuh"
#include "ptx/elect.cuh"
#include "ptx/fence.cuh"
#include "ptx/grid_dependency.cuh"
#include "ptx/mbarrier.cuh"
#include "ptx/setmaxnreg.cuh"
#include "ptx/tma.cuh"
#include "ptx/wgmma.cuh"

using namespace cki;

constexpr int kConsumers = 2;
constexpr int kThreads = 128 * (kConsumers + 2);
constexpr int kBlockM = 64 * kConsumers, kBlockN = 128;
constexpr int kStageDepth = 32, kStepDepth = 8, kSpan = 128;  // elements of K of a stage, of a product; bytes of a row
constexpr int kPartBytes = 128 * kSpan;                       // 128 rows of x's or w's high or low parts
constexpr int kStageBytes = 4 * kPartBytes;
constexpr int kHighW = kPartBytes, kLowX = 2 * kPartBytes, kLowW = 3 * kPartBytes;  // where they lie; x's high first
static_assert(kBlockM * kSpan == kPartBytes && kBlockN * kSpan == kPartBytes);

using Ring = StageRing<kStages>;

// Row offsets of matrices whose rows are evenly spaced.
struct EvenRows {
  i64 stride;
  __device__ __forceinline__ i64 operator()(int row) const { return row * stride; }
};

// One thread: starts a stage's copies.
__device__ __forceinline__ void load_stage(unsigned char* stage, const TensorMap* x_map, const TensorMap* w_map, u64* full,
                                           int row, int column, int k) {
  ptx::mbarrier_arrive_expect_tx(full, 2 * kPartBytes);
  ptx::tma_load_2d(stage, x_map, full, k, row);
  if constexpr (kWeightAlongN) {
#pragma unroll
    for (int slab = 0; slab < kBlockN / 32; ++slab) {
      ptx::tma_load_2d(stage + kLowW + slab * kStageDepth * kSpan, w_map, full, column + slab * 32, k);
    }
  } else {
    ptx::tma_load_2d(stage + kHighW, w_map, full, k, column);
  }
}

// part (+)= 64 rows of a times 128 columns of b, over a stage.
__device__ __forceinline__ void multiply_parts(float (&part)[kBlockN / 2], u64 a, u64 b, bool accumulate) {
#pragma unroll
  for (int step = 0; step < kStageDepth / kStepDepth; ++step) {
    constexpr int kStepBytes = kStepDepth * 4;
    ptx::wgmma<kBlockN, float>(part, gemm::step_on(a, step * kStepBytes), gemm::step_on(b, step * kStepBytes),
                               accumulate || step > 0);
  }
}

extern "C" __global__ void __launch_bounds__(kThreads, 1)
    linear_fp32(const __grid_constant__ TensorMap x_map, const __grid_constant__ TensorMap w_map, const float* x,
                const float* w, const float* bias, const float* residual, float* y, int rows, int columns, int depth,
                i64 x_stride, i64 w_stride_k, i64 w_stride_n, i64 bias_stride, i64 residual_stride,
                i64 residual_column_stride, i64 y_stride, i64 y_column_stride) {
  extern __shared__ __align__(1024) unsigned char smem[];
  const int warpgroup = __shfl_sync(0xffffffffu, static_cast<int>(threadIdx.x) / 128, 0);
  const int tiles_m = (rows + kBlockM - 1) / kBlockM, tiles_n = (columns + kBlockN - 1) / kBlockN;
  const int tiles = tiles_m * tiles_n, k_tiles = (depth + kStageDepth - 1) / kStageDepth;
  const int block = static_cast<int>(blockIdx.x), blocks = static_cast<int>(gridDim.x);

  Ring ring(smem + kStages * kStageBytes);
  u64* const split = reinterpret_cast<u64*>(smem + kStages * kStageBytes + Ring::kBytes);  // a stage's parts are there
  if (threadIdx.x == 0) {
    ptx::prefetch_tensormap(&x_map);
    ptx::prefetch_tensormap(&w_map);
    ring.initialise(4 * kConsumers);
    for (int i = 0; i < kStages; ++i) ptx::mbarrier_init(split + i, 128);
    ptx::fence_mbarrier_init();
  }
  __syncthreads();

  if (warpgroup == 0) {
    ptx::setmaxnreg_dec<kProducerRegisters>();
    if (threadIdx.x >= 32 || !ptx::elect_one()) return;
    ptx::griddepcontrol_wait();
    ptx::griddepcontrol_launch_dependents();
    for (int number = block; number < tiles; number += blocks) {
      const gemm::TileIndex tile = gemm::tile_of_block(number, tiles_m, tiles_n);
      for (int k = 0; k < k_tiles; ++k) {
        ring.wait_empty();
        load_stage(smem + ring.stage * kStageBytes, &x_map, &w_map, ring.full + ring.stage, tile.m * kBlockM,
                   tile.n * kBlockN, k * kStageDepth);
        ring.advance();
      }
    }
    return;
  }

  if (warpgroup == 1) {
    ptx::setmaxnreg_dec<kSplitterRegisters>();
    for (int number = block; number < tiles; number += blocks) {
      for (int k = 0; k < k_tiles; ++k) {
        ring.wait_full();
        unsigned char* stage = smem + ring.stage * kStageBytes;
        gemm::split_along_k<kPartBytes>(stage, stage + kLowX);
        if constexpr (kWeightAlongN) {
          gemm::split_along_n(stage + kHighW, stage + kLowW);
        } else {
          gemm::split_along_k<kPartBytes>(stage + kHighW, stage + kLowW);
        }
        ptx::fence_proxy_async_shared();
        ptx::mbarrier_arrive(split + ring.stage);
        ring.advance();
      }
    }
    return;
  }

  ptx::setmaxnreg_inc<kConsumerRegisters>();
  ptx::griddepcontrol_wait();
  const int consumer = warpgroup - 2;
  const int warp = static_cast<int>(threadIdx.x) / 32 % 4;
  const u64 high_x = wgmma_descriptor_k_major<kSpan>(smem + consumer * 64 * kSpan);
  const u64 high_w = wgmma_descriptor_k_major<kSpan>(smem + kHighW);
  const gemm::Matrix<const float, EvenRows> added = {residual, {residual_stride},
                                                     kVectorResidual == 2 ? 1 : residual_column_stride};
  const gemm::Matrix<float, EvenRows> result = {y, {y_stride}, kVectorY == 2 ? 1 : y_column_stride};
  const auto plain_dot = [&](int row, int column) {
    const float* x_row = x + row * x_stride;
    const float* w_column = w + column * w_stride_n;
    float dot = 0.0f;
#pragma unroll 1
    for (int k = 0; k < depth; ++k) dot = fmaf(x_row[k], w_column[k * w_stride_k], dot);
    return dot;
  };

  for (int number = block; number < tiles; number += blocks) {
    const gemm::TileIndex tile = gemm::tile_of_block(number, tiles_m, tiles_n);
    const int first_row = tile.m * kBlockM + consumer * 64 + warp * 16, first_column = tile.n * kBlockN;
    constexpr int kHalves = 2, kTiles = kBlockN / 8 / kHalves;  // of the columns; m16n8 tiles of a half
    float sum[kHalves][1][kTiles][4] = {};
    for (int k = 0; k < k_tiles; ++k) {
      float part[kBlockN / 2];
      ptx::mbarrier_wait_parity(split + ring.stage, ring.phase);
      ptx::wgmma_fence();
      // The shuffle: descriptors in uniform registers, fewer instructions.
      const u32 stage = __shfl_sync(0xffffffffu, static_cast<u32>(ring.stage * kStageBytes), 0);
      const u64 a = gemm::step_on(high_x, stage), b = gemm::step_on(high_w, stage);
      multiply_parts(part, gemm::step_on(a, kLowX), b, false);
      multiply_parts(part, a, gemm::step_on(b, kLowW - kHighW), true);
      multiply_parts(part, a, b, true);
      ptx::wgmma_commit_group();
      ptx::wgmma_wait_group<0>();
      ptx::wgmma_fence_registers(part);
      ring.release();
#pragma unroll
      for (int i = 0; i < kBlockN / 2; ++i) sum[i / (4 * kTiles)][0][i / 4 % kTiles][i % 4] += part[i];
    }
#pragma unroll
    for (int half = 0; half < kHalves; ++half) {
      const int column = first_column + half * (kBlockN / kHalves);
      gemm::recompute_nan(sum[half], first_row, rows, column, columns, plain_dot);
      gemm::write_result<static_cast<gemm::Activation>(kActivation), kHasBias, kHasResidual, kVectorY, kVectorResidual>(
          sum[half], bias, bias_stride, added, result, first_row, rows, column, columns);
    }
  }
}
