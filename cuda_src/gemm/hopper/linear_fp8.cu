// y[M, N] = x[M, K] w[N, K]^T + bias[N] of e4m3 codes with scales of blocks, on Hopper (sm_90a).
//
//   y[m, n] = sum over k of x[m, k] x_scale[m, k / 128] w[n, k] w_scale[n / 128, k / 128]
//
// as DeepSeek-V3's weights and activations are quantised (arXiv:2412.19437, 3.3); a scale a row, or one in all, is a
// stride of zero. Roles, ring, order of tiles and launch are those of gemm/hopper/linear.cu, in its cooperative form.
//
// Sums.    A stage is 128 elements of K, which have one scale. Its four products go into accumulators of their own, and
//          those, times both scales, are added to the tile's sums in fp32: the tensor core adds e4m3 products with 14
//          bits or so, which would be too few along K. With kParts = 2 the next stage's products, in other accumulators,
//          run meanwhile; with 1 only the other consumer's do, but a tile may have 192 columns.
// Turns.   Consumer 1 begins a tile when consumer 0 has begun kLag stages of it, and so ends later: one finishes its half
//          beside the other's products. Stages that both have not read are not filled: a long lag takes from the ring.
// Scales.  A warp beside the producer copies a stage's 128 scales of rows and those of columns behind its codes
//          (cp.async, which arrives at the stage's barrier): consumers that loaded them would wait for memory in front
//          of their next products.
// Sharers. kSharers = 2: the blocks of a cluster compute tiles below each other, and each brings half of their weight for
//          both (multicast). A stage is free when both blocks' consumers have read it.
// Traffic. As there, of half as many bytes; 4 bytes of scales for each 128 of x.
//
// Prelude: Element (cki::f16, cki::bf16) of y, Bias (Element or float), kBlockM, kBlockN, kStages, kParts, kLag, kSharers,
//   kOutputs (buffers of a warp for results), kHasBias, kTmaStore, kVectorY, kVectorBias, kProducerRegisters,
//   kConsumerRegisters.
// Boxes: x_map 128 x kBlockM, w_map 128 x kBlockN / kSharers, y_map 64 x 16, unused without kTmaStore.
// Dynamic shared memory: HopperLayout::kBytes (tiles.cuh), and kScaleBytes a stage.
#include "common/stage_ring.cuh"
#include "common/types.cuh"
#include "common/wgmma_descriptor.cuh"
#include "gemm/hopper/epilogue.cuh"
#include "gemm/hopper/row_norm.cuh"
#include "gemm/hopper/tiles.cuh"
#include "gemm/rasterize.cuh"
#include "ptx/barrier.cuh"
#include "ptx/cluster.cuh"
#include "ptx/cp_async.cuh"
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
static_assert(kBlockM == 64 * kConsumers, "a consumer has one wgmma tile");
static_assert(kBlockN % 64 == 0 && kBlockN <= 192, "a tile's columns have one scale, or two");
static_assert(kParts == 1 || kBlockN <= 128, "sums and both parts of them in registers");
constexpr int kGroups = kBlockN / 64;                                   // of columns with one scale
constexpr int kColumnScales = kBlockN == 64 || kBlockN == 128 ? 1 : 2;  // a tile begins with a scale, or amid one
constexpr int kSharedColumns = kBlockN / kSharers;                      // of the weight, that a block brings

struct Rules {
  static constexpr gemm::Activation kActivation = gemm::Activation::kNone;
  static constexpr bool kHasBias = ::kHasBias, kHasResidual = false, kTmaStore = ::kTmaStore;
  static constexpr bool kTmaResidual = false;
  static constexpr int kBuffers = kOutputs;
  static constexpr bool kGated = false, kStatistics = false;
  static constexpr gemm::RowNorm kRowNorm = gemm::RowNorm::kNone;
  static constexpr int kVectorY = ::kVectorY, kVectorBias = ::kVectorBias, kVectorResidual = 1;
};

using Layout = gemm::HopperLayout<kBlockM, kBlockN, kStages, 4 * kConsumers, kOutputs>;
using Ring = StageRing<kStages>;

constexpr int kStageScales = kBlockM + 4;  // floats: rows', the columns', and none, for whole units of 16 bytes
static_assert(Layout::kBytes % 16 == 0, "scales begin at a whole unit");

// One warp: a tile's scales, stage by stage, with the producer's cursor. x_scale, w_scale: of the tile's first row and
// column; `rows`, `blocks`: that exist from there on, at least of columns. Its lanes' copies arrive at `full`.
__device__ __forceinline__ void copy_scales(float* scales, Ring& ring, const float* x_scale, const float* w_scale,
                                            int rows, int blocks, int k_tiles, i64 x_scale_row, i64 x_scale_k,
                                            i64 w_scale_n, i64 w_scale_k) {
  const int lane = static_cast<int>(threadIdx.x) % 32;
#pragma unroll 1
  for (int k = 0; k < k_tiles; ++k) {
    ring.wait_empty();
    float* stage = scales + ring.stage * kStageScales;
#pragma unroll
    for (int i = 0; i < kBlockM / 32; ++i) {
      const int row = lane + i * 32;
      ptx::cp_async<4>(stage + row, x_scale + min(row, rows - 1) * x_scale_row + k * x_scale_k);
    }
    if (lane < kColumnScales) {
      ptx::cp_async<4>(stage + kBlockM + lane, w_scale + min(lane, blocks - 1) * w_scale_n + k * w_scale_k);
    }
    ptx::cp_async_mbarrier_arrive_noinc(ring.full + ring.stage);
    ring.advance();
  }
}

// Waits for the ring's stage and starts its products, alone in `part`.
__device__ __forceinline__ void start_products(float (&part)[kBlockN / 2], Ring& ring, u64 x_at, u64 w_at) {
  ring.wait_full();
  ptx::wgmma_fence();
  const u32 stage = static_cast<u32>(ring.stage * Layout::kStageBytes);
#pragma unroll
  for (int step = 0; step < kScaledDepth / kStepDepth; ++step) {
    const u32 at = stage + static_cast<u32>(step * kStepDepth);
    ptx::wgmma<kBlockN, e4m3>(part, wgmma_descriptor_advance(x_at, at), wgmma_descriptor_advance(w_at, at), step > 0);
  }
  ptx::wgmma_commit_group();
  ring.advance();
}

// The warp is done with the ring's stage: all blocks that copy into it may do so again.
__device__ __forceinline__ void release(Ring& ring) {
  if constexpr (kSharers == 1) {
    ring.release();
  } else {
    const u32 lane = threadIdx.x % 32;
    if (lane < kSharers) ptx::mbarrier_arrive_cluster_unordered(ring.empty + ring.stage, lane);
    ring.advance();
  }
}

// The cluster's last barrier: no block's shared memory is gone before the others have arrived at its barriers.
__device__ __forceinline__ void end_cluster() {
  if constexpr (kSharers > 1) {
    ptx::cluster_arrive_relaxed();
    ptx::cluster_wait();
  }
}

extern "C" __global__ void __launch_bounds__(kThreads, 1)
    linear_fp8(const __grid_constant__ TensorMap x_map, const __grid_constant__ TensorMap w_map,
               const __grid_constant__ TensorMap y_map, const float* x_scale, const float* w_scale, const Bias* bias,
               Element* y, int rows, int columns, int depth, i64 x_scale_row, i64 x_scale_k, i64 w_scale_n,
               i64 w_scale_k, i64 bias_stride, i64 y_stride, i64 y_column_stride) {
  extern __shared__ __align__(1024) unsigned char smem[];
  const int warpgroup = __shfl_sync(0xffffffffu, static_cast<int>(threadIdx.x) / 128, 0);
  const int tiles_m = (rows + kSharers * kBlockM - 1) / (kSharers * kBlockM);  // of clusters
  const int tiles_n = (columns + kBlockN - 1) / kBlockN;
  const int tiles = tiles_m * tiles_n, k_tiles = (depth + kScaledDepth - 1) / kScaledDepth;
  const int block = static_cast<int>(blockIdx.x) / kSharers, blocks = static_cast<int>(gridDim.x) / kSharers;
  const int m_part = static_cast<int>(blockIdx.x) % kSharers;  // which of the cluster's tiles

  Ring ring(smem + Layout::kRing);
  float* const scales = reinterpret_cast<float*>(smem + Layout::kBytes);
  if (threadIdx.x == 0) {
    ptx::prefetch_tensormap(&x_map);
    ptx::prefetch_tensormap(&w_map);
    if constexpr (kTmaStore) ptx::prefetch_tensormap(&y_map);
    ring.initialise(kSharers * 4 * kConsumers, 1 + 32);
    ptx::fence_mbarrier_init();
  }
  if constexpr (kSharers > 1) {
    ptx::cluster_sync();
  } else {
    __syncthreads();
  }

  if (warpgroup == 0) {
    ptx::setmaxnreg_dec<kProducerRegisters>();
    if (threadIdx.x / 32 == 1) {
      ptx::griddepcontrol_wait();
      for (int number = block; number < tiles; number += blocks) {
        const gemm::TileIndex tile = gemm::tile_of_block(number, tiles_m, tiles_n);
        const int row = min((tile.m * kSharers + m_part) * kBlockM, rows - 1);  // a cluster's last tile may have none
        const int scale = tile.n * kBlockN / kScaledDepth, last = (columns - 1) / kScaledDepth;
        copy_scales(scales, ring, x_scale + row * x_scale_row, w_scale + scale * w_scale_n, rows - row,
                    last - scale + 1, k_tiles, x_scale_row, x_scale_k, w_scale_n, w_scale_k);
      }
#pragma unroll 1
      for (int i = 0; i < kStages; ++i) {  // its copies have landed when what they brought has been read
        ring.wait_empty();
        ring.advance();
      }
    }
    if (threadIdx.x >= 32) {
      end_cluster();
      return;
    }
    const bool elected = ptx::elect_one();
    if (kSharers == 1 && !elected) return;
    if (elected) {
      ptx::griddepcontrol_wait();
      ptx::griddepcontrol_launch_dependents();
      for (int number = block; number < tiles; number += blocks) {
        const gemm::TileIndex tile = gemm::tile_of_block(number, tiles_m, tiles_n);
        const int row = (tile.m * kSharers + m_part) * kBlockM;
        for (int k = 0; k < k_tiles; ++k) {
          ring.wait_empty();
          unsigned char* stage = smem + ring.stage * Layout::kStageBytes;
          u64* full = ring.full + ring.stage;
          ptx::mbarrier_arrive_expect_tx(full, Layout::kStageBytes);
          ptx::tma_load_2d(stage, &x_map, full, k * kScaledDepth, row);
          unsigned char* weight = stage + Layout::kBytesX + m_part * kSharedColumns * gemm::kSpan;
          const int column = tile.n * kBlockN + m_part * kSharedColumns;
          if constexpr (kSharers == 1) {
            ptx::tma_load_2d(weight, &w_map, full, k * kScaledDepth, column);
          } else {
            constexpr u16 kAll = (1 << kSharers) - 1;
            ptx::tma_load_multicast_2d(weight, &w_map, full, k * kScaledDepth, column, kAll);
          }
          ring.advance();
        }
      }
      if constexpr (kSharers > 1) {  // no arrival of another block may find this one gone
#pragma unroll 1
        for (int i = 0; i < kStages; ++i) {
          ring.wait_empty();
          ring.advance();
        }
      }
    }
    if constexpr (kSharers > 1) __syncwarp();
    end_cluster();
    return;
  }

  ptx::setmaxnreg_inc<kConsumerRegisters>();
  ptx::griddepcontrol_wait();
  const int consumer = warpgroup - 1;
  const int warp = static_cast<int>(threadIdx.x) / 32 % 4, lane = static_cast<int>(threadIdx.x) % 32;
  const u64 x_at = wgmma_descriptor_k_major<gemm::kSpan>(smem + consumer * 64 * gemm::kSpan);
  const u64 w_at = wgmma_descriptor_k_major<gemm::kSpan>(smem + Layout::kBytesX);
  gemm::OutputBuffers buffers{smem + Layout::kOutput +
                              (consumer * 4 + warp) * kOutputs * gemm::kWarpSlabBytes};
  const gemm::Result<Element, Bias> result = {
      bias, kVectorBias == 2 ? 1 : bias_stride, {nullptr, {0}, 1},
      {y, {y_stride}, kVectorY == 2 ? 1 : y_column_stride}, &y_map, nullptr, rows, columns, 0, 0, nullptr, nullptr};

  // With fewer stages the ring holds several tiles, and the first consumer could be tiles ahead.
  const bool in_turns = k_tiles > kStages + kLag;
  for (int number = block; number < tiles; number += blocks) {
    const gemm::TileIndex tile = gemm::tile_of_block(number, tiles_m, tiles_n);
    const int first_row = (tile.m * kSharers + m_part) * kBlockM + consumer * 64 + warp * 16;
    const int first_column = tile.n * kBlockN;
    gemm::prefetch_inputs<Rules, 1, kBlockN>(result, first_row, first_column);
    float sum[1][kBlockN / 2] = {};
    Ring done = ring;  // at the oldest stage with products
    // The scales of that stage, which has landed, for each 64 columns.
    const auto load_factors = [&](float(&factor)[kGroups][2]) {
      const float* stage = scales + done.stage * kStageScales;
      const float* own = stage + consumer * 64 + warp * 16 + lane / 4;
      const float upper = own[0], lower = own[8];
#pragma unroll
      for (int group = 0; group < kGroups; ++group) {
        const int block_of_group = first_column % kScaledDepth / 64 + group;
        const float of_columns = stage[kBlockM + (kColumnScales == 1 ? 0 : block_of_group / 2)];
        factor[group][0] = upper * of_columns;
        factor[group][1] = lower * of_columns;
      }
    };
    // Adds its products, which have ended.
    const auto add_stage = [&](float(&part)[kBlockN / 2], const float(&factor)[kGroups][2]) {
      ptx::wgmma_fence_registers(part);
      __syncwarp();  // all lanes have read the stage's scales
      release(done);
#pragma unroll
      for (int i = 0; i < kBlockN / 2; ++i) sum[0][i] = fmaf(part[i], factor[i / 32][i / 2 % 2], sum[0][i]);
    };
    int ahead = in_turns && consumer == 0 ? kLag : 0;  // stages until the other consumer begins
    const auto begun = [&] {
      if (ahead > 0 && --ahead == 0) ptx::bar_arrive(1, 128 * kConsumers);
    };
    if (in_turns && consumer == 1) ptx::bar_sync(1, 128 * kConsumers);
    float factor[kGroups][2];
    if constexpr (kParts == 1) {
      float part[kBlockN / 2];
#pragma unroll 1
      for (int k = 0; k < k_tiles; ++k) {
        start_products(part, ring, x_at, w_at);
        load_factors(factor);
        ptx::wgmma_wait_group<0>();
        begun();  // the other's products run while these are added
        add_stage(part, factor);
      }
    } else {
      float even[kBlockN / 2], odd[kBlockN / 2];  // products of stages in turn
      int k = 0;
      start_products(even, ring, x_at, w_at);
      begun();
      for (; k + 2 < k_tiles; k += 2) {
        start_products(odd, ring, x_at, w_at);
        load_factors(factor);
        begun();
        ptx::wgmma_wait_group<1>();
        add_stage(even, factor);
        start_products(even, ring, x_at, w_at);
        load_factors(factor);
        begun();
        ptx::wgmma_wait_group<1>();
        add_stage(odd, factor);
      }
      if (k + 1 < k_tiles) {
        start_products(odd, ring, x_at, w_at);
        load_factors(factor);
        ptx::wgmma_wait_group<1>();
        add_stage(even, factor);
        load_factors(factor);
        ptx::wgmma_wait_group<0>();
        add_stage(odd, factor);
      } else {
        load_factors(factor);
        ptx::wgmma_wait_group<0>();
        add_stage(even, factor);
      }
    }
    gemm::SlabInputs<Rules, Element, Bias> inputs;
    inputs.load(result, first_row, first_column);
    gemm::write_tile(sum, inputs, result, buffers, first_row, first_column, gemm::RowMoments<1>{});
  }
  if constexpr (kTmaStore) buffers.drain();
  end_cluster();
}
