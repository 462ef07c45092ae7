// y[M, N] = act(n w^T + bias) + residual of up to 64 tokens, on Hopper (sm_90a), bound by reading w.
//
//   n = x, or RMS norm: x / rms(x) * gamma (kNorm)      gates, kGated: act(n wg^T + bias_g) * (n wu^T + bias_u), w [2 N, K]
//
// x is bf16; w too, or e4m3 with a scale for each block of 128 x 128 (W8A16), then for 17 to 64 tokens: linear_tokens_e4m3.cu
// takes fewer.
//
// Why beside gemm/skinny. Those kernels keep x whole in every block, or cut K by clusters: they have too little room from a few
//          tokens on, or leave SMs idle. Here both operands come stage by stage through a ring of TMA's, and every block has as
//          many stages as any other (even_work.cuh): all SMs ask for memory until the end of the launch.
// Product. y^T = w n^T: w's rows are the 64 of a wgmma, tokens its N of 8 to 64, so few tokens waste nothing. With gates w's rows
//          come eight of the gates', eight of the ups' (the order of w_map): a thread has both of a column.
// Codes.   A consumer reads its codes from shared memory as 16-byte words, moves their bits into bf16 registers
//          (decode_operand.cuh) and multiplies from there. A lane's words are not the elements of K that wgmma's layout gives it,
//          so n lies in shared memory in the order that makes up for it: position 16 i + 2 t + {0, 1, 8, 9} of a stage holds
//          element 32 t + 4 i + {0, 2, 1, 3}, t = 0..3, i = 0..7.
// n.       Four warps make it of each stage of x: times gamma, for codes in that order and times 2^60 (decode_operand.cuh),
//          rounded once; and they add up x's squares. 1 / rms(x) is a factor of a whole row, and is applied to the sums. So a norm
//          costs no launch and no second pass over x. Plain bf16 operands without a norm are multiplied where they land.
// Scales.  A stage of a tile has one, with gates two. With a norm and one scale n is multiplied by it before it is rounded;
//          else the stage's 128 products are, in sums of their own.
// Sums.    fp32. Parts of a tile are added in the order of the blocks.
// Overlap. Weights and gamma are read before the launch before has ended, so that one must not write them.
//
// K is a multiple of 8, with codes of 16; with gates N is one of 64. Strides in elements; columns of y and residual are dense.
//
// Grid: blocks, one an SM. Prelude: Code (cki::bf16, cki::e4m3), Bias (cki::bf16 or float), kTokens (8, 16, 32, 64), kStages,
//   kNorm, kGated, kActivation, kHasBias, kHasResidual.
// Boxes: w_map kDepth x 128 rows, or with gates kDepth x 8 x 2 x 8 (K, row of eight, gate or up, eight); x_map 64 x tokens.
// parts: kPartFloats floats for each of 2 slots a block. counters: kConsumerWarps zeros a tile.
// Dynamic shared memory: kSharedBytes.
#include "common/types.cuh"
#include "gemm/hopper/token_arrange.cuh"
#include "gemm/hopper/token_products.cuh"
#include "gemm/hopper/token_stages.cuh"
#include "ptx/fence.cuh"
#include "ptx/grid_dependency.cuh"
#include "ptx/mbarrier.cuh"
#include "ptx/memory.cuh"
#include "ptx/setmaxnreg.cuh"
#include "ptx/tma.cuh"

using namespace cki;
using namespace cki::gemm;

// One thread: brings a block's stages, the first weights before the launch before has ended.
__device__ __forceinline__ void produce(const Shared& shared, const TensorMap& x_map, const TensorMap& w_map,
                                        const EvenWork& work, int block, int tokens) {
  const u32 stage_bytes = static_cast<u32>(kBytesW + kDepth / 64 * tokens * kSpan);
  const int begin = work.first_stage(block), end = work.first_stage(block + 1);
  Ring ring = shared.ring();
  const auto load_w = [&](int stage) {
    const int tile = stage / work.tile_stages, k = (stage - tile * work.tile_stages) * kDepth;
    unsigned char* to = shared.memory + ring.stage * kStageBytes;
    u64* full = ring.full + ring.stage;
    ptx::mbarrier_arrive_expect_tx(full, stage_bytes);
    if constexpr (kGated) {
      ptx::tma_load_4d(to, &w_map, full, k, 0, 0, tile * (kTileColumns / 8));
    } else {
      ptx::tma_load_2d(to, &w_map, full, k, tile * kTileColumns);
    }
  };
  const auto load_x = [&](int stage) {
    const int k = stage % work.tile_stages * kDepth;
    unsigned char* to = shared.memory + ring.stage * kStageBytes + kBytesW;
    u64* full = ring.full + ring.stage;
#pragma unroll
    for (int box = 0; box < kDepth / 64; ++box) ptx::tma_load_2d(to + box * kBox, &x_map, full, k + box * 64, 0);
  };
  const int ahead = min(begin + kStages, end);
  for (int stage = begin; stage < ahead; ++stage) {
    load_w(stage);
    ring.advance();
  }
  ptx::griddepcontrol_wait();
  ring = shared.ring();
  for (int stage = begin; stage < ahead; ++stage) {
    load_x(stage);
    ring.advance();
  }
  for (int stage = ahead; stage < end; ++stage) {
    ring.wait_empty();
    load_w(stage);
    load_x(stage);
    ring.advance();
  }
}

// The consumers: a block's tiles, part by part.
__device__ __forceinline__ void consume(const Shared& shared, const EvenWork& work, int block, const Output& out,
                                        const float* scales, i64 scale_stride) {
  const Place place;
  const int warp = place.thread / 32;
  Ring ring = shared.ring();
  ArrangedRing arranged = shared.arranged();
  SquaresRing squares_ring = shared.squares_ring();
  for_each_part(work, block, [&](const WorkPart& part) {
    float sum[kSums] = {};
    const int tile = part.tile;
    if constexpr (kCodes) {
      const int row = tile * kTileColumns;
      multiply_codes(sum, shared, ring, arranged, place, part, scales + row / kScaleBlock * scale_stride,
                     scales + (kGated ? out.columns + row : row) / kScaleBlock * scale_stride);
    } else {
      multiply_plain(sum, shared, ring, arranged, place, part);
    }
    Squares squares = {};
    if constexpr (kNorm) {
      squares_ring.wait_full();
      const float* arranged_squares = shared.squares();
#pragma unroll
      for (int i = 0; i < kLaneTokens; ++i) {
        const int token = lane() + i * 32;
        if (token >= kTokens) continue;
        squares[i] = arranged_squares[token];
        if constexpr (kStepGroups > 1) squares[i] += arranged_squares[kTokens + token];
      }
      squares_ring.release_by_one();
    }
    finish_part(sum, squares, shared.warp_squares(warp), work, out, block, tile, place);
  });
}

extern "C" __global__ void __launch_bounds__(kThreads, 1)
    linear_tokens(const __grid_constant__ TensorMap x_map, const __grid_constant__ TensorMap w_map, const float* scales,
                 const Bias* bias, const bf16* residual, bf16* y, const bf16* gamma, float* parts, u32* counters, int tokens,
                 int columns, int depth, float epsilon, i64 scale_stride, i64 bias_stride, i64 residual_stride,
                 i64 y_stride) {
  extern __shared__ __align__(1024) unsigned char smem[];
  const Shared shared{smem};
  const int tiles = (columns + kTileColumns - 1) / kTileColumns, tile_stages = (depth + kDepth - 1) / kDepth;
  const EvenWork work{tile_stages, tiles * tile_stages, static_cast<int>(gridDim.x)};
  const int block = static_cast<int>(blockIdx.x);
  if (threadIdx.x == 0) {
    ptx::prefetch_tensormap(&x_map);
    ptx::prefetch_tensormap(&w_map);
    shared.ring().initialise((kConsumerThreads + (kArranges ? kArrangerThreads : 0)) / 32);
    shared.arranged().initialise(kConsumerThreads / 32, kArrangerThreads / 32);
    shared.squares_ring().initialise(kConsumerThreads, kArrangerThreads);
    ptx::fence_mbarrier_init();
  }
  clear_rows(smem, tokens);
  __syncthreads();
  ptx::griddepcontrol_launch_dependents();

  const int warp = __shfl_sync(0xffffffffu, static_cast<int>(threadIdx.x) / 32, 0);
  if (warp >= (kConsumerThreads + kArrangerThreads) / 32) {
    ptx::setmaxnreg_dec<kProducerRegisters>();
    if (threadIdx.x == kConsumerThreads + kArrangerThreads) produce(shared, x_map, w_map, work, block, tokens);
  } else if (warp >= kConsumerThreads / 32) {
    ptx::setmaxnreg_dec<kArrangerRegisters>();
    if constexpr (kArranges) arrange(shared, work, block, gamma, depth, scales, scale_stride);
  } else {
    ptx::setmaxnreg_inc<kConsumerRegisters>();
    ptx::griddepcontrol_wait();
    const Output out{bias,       residual, y,       parts, counters, bias_stride, residual_stride, y_stride, tokens,
                     columns, depth,    epsilon};
    consume(shared, work, block, out, scales, scale_stride);
  }
}
