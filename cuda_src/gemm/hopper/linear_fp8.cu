// y[M, N] = x[M, K] w[N, K]^T + bias[N] of e4m3 codes with scales of blocks, on Hopper (sm_90a).
//
//   y[m, n] = sum over k of x[m, k] x_scale[m, k / 128] w[n, k] w_scale[n / 128, k / 128]
//
// as DeepSeek-V3's weights and activations are quantised (arXiv:2412.19437, 3.3); a scale a row of x, or one in all, is a
// stride of zero. kColumnScales: w has a scale for each of its rows, w_scale[n], which the tile's sums are multiplied with.
// Roles, ring, order of tiles and launch are those of gemm/hopper/linear.cu, in its cooperative form.
//
// Sums.    A stage is 128 elements of K, which have one scale. Its four products go into accumulators of their own, and
//          those, times both scales, are added to the tile's sums in fp32: the tensor core adds e4m3 products with 14
//          bits or so, which would be too few along K. Meanwhile the other consumer's products run.
// Scales.  In registers, four stages' at a time (register_scales.cuh): each lane loads those of its rows, a group ahead.
//          Copied to shared memory stage by stage they took a fifth of its time (docs/linear.md).
// Few.     kBlockM = 64, for rows of which more would be none: the consumers have 64 columns each. Memory's rate is what
//          counts then, so the blocks are many: kSplit of a cluster have one tile, each a part of K, and each finishes a part
//          of the tile for all (cluster_sum.cuh). Not persistent: a block has one tile. The first weights are on their way
//          to L2 while the launch before ends; with kWeightsEarly, which says that it does not write them, into the ring.
// Traffic. As there, of half as many bytes; 4 bytes of scales for each 128 of x.
//
// Prelude: Element (cki::f16, cki::bf16) of y, Bias (Element or float), kBlockM, kBlockN, kStages, kSplit, kWeightsEarly,
//   kColumnScales, kVectorScalesX, kVectorScalesW (scales of four stages are one load), kHasBias, kTmaStore, kVectorY,
//   kVectorBias, kProducerRegisters, kConsumerRegisters.
// Boxes: x_map 128 x kBlockM, w_map 128 x kBlockN, y_map 64 x 16, unused without kTmaStore.
// Dynamic shared memory: HopperLayout::kBytes (tiles.cuh).
#include "common/constant.cuh"
#include "common/stage_ring.cuh"
#include "common/types.cuh"
#include "common/wgmma_descriptor.cuh"
#include "gemm/hopper/cluster_sum.cuh"
#include "gemm/hopper/epilogue.cuh"
#include "gemm/hopper/register_scales.cuh"
#include "gemm/hopper/row_norm.cuh"
#include "gemm/hopper/tiles.cuh"
#include "gemm/rasterize.cuh"
#include "ptx/cluster.cuh"
#include "ptx/elect.cuh"
#include "ptx/grid_dependency.cuh"
#include "ptx/mbarrier.cuh"
#include "ptx/setmaxnreg.cuh"
#include "ptx/tma.cuh"
#include "ptx/wgmma.cuh"

using namespace cki;

constexpr int kConsumers = 2;
constexpr int kThreads = 128 * (kConsumers + 1);
constexpr int kScaledDepth = 128;  // elements of K with one scale: a stage, and a row of it
constexpr int kStepDepth = 32;     // of one product
constexpr bool kShareColumns = kBlockM == 64;
constexpr int kGroupColumns = kShareColumns ? kBlockN / kConsumers : kBlockN;  // of a consumer
constexpr int kStagesAhead = kShareColumns ? kStages : 0;
static_assert(kShareColumns || kBlockM == 64 * kConsumers, "a consumer has one wgmma tile");
static_assert(kSplit == 1 || kShareColumns, "few rows");
static_assert(!kWeightsEarly || kShareColumns, "few rows");
static_assert(kBlockN == kScaledDepth, "a tile's columns have one scale");

struct Rules {
  static constexpr gemm::Activation kActivation = gemm::Activation::kNone;
  static constexpr bool kHasBias = ::kHasBias, kBiasInSums = false, kBiasParked = false;
  static constexpr bool kHasResidual = false, kTmaStore = ::kTmaStore;
  static constexpr bool kTmaResidual = false;
  static constexpr int kBuffers = gemm::kOutputBuffers;
  static constexpr bool kGated = false, kStatistics = false;
  static constexpr gemm::RowNorm kRowNorm = gemm::RowNorm::kNone;
  static constexpr int kVectorY = ::kVectorY, kVectorBias = ::kVectorBias, kVectorResidual = 1;
};

using Layout = gemm::HopperLayout<kBlockM, kBlockN, kStages, 4 * kConsumers>;
using Ring = StageRing<kStages>;
using Pushed = gemm::PushedSum<1, kGroupColumns / 2, 4 * kConsumers, kSplit>;
static_assert(kSplit == 1 || Pushed::kFits, "each block finishes a part of the tile");

using Scales = gemm::RegisterScales<!kColumnScales, kVectorScalesX, kVectorScalesW>;

// A tile's columns times their own scales: each lane loads those of its columns.
__device__ __forceinline__ void scale_columns(float (&sum)[kGroupColumns / 2], const float* w_scale, i64 w_scale_n,
                                              int first_column, int columns) {
#pragma unroll
  for (int i = 0; i < kGroupColumns / 2; ++i) {
    const int column = first_column + i / 4 * 8 + static_cast<int>(threadIdx.x) % 4 * 2 + i % 2;
    sum[i] *= w_scale[min(column, columns - 1) * w_scale_n];
  }
}

// Starts the products of the ring's stage, which has landed, alone in `part`.
__device__ __forceinline__ void start_products(float (&part)[kGroupColumns / 2], const Ring& ring, u64 x_at, u32 w_ahead) {
  ptx::wgmma_fence();
  // The shuffle: descriptors in uniform registers, where wgmma wants them. Nothing but steps of theirs between the products.
  const u64 x = gemm::step_on(x_at, __shfl_sync(0xffffffffu, static_cast<u32>(ring.stage * Layout::kStageBytes), 0));
  const u64 w = gemm::with_lower(x, static_cast<u32>(x) + w_ahead);
#pragma unroll
  for (int step = 0; step < kScaledDepth / kStepDepth; ++step) {
    const u32 at = static_cast<u32>(step * kStepDepth);
    ptx::wgmma<kGroupColumns, e4m3>(part, gemm::step_on(x, at), gemm::step_on(w, at), step > 0);
  }
  ptx::wgmma_commit_group();
}

extern "C" __global__ void __launch_bounds__(kThreads, 1)
    linear_fp8(const __grid_constant__ TensorMap x_map, const __grid_constant__ TensorMap w_map,
               const __grid_constant__ TensorMap y_map, const float* x_scale, const float* w_scale, const Bias* bias,
               Element* y, int rows, int columns, int depth, i64 x_scale_row, i64 x_scale_k, i64 w_scale_n,
               i64 w_scale_k, i64 bias_stride, i64 y_stride, i64 y_column_stride) {
  extern __shared__ __align__(1024) unsigned char smem[];
  const int warpgroup = __shfl_sync(0xffffffffu, static_cast<int>(threadIdx.x) / 128, 0);
  const int tiles_m = (rows + kBlockM - 1) / kBlockM, tiles_n = (columns + kBlockN - 1) / kBlockN;
  const int tiles = tiles_m * tiles_n, all_k_tiles = (depth + kScaledDepth - 1) / kScaledDepth;
  const int block = static_cast<int>(blockIdx.x) / kSplit, blocks = static_cast<int>(gridDim.x) / kSplit;
  const int rank = static_cast<int>(blockIdx.x) % kSplit;  // which part of K
  const int first_k = static_cast<int>(static_cast<i64>(all_k_tiles) * rank / kSplit);
  const int k_tiles = static_cast<int>(static_cast<i64>(all_k_tiles) * (rank + 1) / kSplit) - first_k;

  Ring ring(smem + Layout::kRing);
  if (threadIdx.x == 0) {
    ptx::prefetch_tensormap(&x_map);
    ptx::prefetch_tensormap(&w_map);
    if constexpr (kTmaStore) ptx::prefetch_tensormap(&y_map);
    ring.initialise(4 * kConsumers);
    ptx::fence_mbarrier_init();
  }
  __syncthreads();
  if constexpr (kSplit > 1) ptx::cluster_arrive_relaxed();  // the block has started; who writes into it waits for that

  if (warpgroup == 0) {
    ptx::setmaxnreg_dec<kProducerRegisters>();
    if (threadIdx.x >= 32) {
      if constexpr (kSplit > 1) Pushed::pass_by();
      return;
    }
    const bool elected = ptx::elect_one();
    // The others of the warp may go, or must meet it at the cluster's end. Alone, its loop is uniform for the compiler.
    if (kSplit == 1 && !elected) return;
    if (elected) {
      const auto depth_of = [&](int k) { return (first_k + k) * kScaledDepth; };
      const auto stage_at = [&](int k) { return smem + k * Layout::kStageBytes; };
      const int ahead = min(k_tiles, kStagesAhead), first_n = gemm::tile_of_block(block, tiles_m, tiles_n).n * kBlockN;
      for (int k = 0; k < ahead; ++k) {
        if constexpr (kWeightsEarly) {
          ptx::mbarrier_arrive_expect_tx(ring.full + k, Layout::kStageBytes);
          ptx::tma_load_2d(stage_at(k) + Layout::kBytesX, &w_map, ring.full + k, depth_of(k), first_n);
        } else {  // no read, so it need not wait for the launch before
          ptx::tma_prefetch_2d(&w_map, depth_of(k), first_n);
        }
      }
      ptx::griddepcontrol_wait();
      ptx::griddepcontrol_launch_dependents();
      for (int number = block; number < tiles; number += blocks) {
        const gemm::TileIndex tile = gemm::tile_of_block(number, tiles_m, tiles_n);
        for (int k = 0; k < k_tiles; ++k) {
          ring.wait_empty();
          unsigned char* stage = stage_at(ring.stage);
          u64* full = ring.full + ring.stage;
          const bool has_weight = kWeightsEarly && number == block && k < ahead;
          if (!has_weight) ptx::mbarrier_arrive_expect_tx(full, Layout::kStageBytes);
          ptx::tma_load_2d(stage, &x_map, full, depth_of(k), tile.m * kBlockM);
          if (!has_weight) ptx::tma_load_2d(stage + Layout::kBytesX, &w_map, full, depth_of(k), tile.n * kBlockN);
          ring.advance();
        }
      }
    }
    if constexpr (kSplit > 1) {
      __syncwarp();
      Pushed::pass_by();
    }
    return;
  }

  ptx::setmaxnreg_inc<kConsumerRegisters>();
  ptx::griddepcontrol_wait();
  const int consumer = warpgroup - 1;
  const int warp = static_cast<int>(threadIdx.x) / 32 % 4, lane = static_cast<int>(threadIdx.x) % 32;
  const int group_row = kShareColumns ? 0 : consumer * 64, group_column = kShareColumns ? consumer * kGroupColumns : 0;
  const u64 x_at = wgmma_descriptor_k_major<gemm::kSpan>(smem + group_row * gemm::kSpan);
  const u32 w_ahead = gemm::weight_ahead<Layout, false>(group_row, group_column);
  gemm::OutputBuffers buffers{smem + Layout::kOutput +
                              (consumer * 4 + warp) * gemm::kOutputBuffers * gemm::kWarpSlabBytes};
  const gemm::Result<Element, Bias> result = {
      bias, kVectorBias == 2 ? 1 : bias_stride, {nullptr, {0}, 1},
      {y, {y_stride}, kVectorY == 2 ? 1 : y_column_stride}, &y_map, nullptr, rows, columns, 0, 0, nullptr, nullptr};

  for (int number = block; number < tiles; number += blocks) {
    const gemm::TileIndex tile = gemm::tile_of_block(number, tiles_m, tiles_n);
    const int first_row = tile.m * kBlockM + group_row + warp * 16, first_column = tile.n * kBlockN + group_column;
    const bool finishes = kSplit == 1 || Pushed::owner_of(consumer * 4 + warp) == rank;
    if (finishes) gemm::prefetch_inputs<Rules, 1, kGroupColumns>(result, first_row, first_column);
    const Scales::Place scales({x_scale, x_scale_row, x_scale_k}, first_row + lane / 4, rows,
                               {w_scale, w_scale_n, w_scale_k}, tile.n, first_k, k_tiles);
    Scales now, next;
    now.load(scales, 0);
    float sum[1][kGroupColumns / 2] = {};
    float part[kGroupColumns / 2];
    // Adds the products of the stage in turn, of number j in the group, when they have ended and the next stage has landed.
    const auto add_stage = [&](int j, auto is_last) {
      u64* const empty = ring.empty + ring.stage;
      ring.advance();
      if constexpr (!decltype(is_last)::kValue) ring.wait_full();  // beside this stage's products
      ptx::wgmma_wait_group<0>();
      ptx::wgmma_fence_registers(part);
      if (lane == 0) ptx::mbarrier_arrive(empty);
      const float factor[2] = {now.factor(0, j), now.factor(1, j)};
#pragma unroll
      for (int i = 0; i < kGroupColumns / 2; ++i) sum[0][i] = fmaf(part[i], factor[i / 2 % 2], sum[0][i]);
    };
    ring.wait_full();
    start_products(part, ring, x_at, w_ahead);
    int k = 0;
#pragma unroll 1
    for (; k + Scales::kGroup < k_tiles; k += Scales::kGroup) {
      next.load(scales, k + Scales::kGroup);
#pragma unroll
      for (int j = 0; j < Scales::kGroup; ++j) {
        add_stage(j, Constant<false>{});
        start_products(part, ring, x_at, w_ahead);
      }
      now = next;
    }
#pragma unroll 1
    for (; k + 1 < k_tiles; ++k) {
      add_stage(0, Constant<false>{});
      start_products(part, ring, x_at, w_ahead);
      now.shift();
    }
    add_stage(0, Constant<true>{});
    gemm::SlabColumns<Rules, Bias> held[1];
    gemm::SlabInputs<Rules, Element, Bias> inputs;
    if (finishes) {
      held[0].load(result, first_column);
      inputs.columns = held[0];
      inputs.load_rows(result, first_row, first_column);
    }
    if constexpr (kSplit > 1) {
      Pushed{smem + Layout::kOutput}.exchange(sum, consumer * 4 + warp, rank);
    }
    if (finishes) {
      if constexpr (kColumnScales) scale_columns(sum[0], w_scale, w_scale_n, first_column, columns);
      gemm::write_tile(sum, inputs, held, static_cast<const Bias*>(nullptr), result, buffers, first_row, first_column,
                       gemm::RowMoments<1>{});
    }
  }
  if constexpr (kTmaStore) buffers.drain();
}
