// A decoder's products of few tokens (M = 1 to 16): the norm before, gates and residual in one launch.
//
//   y[M, N] = act(n w^T + bias) + residual           n = x, or RMS norm: x / rms(x) * gamma (kNorm)
//   y[M, N] = act(n wg^T + bias_g) * (n wu^T + bias_u)   gate and up below one another in w, [2 N, K] (kGated)
//
// w is of x's type, or e4m3 with a scale for each block of 128 x 128 (W8A16): codes become f16 or x's type exactly, and the sums
// of each 128 products are multiplied by their block's scale.
//
// Why beside linear.cu. A decode step is a chain of such products, each bound by reading its weight, and what lies between
//          them costs more than it computes: a launch of a norm or an activation takes 2 to 3 us, in which memory idles.
//          Here they are part of the products. And the weight never depends on the launch before: this kernel begins to
//          read it while that one still runs (kProgrammatic), a ring on every SM, which no other way of launching does.
//
// Work.    A block computes tiles of 16 rows of w, all of K, tile after tile (blockIdx.x, + gridDim.x, ...), one block an SM.
//          Of K 8 warps take 128 bytes of w each in turn. So a warp needs a part of x only, which no other warp needs: it
//          copies and arranges that itself, and no warp waits for another before a tile's end.
// w.       Each lane has a ring of its own in shared memory (cp.async), from which it reads what it has copied: 16 bytes of a
//          row, two rows and two places a step. kStages steps are under way, also beyond the end of a tile. (Through registers
//          the compiler moved the loads of several steps together, behind the products of the last: memory idled.) L2 is told
//          of whole lines, 128 bytes: without that, memory gave a fifth less.
// Product. Its rows are tokens, its columns 8 rows of w: a lane's 16 bytes of w are two right operands as they come, and codes
//          become operands once for all tokens. Up to 8 tokens, the left operand's lower 8 rows hold the same tokens' other
//          elements, those of the second right operand: of two products by one left operand, the upper rows count of one,
//          the lower rows of the other.
// n.       1 / rms(x) is a factor of a whole row: it is applied to the sums (bf16), or before (f16, which x times gamma might
//          not fit). Rounded once.
//          Codes become f16 where there is an instruction for it (sm_89), by a third of the work. Then n is f16, too: of bf16,
//          each 128 elements times a power of two that brings the largest to [2^14, 2^15); the rest keeps bf16's precision
//          down to 2^-28 of it, and what is lost below is less than 2^-38 of it.
// Sums.    fp32: the tensor core's over a warp's part of K, then the 8 warps' in a fixed order through shared memory. A row's
//          result depends on nothing but that row, whatever M and the grid are.
//
// Long K. x's part is kept small by a cluster: its kSplit blocks take a tile together, 8 kSplit warps share K, and the blocks in
//          turn finish a tile, with the sums that the others store in their memory (st.async).
//
// w, scales and gamma are read before the launch before has ended, so that one must not write them.
// Rows begin at multiples of 16 bytes; K is a multiple of 8, of 16 with codes. Strides in elements.
//
// Grid: (blocks), in clusters of kSplit. Prelude: Element (cki::f16, cki::bf16), Bias (Element or float), Code (Element or
//   cki::e4m3), kSlots (1, 2, 4, 8, 16: room for tokens), kStages, kSplit (more than 1: sm_90, not kNorm), kSplitBlocks (gates of
//   codes, N no multiple of 8), kWholeRounds (of K), kNorm, kGated, kActivation, kHasBias, kHasResidual, kProgrammatic.
// Dynamic shared memory: rings, parts of two tiles, squares (kNorm), powers of two (bf16 beside codes), gamma (kNorm), n in whole
//   steps of all warps, `slots_led` inboxes (kSplit > 1).
#include "common/convert_element.cuh"
#include "common/reduce.cuh"
#include "common/types.cuh"
#include "common/vec.cuh"
#include "gemm/activation.cuh"
#include "gemm/fragments.cuh"
#include "gemm/skinny/cluster_inbox.cuh"
#include "gemm/skinny/decode_operand.cuh"
#include "ptx/cluster.cuh"
#include "ptx/cp_async.cuh"
#include "ptx/grid_dependency.cuh"
#include "ptx/memory.cuh"

using namespace cki;

constexpr int kWarps = 8;
constexpr int kThreads = kWarps * 32;
constexpr bool kScaled = sizeof(Code) == 1;
constexpr bool kConverts = kScaled && ptx::kTargetSm >= 89;
template <bool>
struct Products {
  using Operand = gemm::DecodeOperand<Element, Code>;
  using Type = Element;
};
template <>
struct Products<true> {
  using Operand = gemm::ConvertedCodes;
  using Type = f16;
};
using Operand = Products<kConverts>::Operand;
using Compute = Products<kConverts>::Type;
constexpr bool kRescales = kConverts && gemm::IsBf16<Element>::kValue;
constexpr bool kScaleSums = kNorm && gemm::IsBf16<Element>::kValue;  // by 1 / rms(x)
constexpr bool kPaired = kSlots == 16;
constexpr int kTokenTiles = kPaired ? 2 : 1;
constexpr int kChunk = Operand::kChunk;
constexpr int kStepK = 8 * kChunk;            // elements of K that a warp takes at a time: 128 bytes of w
constexpr int kRoundK = kSplit * kWarps * kStepK;  // all warps
constexpr int kScaleBlock = 128;
constexpr int kTileRows = 16;                  // of w
constexpr int kTileColumns = kGated ? kTileRows / 2 : kTileRows;  // of y
constexpr int kQuads = kTileColumns / 4;
static_assert(kSplit == 1 || !kNorm, "squares are not exchanged");
constexpr int kPartPitch = 24;                 // floats of a token's sums: eight tokens' in different banks
constexpr int kStageBytes = 4 * 32 * 16;       // of a warp
constexpr int kRingBytes = kWarps * kStages * kStageBytes;
constexpr int kPart = kSlots * kPartPitch;     // a warp's sums of a tile
constexpr int kSquares = kNorm ? kWarps * kSlots : 0;
constexpr int kLeftRows = kPaired ? 2 : 1;     // of n that a piece of a left operand is made of: tokens t and t + 8
constexpr int kAtOnce = kPaired ? 2 : kSlots < 4 ? kSlots : 4;  // tokens, or pairs of them, that a lane arranges at once
// n, of a warp and step: planes of 4 pieces of 8 elements for each token. Plane h * kPieces + q has of chunk h, 4 kChunk
// elements, the pieces q of the four lanes' chunks.
constexpr int kPieces = kChunk / 8;
constexpr int kPlanes = 2 * kPieces;

__device__ __forceinline__ int lane() { return static_cast<int>(threadIdx.x) % 32; }
__device__ __forceinline__ int tiles_a_turn() { return static_cast<int>(gridDim.x) / kSplit; }

// Where a lane's ring is filled next: a step of the two rows of a tile that are its own.
struct Cursor {
  const Code* rows[2];  // at k
  i64 row_step;         // elements from a tile's rows to those of this block's next
  int column;           // of y, that the upper row belongs to
  int k;

  __device__ __forceinline__ Cursor(const Code* w, i64 stride, int tile, int columns, int warp) {
    const int row = lane() / 4;
    column = tile * kTileColumns + row;
    k = warp * kStepK + lane() % 4 * kChunk;
    rows[0] = w + column * stride + k;
    rows[1] = rows[0] + (kGated ? columns : 8) * stride;
    row_step = static_cast<i64>(tiles_a_turn()) * kTileColumns * stride;
  }

  // Asks for a step, and goes on to the next; behind the last, `end` in K, to this block's next tile.
  __device__ __forceinline__ void fetch(unsigned char* stage, int columns, int depth, int end) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const bool inside = column + (kGated ? 0 : half * 8) < columns;
#pragma unroll
      for (int chunk = 0; chunk < 2; ++chunk) {
        const bool there = inside && (kWholeRounds || k + chunk * (4 * kChunk) < depth);
        ptx::cp_async<16, 128>(stage + (half * 2 + chunk) * 512, rows[half] + chunk * (4 * kChunk), there ? 16 : 0);
      }
    }
    ptx::cp_async_commit_group();
    k += kRoundK;
    const bool in_tile = k < end;
    const i64 on = in_tile ? kRoundK : row_step + kRoundK - end;
    rows[0] += on;
    rows[1] += on;
    if (!in_tile) {
      k -= end;
      column += tiles_a_turn() * kTileColumns;
    }
  }
};

// Calls visit(k, round, place) for each piece of 8 elements of K that belongs to this lane; place: of token 0's, in 16 bytes.
// kTogether: all lanes call as often, and those that have no piece left with place -1.
template <bool kTogether = false, class Visit>
__device__ __forceinline__ void for_each_piece(int warp, int rounds, Visit visit) {
  constexpr int kOfStep = kStepK / 8;
#pragma unroll 1
  for (int first = 0; first < rounds * kOfStep; first += 32) {
    const int i = first + lane(), round = i / kOfStep, piece = i % kOfStep;
    const int plane = piece / (4 * kPieces) * kPieces + piece % kPieces;
    const int place = (round * kPlanes + plane) * kSlots * 4 + piece / kPieces % 4;
    const bool has = i < rounds * kOfStep;
    if (kTogether || has) visit((round * (kSplit * kWarps) + warp) * kStepK + piece * 8, round, has ? place : -1);
  }
}

// 1 / rms of a token.
__device__ __forceinline__ float row_scale(const float* squares, int token, int depth, float epsilon) {
  float sum = 0.0f;
#pragma unroll
  for (int part = 0; part < kWarps; ++part) sum += squares[part * kSlots + token];
  return rsqrtf(sum / static_cast<float>(depth) + epsilon);
}

// Sums of the squares of this warp's elements.
__device__ __forceinline__ void store_squares(float* squares, int warp, int token, float sum) {
  sum = warp_sum(sum);
  if (lane() == 0) squares[warp * kSlots + token] = sum;
}

// A step's elements of a token, in 16 lanes, times the power of two that brings the largest to [2^14, 2^15). What undoes it.
__device__ __forceinline__ float fit_into_f16(float (&values)[8]) {
  float largest = 0.0f;
#pragma unroll
  for (int i = 0; i < 8; ++i) largest = fmaxf(largest, fabsf(values[i]));
#pragma unroll
  for (int distance = 1; distance < 16; distance *= 2)
    largest = fmaxf(largest, __shfl_xor_sync(kFullWarp, largest, distance));
  const u32 exponent = min(max(__float_as_uint(largest) >> 23, 15u), 254u);
  const float up = __uint_as_float((268 - exponent) << 23);
#pragma unroll
  for (int i = 0; i < 8; ++i) values[i] *= up;
  return __uint_as_float((exponent - 14) << 23);
}

// n from the rows that this warp has copied, in place; a lane touches its own pieces alone. gamma: in shared memory, by K.
// powers: of this warp, [round][slot].
__device__ __forceinline__ void arrange_rows(uint4* n, const Element* gamma, float* squares, float* powers, int warp, int rounds,
                                             int depth, float epsilon) {
  if constexpr (kNorm && !kScaleSums) {
#pragma unroll 1
    for (int token = 0; token < kSlots; ++token) {
      float sum = 0.0f;
      for_each_piece(warp, rounds, [&](int, int, int place) {
        float values[8];
        load_floats(reinterpret_cast<const Element*>(n + place + token * 4), values);
#pragma unroll
        for (int i = 0; i < 8; ++i) sum = fmaf(values[i], values[i], sum);
      });
      store_squares(squares, warp, token, sum);
    }
    __syncthreads();
  }
#pragma unroll 1
  for (int first = 0; first < kSlots / kLeftRows; first += kAtOnce) {
    float sums[kAtOnce][kLeftRows] = {}, scales[kAtOnce][kLeftRows];
    if constexpr (kNorm && !kScaleSums) {
#pragma unroll
      for (int t = 0; t < kAtOnce; ++t) {
#pragma unroll
        for (int r = 0; r < kLeftRows; ++r) scales[t][r] = row_scale(squares, first + t + r * 8, depth, epsilon);
      }
    }
    for_each_piece<kRescales>(warp, rounds, [&](int k, int round, int place) {
      const bool has = !kRescales || place >= 0;
      Vector<Element, 8> rows[kAtOnce][kLeftRows];
#pragma unroll
      for (int t = 0; t < kAtOnce; ++t) {
#pragma unroll
        for (int r = 0; r < kLeftRows; ++r) {
          rows[t][r].fill_zero();
          if (has) rows[t][r].load(reinterpret_cast<const Element*>(n + place + (first + t + r * 8) * 4));
        }
      }
      float factors[8] = {};
      if (kNorm && has) load_floats(gamma + k, factors);
#pragma unroll
      for (int t = 0; t < kAtOnce; ++t) {
        u32 words[kLeftRows][4];
#pragma unroll
        for (int r = 0; r < kLeftRows; ++r) {
          Vector<Compute, 8> arranged;
          if constexpr (kNorm || kRescales) {
            float values[8];
            rows[t][r].to_floats(values);
            if constexpr (kNorm) {
#pragma unroll
              for (int i = 0; i < 8; ++i) {
                if constexpr (kScaleSums) {
                  sums[t][r] = fmaf(values[i], values[i], sums[t][r]);
                  values[i] *= factors[i];
                } else {
                  values[i] *= scales[t][r] * factors[i];
                }
              }
            }
            if constexpr (kRescales) {
              const float power = fit_into_f16(values);
              if (has && lane() % 16 == 0) powers[round * kSlots + first + t + r * 8] = power;
            }
            arranged.from_floats(values);
          } else {
#pragma unroll
            for (int i = 0; i < 4; ++i) arranged.words[i] = rows[t][r].words[i];
          }
          Operand::arrange(arranged);
#pragma unroll
          for (int i = 0; i < 4; ++i) words[r][i] = arranged.words[i];
        }
        if (!has) continue;
        uint4* own = n + place + (first + t) * 4;
        if constexpr (kPaired) {
          constexpr int kLower = kLeftRows - 1;
          own[0] = make_uint4(words[0][0], words[kLower][0], words[0][1], words[kLower][1]);
          own[32] = make_uint4(words[0][2], words[kLower][2], words[0][3], words[kLower][3]);
        } else {
          own[0] = make_uint4(words[0][0], words[0][2], words[0][1], words[0][3]);
        }
      }
    });
    if constexpr (kScaleSums) {
#pragma unroll
      for (int t = 0; t < kAtOnce; ++t) {
#pragma unroll
        for (int r = 0; r < kLeftRows; ++r) store_squares(squares, warp, first + t + r * 8, sums[t][r]);
      }
    }
  }
}

using Inbox = gemm::ClusterInbox<kSplit, kThreads, kQuads>;
__device__ __forceinline__ float component(const float4& v, int i) { return i == 0 ? v.x : i == 1 ? v.y : i == 2 ? v.z : v.w; }

// Of a tile, in one warp: [8 rows of w][product of a pair].
using Sums = float[2][2][4];

// Of tokens 8 t + lane / 4: both products' sums for two rows of w.
__device__ __forceinline__ float2 sum_of(const Sums& sums, int half, int t) {
  const int upper = t * 2, lower = kPaired ? upper : 2;
  return make_float2(sums[half][0][upper] + sums[half][1][lower], sums[half][0][upper + 1] + sums[half][1][lower + 1]);
}

// sums += the products of a step.
__device__ __forceinline__ void multiply(Sums& sums, const uint4 (&words)[2][2], const uint4* n) {
#pragma unroll
  for (int plane = 0; plane < kPlanes; ++plane) {
    const uint4* own = n + plane * kSlots * 4;
    const uint4 first = own[0];
    uint4 second = first;
    if constexpr (kPaired) second = own[32];
    const u32 a[2][4] = {{first.x, first.y, first.z, first.w}, {second.x, second.y, second.z, second.w}};
#pragma unroll
    for (int half = 0; half < 2; ++half) {
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        u32 b[2];
        Operand::registers(words[half][plane / kPieces], plane % kPieces * 2 + i, b);
        gemm::multiply(sums[half][i], a[i], b, ElementTag<Compute>{});
      }
    }
  }
}

// The scales of a warp's steps of a tile, one of 32 rounds in each lane: of the upper 8 rows, and with gates of the lower 8,
// whose last ones may lie in the next block.
struct Scales {
  float of[kGated ? 3 : 1];

  __device__ __forceinline__ void load(const float* scales, i64 stride, int tile, int first_round, int warp, int columns,
                                       int depth) {
    const int block = (first_round + lane()) * (kRoundK / kScaleBlock) + warp;
    const bool there = tile * kTileColumns < columns && block * kScaleBlock < depth;
#pragma unroll
    for (int i = 0; i < (kGated ? 3 : 1); ++i) {
      if (i == 2 && !kSplitBlocks) continue;
      const int row = tile * kTileColumns + (i > 0 ? columns : 0) + (i == 2 ? min(7, columns - tile * kTileColumns - 1) : 0);
      of[i] = there ? scales[row / kScaleBlock * stride + block] : 0.0f;
    }
  }

  // Of a round: of the lane's columns 2 t and 2 t + 1 of 8 rows. first_row: of the lower ones.
  __device__ __forceinline__ float2 at(int half, int round, int first_row) const {
    const float scale = __shfl_sync(kFullWarp, of[kGated ? half : 0], round % 32);
    if constexpr (!kSplitBlocks) return make_float2(scale, scale);
    if (half == 0) return make_float2(scale, scale);
    const float next = __shfl_sync(kFullWarp, of[kGated ? 2 : 0], round % 32);
    const int left = kScaleBlock - first_row % kScaleBlock - lane() % 4 * 2;  // of the first block
    return make_float2(left > 0 ? scale : next, left > 1 ? scale : next);
  }
};

extern "C" __global__ void __launch_bounds__(kThreads, 2)
    linear_decode(const Element* x, const Code* w, const float* scales, const Bias* bias, const Element* residual, Element* y,
                  const Element* gamma, int tokens, int columns, int depth, int slots_led, float epsilon, i64 x_stride,
                  i64 w_stride, i64 scale_stride, i64 bias_stride, i64 residual_stride, i64 y_stride) {
  extern __shared__ __align__(16) unsigned char shared[];
  const int own_warp = __shfl_sync(kFullWarp, static_cast<int>(threadIdx.x) / 32, 0);  // uniform, and the compiler knows
  int rank = 0;
  if constexpr (kSplit > 1) rank = static_cast<int>(ptx::cluster_cta_rank());
  const int warp = rank * kWarps + own_warp;  // of those that share K
  const int rounds = (depth + kRoundK - 1) / kRoundK, end = rounds * kRoundK;
  float* parts = reinterpret_cast<float*>(shared + kRingBytes);
  float* squares = parts + 2 * kWarps * kPart;
  float* powers = squares + kSquares;
  Element* factors = reinterpret_cast<Element*>(powers + (kRescales ? kWarps * rounds * kSlots : 0));
  uint4* all_n = reinterpret_cast<uint4*>(factors + (kNorm ? end : 0));
  const int of_warp = rounds * kPlanes * kSlots * 4;
  uint4* n = all_n + own_warp * of_warp;
  powers += own_warp * rounds * kSlots;
  unsigned char* ring = shared + own_warp * (kStages * kStageBytes) + lane() * 16;
  const Inbox inbox(reinterpret_cast<float4*>(all_n + kWarps * of_warp), slots_led, tokens);

  int tile = static_cast<int>(blockIdx.x) / kSplit;
  Cursor next(w, w_stride, tile, columns, warp);
  if constexpr (kNorm) {
    for_each_piece(warp, rounds, [&](int k, int, int) {
      ptx::cp_async<16>(factors + k, k < depth ? gamma + k : gamma, k < depth ? 16 : 0);
    });
  }
#pragma unroll 1
  for (int stage = 0; stage < kStages; ++stage) next.fetch(ring + stage * kStageBytes, columns, depth, end);
  Scales own, ahead;
  if constexpr (kScaled) own.load(scales, scale_stride, tile, 0, warp, columns, depth);
  const int tiles = (columns + kTileColumns - 1) / kTileColumns;
  if constexpr (kSplit > 1) {
    const int in_turns = (tiles - tile + tiles_a_turn() - 1) / tiles_a_turn();
    inbox.begin((in_turns - rank + kSplit - 1) / kSplit);
  }
  if constexpr (kProgrammatic) {
    ptx::griddepcontrol_launch_dependents();
    ptx::griddepcontrol_wait();
  }
  // Blocks begin with different tokens: all want the same few lines of L2 at the same time.
  for_each_piece(warp, rounds, [&](int k, int, int place) {
#pragma unroll 4
    for (int t = 0; t < kSlots; ++t) {
      const int slot = static_cast<int>((blockIdx.x + t) % kSlots);
      const Element* from = x + min(slot, tokens - 1) * x_stride + k;
      ptx::cp_async<16>(n + place + slot * 4, k < depth ? from : x, k < depth ? 16 : 0);
    }
  });
  ptx::cp_async_wait_all();
  arrange_rows(n, factors, squares, powers, warp, rounds, depth, epsilon);
  __syncwarp();

  if constexpr (kSplit > 1) ptx::cluster_wait();
  const int slot_of_lane = min(lane() / 4, kSlots - 1);
  const uint4* from = n + slot_of_lane * 4 + lane() % 4;
  // What this thread finishes of each tile: four columns of a token.
  const int column = static_cast<int>(threadIdx.x) % kQuads * 4;
  const int token = static_cast<int>(threadIdx.x) / kQuads;
  int done = 0, stage = 0;
  for (; tile < tiles; tile += tiles_a_turn()) {
    const int y_column = tile * kTileColumns + column, turn = done % 2;
    const bool finishes = kSplit == 1 || done % kSplit == rank;
    const int count = token < tokens ? min(columns - y_column, 4) : 0;
    float addend[4] = {};
    if constexpr (kHasResidual) {
      if (finishes) {
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          if (i < count) addend[i] = to_float(residual[token * residual_stride + y_column + i]);
        }
      }
    }
    if constexpr (kScaled) ahead.load(scales, scale_stride, tile + tiles_a_turn(), 0, warp, columns, depth);
    Sums sums = {};
    float scaled[2][4] = {};  // kScaled: of codes' sums
#pragma unroll 1
    for (int round = 0; round < rounds; ++round) {
      ptx::cp_async_wait_group<kStages - 1>();
      unsigned char* slot = ring + stage * kStageBytes;
      uint4 words[2][2];
#pragma unroll
      for (int i = 0; i < 4; ++i) words[i / 2][i % 2] = *reinterpret_cast<const uint4*>(slot + i * 512);
      if constexpr (kScaled) {
        if (round > 0 && round % 32 == 0) own.load(scales, scale_stride, tile, round, warp, columns, depth);
        Sums fresh = {};
        multiply(fresh, words, from + round * kPlanes * kSlots * 4);
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          const float2 scale = own.at(half, round, columns + tile * kTileColumns);
#pragma unroll
          for (int t = 0; t < kTokenTiles; ++t) {
            const float2 sum = sum_of(fresh, half, t);
            const float power = kRescales ? powers[round * kSlots + slot_of_lane + t * 8] : 1.0f;
            scaled[half][t * 2] = fmaf(sum.x, scale.x * power, scaled[half][t * 2]);
            scaled[half][t * 2 + 1] = fmaf(sum.y, scale.y * power, scaled[half][t * 2 + 1]);
          }
        }
      } else {
        multiply(sums, words, from + round * kPlanes * kSlots * 4);
      }
      __syncwarp();
      next.fetch(slot, columns, depth, end);
      stage = stage + 1 == kStages ? 0 : stage + 1;
    }
    if constexpr (kScaled) own = ahead;
    float* part = parts + (turn * kWarps + own_warp) * kPart + lane() / 4 * kPartPitch + lane() % 4 * 2;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
#pragma unroll
      for (int t = 0; t < kTokenTiles; ++t) {
        if (!kPaired && lane() / 4 >= kSlots) continue;
        *reinterpret_cast<float2*>(part + t * (8 * kPartPitch) + half * 8) =
            kScaled ? make_float2(scaled[half][t * 2], scaled[half][t * 2 + 1]) : sum_of(sums, half, t);
      }
    }
    __syncthreads();  // and whoever reads the other turn's parts has read them when all meet here the next time
    if (token < tokens) {
      const float4* of_token = reinterpret_cast<const float4*>(parts + turn * kWarps * kPart + token * kPartPitch);
      float factor = Operand::kFactor;
      if constexpr (kScaleSums) factor *= row_scale(squares, token, depth, epsilon);
      float4 totals[kGated ? 2 : 1];
#pragma unroll
      for (int i = 0; i < (kGated ? 2 : 1); ++i) {
        totals[i] = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
#pragma unroll
        for (int p = 0; p < kWarps; ++p) gemm::add(totals[i], of_token[p * (kPart / 4) + column / 4 + i * 2]);
      }
      if constexpr (kSplit > 1) {
        if (finishes) {
          inbox.complete(totals, done / kSplit, rank, token);
        } else {
          inbox.send(totals, done / kSplit, rank, done % kSplit, token);
        }
      }
      if (finishes) {
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          if (i >= count) break;
          const auto biased = [&](const float4& total, int at) {
            return component(total, i) * factor + (kHasBias ? to_float(bias[at * bias_stride]) : 0.0f);
          };
          float value = gemm::activate<static_cast<gemm::Activation>(kActivation)>(biased(totals[0], y_column + i));
          if constexpr (kGated) value *= biased(totals[kGated ? 1 : 0], columns + y_column + i);
          y[token * y_stride + y_column + i] = from_float<Element>(value + addend[i]);
        }
      }
    }
    ++done;
  }
  ptx::cp_async_wait_all();
}
