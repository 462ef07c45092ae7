// Products of a decoder's layer for few rows of e4m3 codes, with what lies between them, on Hopper (sm_90a).
//
//   p[m, n] = r[m] sum over k of x[m, k] x_scale[m, k / 128] w[n, k] w_scale[n / 128, k / 128]
//
//   r = 1, or kRowFactors: 1 / sqrt(sum of squares[m] / K + epsilon), so that x is the input of an RMS norm times gamma
//   kPlain   y = p + bias
//   kGates   codes of act(p) * (the p of ups), w [2 N, K]
//   kHeads   y, of queries, and a cache's keys and values: heads of p + bias, normalised and rotated          (head_end.cuh)
//   kStream  y = y + p rounded; codes of y * gamma, and the sums of y's squares over 128 columns: what kRowFactors then reads
//
//   scale[m, n / 128] = the largest |value| of 128 neighbours / 448, code = e4m3(value / scale)            (e4m3_codes.cuh)
//   or, kTwoParts, a power of two, and codes of two parts
//
// Why beside linear_fp8.cu. Of few rows w's bytes are the time, and a launch between two products costs as much as 10 MB of
//          them. Quantisation does not see a factor of a row, so a norm's can wait for the sums.
// Parts.   kTwoParts: of up to 32 rows, each two of x's: two e4m3 numbers an element and one scale, a power of two for 128
//          (e4m3_parts.cuh): W8A16. Parts are eight rows of x apart, so a thread has the sums of both.
// Tile.    64 rows of x, 128 columns, with gates those of their ups too: a block has whole groups of 128. The two consumers have 64
//          columns each, and tell each other the largest of each row.
// Sums, scales, ring, parts of K: as there. All of w is read before the launch before has ended; that must not write it.
//
// columns is a multiple of 128 (kPlain: of 2). Rows of y, codes, scales and squares are dense, gamma and bias too.
// Grid: kSplit blocks a tile; or blocks that take tiles in turn. Prelude: kStages, kSplit (1 to 3), kMode (0 to 3), kTwoParts, kRowsX, kRowFactors,
//   kHasBias, kActivation, kLeft (stages not asked for when the next launch may begin), kNormHeads, kBlockShift (of a cache's block size, or -1), kSharedBytes, kProducerRegisters, kConsumerRegisters.
// kRowsX: rows of x that are brought; products of others are of what lies behind, and of nobody. Boxes: x_map 128 x kRowsX, w_map 128 x 128. Dynamic shared memory: kSharedBytes.
#include "common/convert_element.cuh"
#include "common/e4m3_codes.cuh"
#include "common/e4m3_parts.cuh"
#include "common/reduce.cuh"
#include "common/stage_ring.cuh"
#include "common/types.cuh"
#include "common/vec.cuh"
#include "common/wgmma_descriptor.cuh"
#include "gemm/activation.cuh"
#include "gemm/hopper/cluster_sum.cuh"
#include "gemm/hopper/head_end.cuh"
#include "gemm/hopper/stage_scales.cuh"
#include "gemm/hopper/tiles.cuh"
#include "ptx/barrier.cuh"
#include "ptx/cluster.cuh"
#include "ptx/elect.cuh"
#include "ptx/grid_dependency.cuh"
#include "ptx/ldmatrix.cuh"
#include "ptx/mbarrier.cuh"
#include "ptx/setmaxnreg.cuh"
#include "ptx/tma.cuh"
#include "ptx/wgmma.cuh"

using namespace cki;

enum class Mode { kPlain = 0, kGates = 1, kStream = 2, kHeads = 3 };
constexpr bool kGates = static_cast<Mode>(kMode) == Mode::kGates, kStream = static_cast<Mode>(kMode) == Mode::kStream;
constexpr bool kHeads = static_cast<Mode>(kMode) == Mode::kHeads;
constexpr int kConsumers = 2;
constexpr int kThreads = 128 * (kConsumers + 1);
constexpr int kRows = 64, kColumns = 128;  // of a tile
constexpr int kHalves = kTwoParts ? 1 : 2;      // rows of a thread, eight apart
constexpr int kOwnRows = 32 * kHalves;          // of a tile, that have a scale
constexpr int kGroupColumns = kColumns / kConsumers;
constexpr int kPairs = kGroupColumns / 8;  // of neighbouring columns, a thread's of one row
constexpr int kScaledDepth = 128, kStepDepth = 32;
constexpr int kWeights = kGates ? 2 : 1;  // gates', ups'
constexpr int kBytesX = kRowsX * gemm::kSpan, kBytesW = kColumns * gemm::kSpan;
constexpr int kStageBytes = kBytesX + kWeights * kBytesW;
using Scales = gemm::StageScales<kRows, kOwnRows, kWeights>;
using Pushed = gemm::PushedSum<kWeights, kGroupColumns / 2, 4 * kConsumers, kSplit, kSplit == 1 ? 1 : 2, true>;
static_assert(kSplit == 1 || (Pushed::kFits && !kGates), "two blocks finish a half of the tile each");
constexpr int kPushedAt = kStages * kStageBytes;        // other blocks' sums
constexpr int kSlabBytes = Pushed::kStride;             // of a warp, for a head's half
constexpr int kPushedBytes = kHeads && kSplit == 1 ? Pushed::kOwned * kSlabBytes : Pushed::kBytes;
constexpr int kToldAt = kPushedAt + kPushedBytes;       // what consumers tell each other
constexpr int kToldBytes = 2 * kConsumers * kRows * 8;
constexpr int kScalesAt = kToldAt + kToldBytes;
constexpr int kRingAt = kScalesAt + kStages * Scales::kStage * 4;
static_assert(kRingAt + StageRing<kStages>::kBytes <= kSharedBytes, "what the planner allows for");

using Ring = StageRing<kStages>;
using Part = float[kWeights][kGroupColumns / 2];
using Codes = u32[kScaledDepth / kStepDepth][4];  // of x, of a stage
constexpr bool kAwaitsWithX = !kGates || kTwoParts;  // gates of 64 rows have no registers for that
using HeadInputs = gemm::HeadInputs<kHalves, kNormHeads>;

// Dense rows: y and codes of `columns`, scales and squares of one in 128.
struct Output {
  bf16* y;
  u8* codes;
  float *scale, *squares;
  const bf16 *bias, *gamma;
  int rows, columns;
};

// Waits for the ring's stage and starts its products, alone in `part`. x: where this lane's row of it begins; its codes are in
// `codes` until they have ended.
__device__ __forceinline__ void start_products(Part& part, Codes& codes, Ring& ring, const unsigned char* x, u64 x_at, u64 w_at) {
  ring.wait_full();
  if constexpr (kXInRegisters) {
    const int lane = static_cast<int>(threadIdx.x) % 32;
#pragma unroll
    for (int step = 0; step < kScaledDepth / kStepDepth; ++step)
      ptx::ldmatrix_x4(codes[step], x + ring.stage * kStageBytes + ((step * 2 + lane / 16) ^ lane % 8) * 16);
  }
  ptx::wgmma_fence();
  const u32 stage = __shfl_sync(0xffffffffu, static_cast<u32>(ring.stage * kStageBytes), 0);
#pragma unroll
  for (int step = 0; step < kScaledDepth / kStepDepth; ++step) {
    const u32 at = stage + static_cast<u32>(step * kStepDepth);
#pragma unroll
    for (int i = 0; i < kWeights; ++i) {
      const u64 w = gemm::step_on(w_at, at + i * kBytesW);
      if constexpr (kXInRegisters) {
        ptx::wgmma<kGroupColumns, e4m3>(part[i], codes[step], w, step > 0);
      } else {
        ptx::wgmma<kGroupColumns, e4m3>(part[i], gemm::step_on(x_at, at), w, step > 0);
      }
    }
  }
  ptx::wgmma_commit_group();
  ring.advance();
}

// Where a row's first part lies; the second eight rows below.
__device__ __forceinline__ i64 row_of_part(int row) { return row / 8 * 16 + row % 8; }

// 1 / rms of a row, by the four lanes that have it: asked for first, and awaited with x.
struct RowFactor {
  static constexpr int kAsked = 8;
  float first[kAsked];

  __device__ __forceinline__ void load(const float* squares, int row, int groups) {
#pragma unroll
    for (int j = 0; j < kAsked; ++j) {
      const int i = static_cast<int>(threadIdx.x) % 4 + j * 4;
      first[j] = i < groups ? squares[static_cast<i64>(row) * groups + i] : 0.0f;
    }
  }
  __device__ __forceinline__ float get(const float* squares, int row, int groups, float epsilon) {
    ptx::wgmma_fence_registers(first);  // not before
    float sum = 0.0f;
#pragma unroll
    for (int j = 0; j < kAsked; ++j) sum += first[j];
#pragma unroll 1
    for (int i = gemm::opaque_lane() % 4 + kAsked * 4; i < groups; i += 4) sum += squares[static_cast<i64>(row) * groups + i];
    return rsqrtf(warp_sum<4>(sum) / static_cast<float>(groups * kScaledDepth) + epsilon);
  }
};

// Pair j of a thread's sums in one of its rows.
__device__ __forceinline__ float2 pair_of(const float (&sum)[kGroupColumns / 2], int j, int half) {
  if constexpr (kTwoParts) return make_float2(sum[j * 4] + sum[j * 4 + 2], sum[j * 4 + 1] + sum[j * 4 + 3]);
  return make_float2(sum[j * 4 + half * 2], sum[j * 4 + half * 2 + 1]);
}

// Codes of a thread's values of its rows, first_row and eight below, columns from `column` on by eights. squares: of y.
__device__ __forceinline__ void write_codes(const float (&values)[kHalves][2 * kPairs], float (&squares)[kHalves], float2* told,
                                            int consumer, int own_row, int first_row, int group, int column,
                                            const Output& out) {
  const bool tells = threadIdx.x % 4 == 0;
  float largest[kHalves];
#pragma unroll
  for (int half = 0; half < kHalves; ++half) {
    largest[half] = warp_max<4>(largest_finite(0.0f, values[half]));
    if constexpr (kStream) squares[half] = warp_sum<4>(squares[half]);
    if (tells) told[consumer * kRows + own_row + half * 8] = make_float2(largest[half], squares[half]);
  }
  ptx::bar_sync(1, 32 * Pushed::kOwned);
#pragma unroll
  for (int half = 0; half < kHalves; ++half) {
    const i64 row = first_row + half * 8;
    const float2 other = told[(1 - consumer) * kRows + own_row + half * 8];
    const float of_all = fmaxf(largest[half], other.x);
    float scale, inverse;
    if constexpr (kTwoParts) {
      power_of(of_all, inverse, scale);
    } else {
      scale = e4m3_scale(of_all);
      inverse = inverse_of_scale(scale);
    }
    if (row >= out.rows) continue;
#pragma unroll
    for (int j = 0; j < kPairs; ++j) {
      const float first = values[half][j * 2], second = values[half][j * 2 + 1];
      if constexpr (kTwoParts) {
        u16 high, low;
        split_pair(first * inverse, second * inverse, high, low);
        u8* to = out.codes + row_of_part(static_cast<int>(row)) * out.columns + column + j * 8;
        *reinterpret_cast<u16*>(to) = high;
        *reinterpret_cast<u16*>(to + 8 * static_cast<i64>(out.columns)) = low;
      } else {
        store_e4m3<2>(out.codes + row * out.columns + column + j * 8, {first, second}, inverse);
      }
    }
    if (consumer != 0 || !tells) continue;
    const i64 at = row * (out.columns / kColumns) + group;
    out.scale[at] = scale;
    if constexpr (kStream) out.squares[at] = squares[half] + other.y;
  }
}

// A tile's end, by the warps that finish it. residual: y before (kStream). inputs, slabs: of heads; a warp's slab is beside that of
// the other consumer's.
__device__ __forceinline__ void finish(const Part& sum, const float (&factors)[kHalves], const u32 (&residual)[kHalves][kPairs],
                                       const HeadInputs& inputs, const gemm::HeadTensors& heads, unsigned char* slabs,
                                       int slab_of_warp, float2* told, int consumer, int own_row, int first_row, int group,
                                       const Output& out) {
  const int column = group * kColumns + consumer * kGroupColumns + static_cast<int>(threadIdx.x) % 4 * 2;
  float values[kHalves][2 * kPairs], squares[kHalves] = {};
#pragma unroll
  for (int j = 0; j < kPairs; ++j) {
    const int at = column + j * 8;
    float gamma[2] = {}, bias[2] = {};
    if constexpr (kStream) unpack_pair<bf16>(*reinterpret_cast<const u32*>(out.gamma + at), gamma[0], gamma[1]);
    if constexpr (kHasBias) {
      if (at < out.columns) unpack_pair<bf16>(*reinterpret_cast<const u32*>(out.bias + at), bias[0], bias[1]);
    }
#pragma unroll
    for (int half = 0; half < kHalves; ++half) {
      const int row = first_row + half * 8;
      float2 value = pair_of(sum[0], j, half);
      value.x = fmaf(value.x, factors[half], bias[0]);
      value.y = fmaf(value.y, factors[half], bias[1]);
      bf16* y = out.y + static_cast<i64>(row) * out.columns + at;
      if constexpr (kGates) {
        constexpr auto kAct = static_cast<gemm::Activation>(kActivation);
        const float2 up = pair_of(sum[kWeights - 1], j, half);
        values[half][j * 2] = gemm::activate<kAct>(value.x) * (up.x * factors[half]);
        values[half][j * 2 + 1] = gemm::activate<kAct>(value.y) * (up.y * factors[half]);
      } else if constexpr (kStream) {
        float before[2], after[2];
        unpack_pair<bf16>(residual[half][j], before[0], before[1]);
        const u32 word = pack_pair<bf16>(before[0] + value.x, before[1] + value.y);
        unpack_pair<bf16>(word, after[0], after[1]);
        if (row < out.rows) *reinterpret_cast<u32*>(y) = word;
#pragma unroll
        for (int e = 0; e < 2; ++e) {
          squares[half] = fmaf(after[e], after[e], squares[half]);
          values[half][j * 2 + e] = after[e] * gamma[e];
        }
      } else if constexpr (kHeads) {
        values[half][j * 2] = value.x;
        values[half][j * 2 + 1] = value.y;
      } else {
        if (row < out.rows && at < out.columns) *reinterpret_cast<u32*>(y) = pack_pair<bf16>(value.x, value.y);
      }
    }
  }
  if constexpr (kGates || kStream) write_codes(values, squares, told, consumer, own_row, first_row, group, column, out);
  if constexpr (kHeads) {
    const int at = slab_of_warp * kSlabBytes, other = (slab_of_warp ^ 1) * kSlabBytes;
    const gemm::HeadExchange exchange{reinterpret_cast<float2*>(slabs + at), reinterpret_cast<float2*>(slabs + other),
                                      told + consumer * kRows + own_row, told + (1 - consumer) * kRows + own_row};
    gemm::finish_head<kHalves, kNormHeads, kBlockShift, kSplit == 1>(values, inputs, heads, exchange, group, consumer, first_row,
                                                                     out.rows, 32 * Pushed::kOwned);
  }
}

extern "C" __global__ void __launch_bounds__(kThreads, 1)
    few_rows_fp8(const __grid_constant__ TensorMap x_map, const __grid_constant__ TensorMap w_map, const float* x_scale,
                 const float* w_scale, const float* squares_of_x, const bf16* bias, const bf16* gamma, bf16* y, u8* codes,
                 float* code_scale, float* squares, int rows, int columns, int depth, float epsilon, i64 x_scale_row,
                 i64 x_scale_k, i64 w_scale_n, i64 w_scale_k, const bf16* q_gamma, const bf16* k_gamma, bf16* k_cache, bf16* v_cache,
                 const i64* slots, const int* positions, const float* table, i64 k_block, i64 k_token, i64 k_head, i64 v_block,
                 i64 v_token, i64 v_head, i64 num_slots, int table_rows, int block_size, int q_heads, int kv_heads,
                 float head_epsilon) {
  extern __shared__ __align__(1024) unsigned char smem[];
  const int warpgroup = __shfl_sync(0xffffffffu, static_cast<int>(threadIdx.x) / 128, 0);
  const int tiles_m = (rows + kOwnRows - 1) / kOwnRows, tiles_n = (columns + kColumns - 1) / kColumns, tiles = tiles_m * tiles_n;
  const int all_k_tiles = (depth + kScaledDepth - 1) / kScaledDepth;
  const int block = static_cast<int>(blockIdx.x) / kSplit, blocks = static_cast<int>(gridDim.x) / kSplit;
  const int rank = static_cast<int>(blockIdx.x) % kSplit;  // which part of K
  const int first_k = all_k_tiles * rank / kSplit, k_tiles = all_k_tiles * (rank + 1) / kSplit - first_k;
  Ring ring(smem + kRingAt);
  float* const scales = reinterpret_cast<float*>(smem + kScalesAt);
  if (threadIdx.x == 0) {
    ptx::prefetch_tensormap(&x_map);
    ptx::prefetch_tensormap(&w_map);
    ring.initialise(128 * kConsumers, 1 + 32);
    ptx::fence_mbarrier_init();
  }
  __syncthreads();
  if constexpr (kSplit > 1) ptx::cluster_arrive_relaxed();  // the block has started; who writes into it waits for that

  if (warpgroup == 0) {
    ptx::setmaxnreg_dec<kProducerRegisters>();
    if (threadIdx.x / 32 == 1) {
      ptx::griddepcontrol_wait();
      for (int tile = block; tile < tiles; tile += blocks) {
        const int row = tile % tiles_m * kOwnRows, group = tile / tiles_m;
        const float* w = w_scale + group * w_scale_n + first_k * w_scale_k;
        Scales{x_scale + row * x_scale_row + first_k * x_scale_k, w, w + tiles_n * w_scale_n, x_scale_row, x_scale_k, w_scale_k}
            .copy(scales, ring, rows - row, k_tiles);
      }
      Scales::drain(ring);
    }
    if (threadIdx.x >= 32) {
      if constexpr (kSplit > 1) Pushed::pass_by();
      return;
    }
    const bool elected = ptx::elect_one();
    if (kSplit == 1 && !elected) return;
    if (elected) {
      const auto load_w = [&](int tile, int k) {
        unsigned char* stage = smem + ring.stage * kStageBytes + kBytesX;
        ptx::mbarrier_arrive_expect_tx(ring.full + ring.stage, kStageBytes);
#pragma unroll
        for (int i = 0; i < kWeights; ++i)
          ptx::tma_load_2d(stage + i * kBytesW, &w_map, ring.full + ring.stage, (first_k + k) * kScaledDepth,
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
          ptx::tma_load_2d(smem + ring.stage * kStageBytes, &x_map, ring.full + ring.stage, (first_k + k) * kScaledDepth,
                           tile % tiles_m * kRows);
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
  const Output out{y, codes, code_scale, squares, bias, gamma, rows, columns};
  const gemm::HeadTensors heads{y, q_gamma, k_gamma, k_cache, v_cache, slots, positions, table, columns, k_block, k_token,
                                k_head, v_block, v_token, v_head, num_slots, table_rows, block_size, q_heads, kv_heads,
                                head_epsilon};
  const int consumer = warpgroup - 1;
  const int lane = static_cast<int>(threadIdx.x) % 32, warp = static_cast<int>(threadIdx.x) / 32 % 4;
  const int own_row = warp * (8 * kHalves) + lane / 4;  // and the one eight rows below
  const int share = warp * kConsumers + consumer;  // of the tile: a block finishes all columns of its rows
  const bool finishes = Pushed::owner_of(share) == rank;
  const unsigned char* const x = smem + (warp * 16 + lane % 16) * gemm::kSpan;
  const u64 x_at = wgmma_descriptor_k_major<gemm::kSpan>(smem);
  const u64 w_at = wgmma_descriptor_k_major<gemm::kSpan>(smem + kBytesX + consumer * kGroupColumns * gemm::kSpan);
  float2* const told = reinterpret_cast<float2*>(smem + kToldAt);
  int turn = 0;
#pragma unroll 1
  for (int tile = block; tile < tiles; tile += blocks) {
    const int first_row = tile % tiles_m * kOwnRows + own_row, group = tile / tiles_m;
    float row_factors[kHalves];
    [[maybe_unused]] RowFactor row_factor[kHalves];
    const auto row_of = [&](int half) { return min(first_row + half * 8, rows - 1); };
    u32 residual[kHalves][kPairs] = {};
#pragma unroll
    for (int half = 0; half < kHalves; ++half) {
      row_factors[half] = 1.0f;
      if (!finishes) continue;
      const int row = row_of(half);
      if constexpr (kRowFactors) {
        row_factor[half].load(squares_of_x, row, all_k_tiles);
        if (!kAwaitsWithX) row_factors[half] = row_factor[half].get(squares_of_x, row, all_k_tiles, epsilon);
      }
      if constexpr (kStream) {
        const bf16* from = y + static_cast<i64>(row) * columns + group * kColumns + consumer * kGroupColumns + lane % 4 * 2;
#pragma unroll
        for (int j = 0; j < kPairs; ++j) residual[half][j] = *reinterpret_cast<const u32*>(from + j * 8);
      }
    }
    HeadInputs inputs;
    if constexpr (kHeads) {
      if (finishes) inputs.load_places(heads, first_row, rows);
    }
    Part sum = {};
    Part even, odd;    // products of stages in turn
    Codes even_codes, odd_codes;
    Ring done = ring;  // one stage behind
    float factors[kWeights][kHalves];  // of its rows
    const auto load_factors = [&] {
      const float* stage = scales + done.stage * Scales::kStage;
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
    if constexpr (kRowFactors && kAwaitsWithX) {
      ring.wait_full();  // by then squares are there, too
      if (finishes) {
#pragma unroll
        for (int half = 0; half < kHalves; ++half)
          row_factors[half] = row_factor[half].get(squares_of_x, row_of(half), all_k_tiles, epsilon);
      }
    }
    start_products(even, even_codes, ring, x, x_at, w_at);
#pragma unroll 1
    for (; k + 2 < k_tiles; k += 2) {
      start_products(odd, odd_codes, ring, x, x_at, w_at);
      load_factors();
      ptx::wgmma_wait_group<1>();
      add_stage(even);
      start_products(even, even_codes, ring, x, x_at, w_at);
      load_factors();
      ptx::wgmma_wait_group<1>();
      add_stage(odd);
    }
    if (k + 1 < k_tiles) {
      start_products(odd, odd_codes, ring, x, x_at, w_at);
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
    if constexpr (kHeads) {
      if (finishes) inputs.load(heads, group, consumer);
    }
    if constexpr (kSplit > 1) Pushed{smem + kPushedAt}.exchange(sum, share, rank);
    // Tiles tell in turn at two places: who writes at one again has met all who read it at the other's barrier.
    if (finishes) {
      finish(sum, row_factors, residual, inputs, heads, smem + kPushedAt, share % Pushed::kOwned, told + turn * kConsumers * kRows,
             consumer, own_row, first_row, group, out);
    }
    turn ^= 1;
  }
}
