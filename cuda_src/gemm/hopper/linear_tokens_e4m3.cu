// y[M, N] = act(n w^T + bias) + residual of up to 16 tokens and e4m3 codes, on Hopper (sm_90a), bound by reading w (W8A16).
//
//   n = x, or RMS norm: x / rms(x) * gamma (kNorm)      gates, kGated: act(n wg^T + bias_g) * (n wu^T + bias_u), w [2 N, K]
//
// x is bf16; w e4m3 with a scale for each block of 128 x 128.
//
// Why beside gemm/skinny. Those kernels keep x whole in every block, or cut K by clusters: they have too little room from a few
//          tokens on, or leave SMs idle. Here both operands come stage by stage through a ring of TMA's, and every block has as
//          many stages as any other (even_work.cuh): all SMs ask for memory until the end of the launch.
// Product. y^T = w n^T: w's rows are the 64 of a wgmma, tokens its columns, so few tokens waste nothing. With gates w's rows come
//          eight of the gates', eight of the ups' (the order of w_map): a thread has both of a column.
// Codes.   They are multiplied as they are, by e4m3: n is made two e4m3 numbers of each element (e4m3_tokens.cuh), and a product
//          has twice as many columns. So no code is converted.
// n.       Four warps make it of each stage of x, in its place, and add up x's squares; 1 / rms(x) is a factor of the sums.
// Scales.  A stage of a tile has one, with gates two, and of each token a power of two; its 128 products are sums of their own.
// Overlap. w is read before the launch before has ended, so that one must not write it.
//
// K is a multiple of 16; with gates N is one of 64. Strides in elements; columns of y and residual are dense.
//
// Grid: blocks, one an SM. Prelude: Bias (cki::bf16 or float), kTokens (8, 16), kStages, kNorm, kGated,
//   kActivation, kHasBias, kHasResidual.
// Boxes: w_map 128 x 128 rows, or with gates 128 x 8 x 2 x 8 (K, row of eight, gate or up, eight); x_map 64 x tokens.
// parts: kPartFloats floats for each of 2 slots a block. counters: kConsumerWarps zeros a tile.
// Dynamic shared memory: kSharedBytes.
#include "common/types.cuh"
#include "gemm/hopper/e4m3_tokens.cuh"
#include "gemm/hopper/token_results.cuh"
#include "ptx/bulk.cuh"
#include "ptx/fence.cuh"
#include "ptx/grid_dependency.cuh"
#include "ptx/mbarrier.cuh"
#include "ptx/memory.cuh"
#include "ptx/setmaxnreg.cuh"
#include "ptx/tma.cuh"

using namespace cki;
using namespace cki::gemm;

// Calls visit(ring, tile, k) for each of a block's stages, k in elements; the ring's stage is free from `kStages` on.
template <class Visit>
__device__ __forceinline__ void for_each_stage(const Shared& shared, const EvenWork& work, int block, const Visit& visit) {
  Ring ring = shared.ring();
  const int begin = work.first_stage(block), count = work.first_stage(block + 1) - begin;
  int tile = begin / work.tile_stages, k = begin - tile * work.tile_stages;
#pragma unroll 1
  for (int i = 0; i < count; ++i) {
    if (i >= kStages) ring.wait_empty();
    visit(ring, tile, k * kDepth);
    ring.advance();
    if (++k == work.tile_stages) {
      k = 0;
      ++tile;
    }
  }
}

// One thread: brings w, from before the launch before has ended.
__device__ __forceinline__ void produce_w(const Shared& shared, const TensorMap& w_map, const EvenWork& work, int block) {
  for_each_stage(shared, work, block, [&](const Ring& ring, int tile, int k) {
    unsigned char* to = shared.memory + ring.stage * kStageBytes;
    u64* full = ring.full + ring.stage;
    ptx::mbarrier_arrive_expect_tx(full, kBytesW);
    if constexpr (kGated) {
      ptx::tma_load_4d(to, &w_map, full, k, 0, 0, tile * (kTileColumns / 8));
    } else {
      ptx::tma_load_2d(to, &w_map, full, k, tile * kTileColumns);
    }
  });
}

// One thread a box: brings x, with the first box gamma. (One thread for all took 1.5 us for the ring.)
__device__ __forceinline__ void produce_x(const Shared& shared, const TensorMap& x_map, const EvenWork& work, int block,
                                          int box, int tokens, const bf16* gamma, int depth) {
  const u32 bytes = static_cast<u32>(tokens * kSpan);
  ptx::griddepcontrol_wait();
  for_each_stage(shared, work, block, [&](const Ring& ring, int, int k) {
    u64* arrived = shared.arrived() + ring.stage;
    const u32 gamma_bytes = kNorm && box == 0 ? static_cast<u32>(min(kDepth, depth - k) * 2) : 0;
    ptx::mbarrier_arrive_expect_tx(arrived, bytes + gamma_bytes);
    ptx::tma_load_2d(shared.x(ring.stage) + box * kBox, &x_map, arrived, k + box * 64, 0);
    if constexpr (kNorm) {
      if (box == 0) ptx::bulk_load(shared.gamma(ring.stage), gamma + k, gamma_bytes, arrived);
    }
  });
}

// The consumers: a block's tiles, part by part.
__device__ __forceinline__ void consume(const Shared& shared, const EvenWork& work, int block, const Output& out,
                                        const float* scales, i64 scale_stride) {
  const Place place;
  const int warp = place.thread / 32;
  Ring ring = shared.ring();
  SquaresRing squares_ring = shared.squares_ring();
  const u64 w = wgmma_descriptor_k_major<kSpan>(shared.memory + place.thread / 128 * (64 * kSpan));
  const u64 n = wgmma_descriptor_k_major<kSpan>(shared.memory + kBytesW);
  for_each_part(work, block, [&](const WorkPart& part) {
    float sum[kSums] = {};
    const int tile = part.tile;
    const int row = tile * kTileColumns;
    multiply(sum, shared, ring, w, n, part, scales + row / kScaleBlock * scale_stride,
             scales + (kGated ? out.columns + row : row) / kScaleBlock * scale_stride);
    float squares = 0.0f;
    if constexpr (kNorm) {
      squares_ring.wait_full();
      if (lane() < kTokens) squares = shared.squares()[lane()];
      squares_ring.release_by_one();
    }
    finish_part(sum, squares, shared.warp_squares(warp), work, out, block, tile, place);
  });
}

extern "C" __global__ void __launch_bounds__(kThreads, 1)
    linear_tokens_e4m3(const __grid_constant__ TensorMap x_map, const __grid_constant__ TensorMap w_map, const float* scales,
                       const Bias* bias, const bf16* residual, bf16* y, const bf16* gamma, float* parts, u32* counters,
                       int tokens, int columns, int depth, float epsilon, i64 scale_stride, i64 bias_stride,
                       i64 residual_stride, i64 y_stride) {
  extern __shared__ __align__(1024) unsigned char smem[];
  const Shared shared{smem};
  const int tiles = (columns + kTileColumns - 1) / kTileColumns, tile_stages = (depth + kDepth - 1) / kDepth;
  const EvenWork work{tile_stages, tiles * tile_stages, static_cast<int>(gridDim.x)};
  const int block = static_cast<int>(blockIdx.x);
  if (threadIdx.x == 0) {
    ptx::prefetch_tensormap(&x_map);
    ptx::prefetch_tensormap(&w_map);
    shared.initialise();
    ptx::fence_mbarrier_init();
  }
  clear_rows(smem, tokens);
  __syncthreads();
  ptx::griddepcontrol_launch_dependents();

  const int warp = __shfl_sync(0xffffffffu, static_cast<int>(threadIdx.x) / 32, 0);
  if (warp >= (kConsumerThreads + kArrangerThreads) / 32) {
    ptx::setmaxnreg_dec<kProducerRegisters>();
    const int box = warp - (kConsumerThreads + kArrangerThreads) / 32 - 1;
    if (threadIdx.x % 32 == 0 && box < kBoxes) {
      if (box < 0) {
        produce_w(shared, w_map, work, block);
      } else {
        produce_x(shared, x_map, work, block, box, tokens, gamma, depth);
      }
    }
  } else if (warp >= kConsumerThreads / 32) {
    ptx::setmaxnreg_dec<kArrangerRegisters>();
    arrange(shared, work, block, depth);
  } else {
    ptx::setmaxnreg_inc<kConsumerRegisters>();
    ptx::griddepcontrol_wait();
    const Output out{bias,       residual, y,       parts, counters, bias_stride, residual_stride, y_stride, tokens,
                     columns, depth,    epsilon};
    consume(shared, work, block, out, scales, scale_stride);
  }
}
