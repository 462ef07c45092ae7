// Products of a decoder's layer for few rows, with what lies between them, on Hopper (sm_90a): of bf16, or of e4m3 codes (kCodes).
//
//   p[m, n] = r[m] sum over k of x[m, k] x_scale[m, k / 128] w[n, k] w_scale[n / 128, k / 128]         bf16: no scales
//
//   r = 1, or kRowFactors: 1 / sqrt(sum of squares[m] / K + epsilon), so that x is the input of an RMS norm times gamma
//   kPlain   y = p + bias
//   kGates   to = act(p) * (the p of ups), w [2 N, K]
//   kHeads   y, of queries, and a cache's keys and values: heads of p + bias, normalised and rotated          (head_end.cuh)
//   kStream  y = y + p rounded; to = y * gamma, and the sums of y's squares over 128 columns: what kRowFactors then reads
//   where `to` is what the next product reads: codes with scales, or bf16
//
// Why beside linear_fp8.cu and linear.cu. Of few rows w's bytes are the time, and a launch between two products costs as much as
//          10 MB of them. Rounding to bf16 and quantisation do not see a factor of a row, so a norm's can wait for the sums.
// Parts.   kTwoParts: of up to 32 rows, each two of x's: two e4m3 numbers an element and one scale, a power of two for 128
//          (e4m3_parts.cuh): W8A16. Parts are eight rows of x apart, so a thread has the sums of both.
// Tile.    64 rows of x, 128 columns, with gates those of their ups too: a block has whole groups of 128. The two consumers have 64
//          columns each. Sums go through shared memory (row_parts.cuh) to warps that have whole rows.
// Sums of codes, scales, ring, parts of K: as in linear_fp8.cu; sums of bf16 stay in wgmma's accumulators. All of w is read before the
//          launch before has ended; that must not write it.
// Traffic. w once, x once for each 128 columns, from L2; 2 M N K flops.
//
// columns is a multiple of 128 (kPlain: of 2). Rows of y, to, scales and squares are dense, gamma and bias too.
// kRowFactors: up to 64 rows. kRowsX: rows of x that are brought; products of others are of what lies behind, and of nobody. kLeft:
//   stages that are not asked for yet when the next launch may begin. kOneTile: no block has two. kBlockShift: of a cache's block
//   size, -1 if that is no power of two.
// Grid: kSplit blocks a tile; or blocks that take tiles in turn. Prelude: kCodes, kStages, kSplit (1 to 3), kMode (0 to 3), kTwoParts,
//   kRowsX, kRowFactors, kHasBias, kActivation, kLeft, kOneTile, kNormHeads, kBlockShift, kSharedBytes, kProducerRegisters,
//   kConsumerRegisters. Boxes: 128 bytes of K x kRowsX of x, x 128 of w. Dynamic shared memory: kSharedBytes.
#include "common/convert_element.cuh"
#include "common/reduce.cuh"
#include "common/stage_ring.cuh"
#include "common/types.cuh"
#include "common/vec.cuh"
#include "common/wgmma_descriptor.cuh"
#include "gemm/activation.cuh"
#include "gemm/hopper/cluster_sum.cuh"
#include "gemm/hopper/head_end.cuh"
#include "gemm/hopper/row_parts.cuh"
#include "gemm/hopper/tiles.cuh"
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

enum class Mode { kPlain = 0, kGates = 1, kStream = 2, kHeads = 3 };
constexpr bool kGates = static_cast<Mode>(kMode) == Mode::kGates, kStream = static_cast<Mode>(kMode) == Mode::kStream;
constexpr bool kHeads = static_cast<Mode>(kMode) == Mode::kHeads, kPlain = static_cast<Mode>(kMode) == Mode::kPlain;
constexpr int kConsumers = 2;
constexpr int kThreads = 128 * (kConsumers + 1);
constexpr int kRows = 64, kColumns = 128;  // of a tile
constexpr int kHalves = kTwoParts ? 1 : 2;  // rows of a thread, eight apart
constexpr int kOwnRows = 32 * kHalves;      // of a tile, that have a scale
constexpr int kGroupColumns = kColumns / kConsumers;
constexpr int kPairs = kGroupColumns / 8;   // of neighbouring columns, a thread's of one row
constexpr int kStageDepth = kCodes ? 128 : 64, kStepBytes = 32;  // of K: elements of a stage; bytes of a product's step
constexpr int kGroup = 128;  // columns with one scale, or one sum of squares
static_assert(kCodes || !kTwoParts, "parts are codes");
constexpr int kWeights = kGates ? 2 : 1;  // gates', ups'
constexpr int kBytesX = kRowsX * gemm::kSpan, kBytesW = kColumns * gemm::kSpan;
constexpr int kStageBytes = kBytesX + kWeights * kBytesW;
constexpr int kStageScales = kCodes ? kRows + 4 : 0;  // floats: rows', columns', ups', none
using Sent = gemm::SentSum<kGroupColumns / 2, 4 * kConsumers, kSplit>;
static_assert(kSplit == 1 || !kGates, "gates' tiles are whole");
// A tile ends by rows, of which a block that finishes has so many; all warps of consumers take four at a time.
constexpr int kFinishedRows = kOwnRows / Sent::kOwners, kTogether = 4, kEnding = 4 * kConsumers;
constexpr int kSlabRows = 8 * kHalves;
using Slabs = gemm::RowSlabs<kSlabRows, kSplit == 1 ? kSlabRows * 256 : Sent::kStride>;
constexpr int kAllSlabBytes = Sent::kOwned * Slabs::kStride;  // of one weight
constexpr bool kSlabsInRing = kSplit == 1 && kOneTile;  // which nobody fills again
constexpr int kSlabBytes = kSlabsInRing || kSplit > 1 ? 0 : kWeights * kAllSlabBytes;
using HeadRows = gemm::HeadRows<kFinishedRows>;
constexpr int kSentAt = kStages * kStageBytes;  // other blocks' sums, and in their place, when they have been added, slabs
constexpr int kScalesAt = kSentAt + Sent::kBytes + kSlabBytes;
constexpr int kHeadRowsAt = kScalesAt + kStages * kStageScales * 4;
constexpr int kFactorsAt = kHeadRowsAt + (kHeads ? HeadRows::kBytes : 0);
constexpr int kRingAt = kFactorsAt + (kRowFactors ? kRows * 4 : 0);
constexpr int kArrivedAt = kRingAt + StageRing<kStages>::kBytes;
static_assert(kArrivedAt + Sent::kBarrierBytes <= kSharedBytes, "what the planner allows for");
static_assert(!kSlabsInRing || kWeights * kAllSlabBytes <= kSentAt, "slabs lie in the ring");
static_assert(!kStream || !kRowFactors, "sums begin with y");
// Warps of a block that tell the consumers what they have found, at barrier 2.
constexpr int kFinding = (kRowFactors ? 1 : 0) + (kHeads ? 1 : 0), kToldThreads = 32 * (kEnding + kFinding);

using Ring = StageRing<kStages>;
using Part = float[kWeights][kGroupColumns / 2];

// Dense rows: y and to of `columns`, scales and squares of one in 128.
struct Output {
  bf16* y;
  void* to;
  float *scale, *squares;
  const bf16 *bias, *gamma;
  int rows, columns;
};

// One warp: a tile's scales, stage by stage, of K's parts from first on. Its lanes' copies arrive at `full`. Who reads them arrives
// at `empty` for itself: one lane's arrival for a warp, behind __syncwarp, is an order that racecheck does not follow.
__device__ __forceinline__ void copy_scales(float* scales, Ring& ring, const float* x_scale, const float* w_scale,
                                            const float* up_scale, int rows, int k_tiles, i64 x_scale_row, i64 x_scale_k,
                                            i64 w_scale_k) {
  const int lane = static_cast<int>(threadIdx.x) % 32;
#pragma unroll 1
  for (int k = 0; k < k_tiles; ++k) {
    ring.wait_empty();
    float* stage = scales + ring.stage * kStageScales;
#pragma unroll
    for (int i = 0; i < kHalves; ++i) {
      const int row = lane + i * 32;
      ptx::cp_async<4>(stage + row, x_scale + min(row, rows - 1) * x_scale_row + k * x_scale_k);
    }
    if (lane < kWeights) ptx::cp_async<4>(stage + kRows + lane, (lane == 0 ? w_scale : up_scale) + k * w_scale_k);
    ptx::cp_async_mbarrier_arrive_noinc(ring.full + ring.stage);
    ring.advance();
  }
}

// Waits for the ring's stage and starts its products: of codes alone in `part`, else added to it.
__device__ __forceinline__ void start_products(Part& part, Ring& ring, u64 x_at, u64 w_at) {
  ring.wait_full();
  ptx::wgmma_fence();
  const u32 stage = __shfl_sync(0xffffffffu, static_cast<u32>(ring.stage * kStageBytes), 0);
#pragma unroll
  for (int step = 0; step < gemm::kSpan / kStepBytes; ++step) {
    const u32 at = stage + static_cast<u32>(step * kStepBytes);
#pragma unroll
    for (int i = 0; i < kWeights; ++i) {
      const u64 x = gemm::step_on(x_at, at), w = gemm::step_on(w_at, at + i * kBytesW);
      if constexpr (kCodes) {
        ptx::wgmma<kGroupColumns, e4m3>(part[i], x, w, step > 0);
      } else {
        ptx::wgmma<kGroupColumns, bf16>(part[i], x, w, true);
      }
    }
  }
  ptx::wgmma_commit_group();
  ring.advance();
}

// One warp: 1 / rms of each row, for the tiles' ends. A lane has two rows.
__device__ __forceinline__ void find_row_factors(float* factors, const float* squares, int rows, int groups, float epsilon) {
#pragma unroll
  for (int i = 0; i < kRows / 32; ++i) {
    const int row = static_cast<int>(threadIdx.x) % 32 + i * 32;
    float sum = 0.0f;
    if (row < rows) {
#pragma unroll 8
      for (int n = 0; n < groups; ++n) sum += squares[static_cast<i64>(row) * groups + n];
    }
    factors[row] = rsqrtf(sum / static_cast<float>(groups * kGroup) + epsilon);
  }
}

// A thread's sums begin with y, whose columns are eight apart from `column` on.
__device__ __forceinline__ void begin_with_y(Part& sum, const Output& out, int first_row, int column) {
#pragma unroll
  for (int half = 0; half < kHalves; ++half) {
    const i64 row = min(first_row + half * 8, out.rows - 1);
    const bf16* from = out.y + row * out.columns + column;
#pragma unroll
    for (int j = 0; j < kPairs; ++j) unpack_pair<bf16>(*reinterpret_cast<const u32*>(from + j * 8), sum[0][j * 4 + half * 2], sum[0][j * 4 + half * 2 + 1]);
  }
}

// A thread's sums of rows, to slabs.
__device__ __forceinline__ void put_sums(const Part& sum, unsigned char* memory, int thread, int slab) {
  const int lane = thread % 32;
#pragma unroll
  for (int i = 0; i < kWeights; ++i) {
    const Slabs slabs{memory + i * kAllSlabBytes};
#pragma unroll
    for (int j = 0; j < kPairs; ++j) {
      const float* s = sum[i] + j * 4;
      if constexpr (kTwoParts) {
        slabs.put(lane, slab, lane / 4, j, make_float2(s[0] + s[2], s[1] + s[3]));
      } else {
        slabs.put(lane, slab, lane / 4, j, make_float2(s[0], s[1]));
        slabs.put(lane, slab, lane / 4 + 8, j, make_float2(s[2], s[3]));
      }
    }
  }
}

// A lane's part of a vector, whose first of 128 is `column` of `columns`; zeros where it has none.
__device__ __forceinline__ void load_columns(int lane, gemm::RowPart& values, const bf16* from, int column, int columns) {
#pragma unroll
  for (int i = 0; i < 8; ++i) {
    const int at = column + i / 2 * 32 + gemm::first_column(lane) + i % 2 * 2;
    float(&pair)[4] = values[i / 2];
    if (at < columns) unpack_pair<bf16>(*reinterpret_cast<const u32*>(from + at), pair[i % 2 * 2], pair[i % 2 * 2 + 1]);
  }
}

// y, which is rounded; its squares' sum; and what the next product reads.
__device__ __forceinline__ void end_stream(int lane, gemm::RowPart& values, const gemm::RowPart& gamma, int row, int group,
                                           bool stored, const Output& out) {
  float squares = 0.0f;
  bf16* to = out.y + static_cast<i64>(row) * out.columns + group * kColumns + gemm::first_column(lane);
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    Vector<bf16, 4> y;
    y.from_floats(values[i]);
    if (stored) y.store(to + i * 32);
    y.to_floats(values[i]);
#pragma unroll
    for (int e = 0; e < 4; ++e) {
      squares = fmaf(values[i][e], values[i][e], squares);
      values[i][e] *= gamma[i][e];
    }
  }
  squares = warp_sum<8>(squares);
  if (stored && lane % 8 == 0) out.squares[static_cast<i64>(row) * (out.columns / kColumns) + group] = squares;
}

// A warp's rows of a tile whose sums lie in slabs. Few instructions: they are fetched while all memory is busy with the next launch's
// weights. first_row: the block's. gamma, bias: of this lane's columns.
__device__ __forceinline__ void end_rows(int lane, int warp, unsigned char* memory, const float* factors, const HeadRows& found,
                                         const gemm::HeadTensors& heads, const gemm::RowPart& gamma, const gemm::RowPart& bias,
                                         int first_row, int group, const Output& out) {
  const Slabs slabs{memory}, ups{memory + kAllSlabBytes};
#pragma unroll 1
  for (int at = warp * kTogether; at < kFinishedRows && first_row + at < out.rows; at += kTogether * kEnding) {
    const int own = at + lane / 8, row = first_row + own;
    const bool stored = row < out.rows;
    const float factor = kRowFactors ? factors[own] : 1.0f;
    gemm::RowPart values, up;
    slabs.get(lane, own, values);
    if constexpr (kGates) ups.get(lane, own, up);
#pragma unroll
    for (int i = 0; i < 4; ++i) {
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        constexpr auto kAct = static_cast<gemm::Activation>(kActivation);
        values[i][e] = fmaf(values[i][e], factor, bias[i][e]);
        if constexpr (kGates) values[i][e] = gemm::activate<kAct>(values[i][e]) * (up[i][e] * factor);
      }
    }
    if constexpr (kStream) end_stream(lane, values, gamma, row, group, stored, out);
    if constexpr (kHeads) {
      gemm::finish_head<kNormHeads, kBlockShift>(lane, values, gamma, found, heads, group, own, row, stored);
    } else if constexpr (kPlain) {
#pragma unroll
      for (int i = 0; i < 8; ++i) {
        const int column = group * kColumns + i / 2 * 32 + gemm::first_column(lane) + i % 2 * 2;
        const float(&pair)[4] = values[i / 2];
        if (stored && column < out.columns)
          *reinterpret_cast<u32*>(out.y + static_cast<i64>(row) * out.columns + column) = pack_pair<bf16>(pair[i % 2 * 2], pair[i % 2 * 2 + 1]);
      }
    } else if constexpr (kCodes) {
      gemm::CodeRows<kTwoParts>{static_cast<u8*>(out.to), out.scale, out.columns}.write(lane, values, row, group, stored);
    } else {
      gemm::RoundedRows{static_cast<bf16*>(out.to), out.columns}.write(lane, values, row, group, stored);
    }
  }
}

extern "C" __global__ void __launch_bounds__(kThreads, 1)
    few_rows(const __grid_constant__ TensorMap x_map, const __grid_constant__ TensorMap w_map, const float* x_scale,
             const float* w_scale, const float* squares_of_x, const bf16* bias, const bf16* gamma, bf16* y, void* to,
             float* to_scale, float* squares, int rows, int columns, int depth, float epsilon, i64 x_scale_row,
             i64 x_scale_k, i64 w_scale_n, i64 w_scale_k, const bf16* q_gamma, const bf16* k_gamma, bf16* k_cache, bf16* v_cache,
             const i64* slots, const int* positions, const float* table, i64 k_block, i64 k_token, i64 k_head, i64 v_block,
             i64 v_token, i64 v_head, i64 num_slots, int table_rows, int block_size, int q_heads, int kv_heads,
             float head_epsilon) {
  extern __shared__ __align__(1024) unsigned char smem[];
  const int warpgroup = __shfl_sync(0xffffffffu, static_cast<int>(threadIdx.x) / 128, 0);
  const int tiles_m = (rows + kOwnRows - 1) / kOwnRows, tiles_n = (columns + kColumns - 1) / kColumns, tiles = tiles_m * tiles_n;
  const int all_k_tiles = (depth + kStageDepth - 1) / kStageDepth;
  const int block = static_cast<int>(blockIdx.x) / kSplit, blocks = static_cast<int>(gridDim.x) / kSplit;
  const int rank = static_cast<int>(blockIdx.x) % kSplit;  // which part of K
  const int first_k = all_k_tiles * rank / kSplit, k_tiles = all_k_tiles * (rank + 1) / kSplit - first_k;
  Ring ring(smem + kRingAt);
  const Sent sent{smem + kSentAt, reinterpret_cast<u64*>(smem + kArrivedAt)};
  float* const scales = reinterpret_cast<float*>(smem + kScalesAt);
  [[maybe_unused]] float* const row_factors = reinterpret_cast<float*>(smem + kFactorsAt);  // of all tiles: of up to kRows rows
  const gemm::HeadTensors heads{y, q_gamma, k_gamma, k_cache, v_cache, slots, positions, table, columns, k_block, k_token,
                                k_head, v_block, v_token, v_head, num_slots, table_rows, block_size, q_heads, kv_heads,
                                head_epsilon};
  const HeadRows found{smem + kHeadRowsAt};
  if (threadIdx.x == 0) {
    ptx::prefetch_tensormap(&x_map);
    ptx::prefetch_tensormap(&w_map);
    ring.initialise(kCodes ? 128 * kConsumers : 4 * kConsumers, kCodes ? 1 + 32 : 1);
    sent.initialise(rank);
    ptx::fence_mbarrier_init();
  }
  __syncthreads();
  if constexpr (kSplit > 1) ptx::cluster_arrive_relaxed();  // the block has started; who sends to it waits for that

  if (warpgroup == 0) {
    ptx::setmaxnreg_dec<kProducerRegisters>();
    if (kCodes && threadIdx.x / 32 == 1) {
      ptx::griddepcontrol_wait();
      for (int tile = block; tile < tiles; tile += blocks) {
        const int row = tile % tiles_m * kOwnRows, group = tile / tiles_m;
        const float* w = w_scale + group * w_scale_n + first_k * w_scale_k;
        copy_scales(scales, ring, x_scale + row * x_scale_row + first_k * x_scale_k, w, w + tiles_n * w_scale_n, rows - row,
                    k_tiles, x_scale_row, x_scale_k, w_scale_k);
      }
#pragma unroll 1
      for (int i = 0; i < kStages; ++i) {  // its copies have landed when what they brought has been read
        ring.wait_empty();
        ring.advance();
      }
    }
    if (kRowFactors && rank < Sent::kOwners && threadIdx.x / 32 == 2) {
      ptx::griddepcontrol_wait();
      find_row_factors(row_factors, squares_of_x, rows, (depth + kGroup - 1) / kGroup, epsilon);
      ptx::bar_arrive(2, kToldThreads);
    }
    if (kHeads && rank < Sent::kOwners && threadIdx.x / 32 == 3) {
      ptx::griddepcontrol_wait();
      found.bring(heads, rank * kFinishedRows, rows);
      ptx::bar_arrive(2, kToldThreads);
    }
    if constexpr (kSplit > 1) {
      if (threadIdx.x >= 32) ptx::cluster_wait();
    }
    if (threadIdx.x >= 32) return;
    const bool elected = ptx::elect_one();
    if (kSplit == 1 && !elected) return;
    if (elected) {
      const auto load_w = [&](int tile, int k) {
        unsigned char* stage = smem + ring.stage * kStageBytes + kBytesX;
        ptx::mbarrier_arrive_expect_tx(ring.full + ring.stage, kStageBytes);
#pragma unroll
        for (int i = 0; i < kWeights; ++i)
          ptx::tma_load_2d(stage + i * kBytesW, &w_map, ring.full + ring.stage, (first_k + k) * kStageDepth,
                           i * columns + tile / tiles_m * kColumns);
      };
      const int ahead = min(k_tiles, kStages);
      for (int k = 0; k < ahead; ++k, ring.advance()) load_w(block, k);
      ring = Ring(smem + kRingAt);
      ptx::griddepcontrol_wait();
      int left = (tiles - block + blocks - 1) / blocks * k_tiles;  // stages that are to be asked for
      for (int tile = block; tile < tiles; tile += blocks) {
        for (int k = 0; k < k_tiles; ++k, ring.advance()) {
          if (tile > block || k >= ahead) {
            ring.wait_empty();
            load_w(tile, k);
          }
          if (--left == min(kLeft, k_tiles - 1)) ptx::griddepcontrol_launch_dependents();
          ptx::tma_load_2d(smem + ring.stage * kStageBytes, &x_map, ring.full + ring.stage, (first_k + k) * kStageDepth,
                           tile % tiles_m * kRows);
        }
      }
    }
    if constexpr (kSplit > 1) {
      __syncwarp();
      ptx::cluster_wait();
    }
    return;
  }

  ptx::setmaxnreg_inc<kConsumerRegisters>();
  ptx::griddepcontrol_wait();
  const Output out{y, to, to_scale, squares, bias, gamma, rows, columns};
  const int consumer = warpgroup - 1;
  const int warp = static_cast<int>(threadIdx.x) / 32 % 4, quad = static_cast<int>(threadIdx.x) % 32 / 4;
  const int own_row = warp * (8 * kHalves) + quad;  // and the one eight rows below
  const int share = warp * kConsumers + consumer;  // of the tile: a block finishes all columns of its rows
  const bool finishes = Sent::owner_of(share) == rank;
  const u64 x_at = wgmma_descriptor_k_major<gemm::kSpan>(smem);
  const u64 w_at = wgmma_descriptor_k_major<gemm::kSpan>(smem + kBytesX + consumer * kGroupColumns * gemm::kSpan);
  // Which of the warps whose sums are finished here.
  const auto number_of = [](int thread) { return (thread / 32 % 4 * kConsumers + thread / 128 - 1) % Sent::kOwned; };
  unsigned char* const slabs = smem + (kSlabsInRing ? 0 : kSentAt);
#pragma unroll 1
  for (int tile = block; tile < tiles; tile += blocks) {
    const int tile_row = tile % tiles_m * kOwnRows, group = tile / tiles_m;
    Part sum = {};
    if constexpr (kStream) {
      if (finishes) begin_with_y(sum, out, tile_row + own_row, group * kColumns + consumer * kGroupColumns + static_cast<int>(threadIdx.x) % 4 * 2);
    }
    Ring done = ring;  // one stage behind
    if constexpr (kCodes) {
      Part even, odd;    // products of stages in turn
      float factors[kWeights][kHalves];  // of its rows
      const auto load_factors = [&] {
        const float* stage = scales + done.stage * kStageScales;
#pragma unroll
        for (int i = 0; i < kWeights; ++i) {
#pragma unroll
          for (int half = 0; half < kHalves; ++half) factors[i][half] = stage[own_row + half * 8] * stage[kRows + i];
        }
      };
      const auto add_stage = [&](Part& part) {
#pragma unroll
        for (int i = 0; i < kWeights; ++i) ptx::wgmma_fence_registers(part[i]);
        done.release_by_one();  // each lane has read scales
#pragma unroll
        for (int i = 0; i < kWeights; ++i) {
#pragma unroll
          for (int j = 0; j < kGroupColumns / 2; ++j) sum[i][j] = fmaf(part[i][j], factors[i][j / 2 % kHalves], sum[i][j]);
        }
      };
      int k = 0;
      start_products(even, ring, x_at, w_at);
#pragma unroll 1
      for (; k + 2 < k_tiles; k += 2) {
        start_products(odd, ring, x_at, w_at);
        load_factors();
        ptx::wgmma_wait_group<1>();
        add_stage(even);
        start_products(even, ring, x_at, w_at);
        load_factors();
        ptx::wgmma_wait_group<1>();
        add_stage(odd);
      }
      if (k + 1 < k_tiles) {
        start_products(odd, ring, x_at, w_at);
        load_factors();
        ptx::wgmma_wait_group<1>();
        add_stage(even);
        load_factors();
        ptx::wgmma_wait_group<0>();
        add_stage(odd);
      } else {
        load_factors();
        ptx::wgmma_wait_group<0>();
        add_stage(even);
      }
    } else {
#pragma unroll
      for (int i = 0; i < kWeights; ++i) ptx::wgmma_fence_registers(sum[i]);
      start_products(sum, ring, x_at, w_at);
#pragma unroll 1
      for (int k = 1; k < k_tiles; ++k) {
        start_products(sum, ring, x_at, w_at);
        ptx::wgmma_wait_group<1>();
        done.release();
      }
      ptx::wgmma_wait_group<0>();
#pragma unroll
      for (int i = 0; i < kWeights; ++i) ptx::wgmma_fence_registers(sum[i]);
      done.release();
    }
    const int thread = gemm::opaque_thread(), lane = thread % 32;
    gemm::RowPart own_gamma = {}, own_bias = {};
    if (rank < Sent::kOwners) {
      const int column = group * kColumns;
      if constexpr (kStream) load_columns(lane, own_gamma, gamma, column, columns);
      if constexpr (kHeads && kNormHeads) load_columns(lane, own_gamma, group < q_heads ? q_gamma : k_gamma, 0, kColumns);
      if constexpr (kHasBias) load_columns(lane, own_bias, bias, column, columns);
    }
    if constexpr (kSplit > 1) {
      ptx::cluster_wait();  // behind the stages, as the producers' is
      sent.exchange(sum[0], share, rank);
    }
    if (rank >= Sent::kOwners) continue;
    const auto meet = [] { ptx::bar_sync(1, 32 * kEnding); };
    if constexpr (kSlabsInRing) meet();  // nobody reads a stage any more
    if (finishes) {
      __syncwarp();  // no lane reads another block's sums any more
      put_sums(sum, slabs, thread, number_of(thread));
    }
    if constexpr (kFinding > 0) {
      if (tile == block) ptx::bar_sync(2, kToldThreads);
    }
    meet();
    end_rows(lane, thread / 32 - 4, slabs, row_factors + rank * kFinishedRows, found, heads, own_gamma, own_bias,
             tile_row + rank * kFinishedRows, group, out);
    if constexpr (kSplit == 1 && !kOneTile) meet();  // before the next tile's sums
  }
}
