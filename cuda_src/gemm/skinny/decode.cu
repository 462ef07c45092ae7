// A decoder's products of few tokens (M = 1 to 16): the norm before, gates and residual in one launch.
//
//   y[M, N] = act(n w^T + bias) + residual           n = x, or RMS norm: x / rms(x) * gamma (kNorm)
//   y[M, N] = act(n wg^T + bias_g) * (n wu^T + bias_u)   gate and up below one another in w, [2 N, K] (kGated)
//
// w is of x's type, or e4m3 with a scale for each block of 128 x 128 (W8A16): codes become x's type exactly, and the sums of
// each 128 products are multiplied by their block's scale.
//
// Why beside linear.cu. A decode step is a chain of such products, each bound by reading its weight, and what lies between
//          them costs more than it computes: a launch of a norm or an activation takes 2 to 3 us, in which memory idles.
//          Here they are part of the products. And the weight never depends on the launch before: this kernel begins to
//          read it while that one still runs (kProgrammatic), a ring on every SM, which no other way of launching does.
//
// Work.    A block computes tiles of 16 rows of w, all of K, tile after tile (blockIdx.x, + gridDim.x, ...): one block an SM,
//          of half its registers and, for few tokens, half its shared memory, so that the next launch fits beside it. Of K 8
//          warps take 128 bytes of w each in turn. So a warp needs a part of x only, which no other warp needs: it copies and
//          arranges that itself, and no warp waits for another before a tile's end.
// w.       Each lane has a ring of its own in shared memory (cp.async), from which it reads what it has copied: 16 bytes of a
//          row, two rows and two places a step; L2 is told of the whole line, without which DRAM gave a fifth less. kStages steps are under way, also beyond the end of a tile. (Through
//          registers the compiler moved the loads of several steps together, behind the products of the last: memory idled.)
// Product. Its rows are tokens, its columns 8 rows of w: a lane's 16 bytes of w are two right operands as they come, and codes
//          become operands once for all tokens. Up to 8 tokens, the left operand's lower 8 rows hold the same tokens' other
//          elements, those of the second right operand: of two products by one left operand, the upper rows count of one,
//          the lower rows of the other.
// n.       1 / rms(x) is a factor of a whole row: it is applied to the sums (bf16), or before (f16, which x times gamma might
//          not fit). Rounded once.
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
//   cki::e4m3), kTokenTiles (1 or 2, of 8 tokens), kStages, kSplit (more than 1: sm_90, not kNorm), kSplitBlocks (gates of
//   codes, N no multiple of 8), kNorm, kGated, kActivation, kHasBias, kHasResidual, kProgrammatic.
// Dynamic shared memory: rings, parts of two tiles, squares (kNorm), gamma (kNorm), n in whole steps of all warps, `slots_led`
//   inboxes (kSplit > 1).
#include "common/convert_element.cuh"
#include "common/reduce.cuh"
#include "common/types.cuh"
#include "common/vec.cuh"
#include "gemm/activation.cuh"
#include "gemm/fragments.cuh"
#include "gemm/skinny/decode_operand.cuh"
#include "ptx/cluster.cuh"
#include "ptx/cp_async.cuh"
#include "ptx/grid_dependency.cuh"
#include "ptx/mbarrier.cuh"
#include "ptx/memory.cuh"

using namespace cki;

constexpr int kWarps = 8;
constexpr int kThreads = kWarps * 32;
using Operand = gemm::DecodeOperand<Element, Code>;
constexpr bool kScaled = sizeof(Code) == 1;
constexpr bool kScaleSums = kNorm && gemm::IsBf16<Element>::kValue;  // by 1 / rms(x)
constexpr bool kPaired = kTokenTiles == 2;
constexpr int kChunk = Operand::kChunk;
constexpr int kStepK = 8 * kChunk;            // elements of K that a warp takes at a time: 128 bytes of w
constexpr int kRoundK = kSplit * kWarps * kStepK;  // all warps
constexpr int kScaleBlock = 128;
constexpr int kTileRows = 16;                  // of w
constexpr int kTileColumns = kGated ? kTileRows / 2 : kTileRows;  // of y
constexpr int kQuads = kTileColumns / 4;
static_assert(kSplit == 1 || !kNorm, "squares are not exchanged");
constexpr int kTokens = kTokenTiles * 8;
constexpr int kPartPitch = 24;                 // floats of a token's sums: eight tokens' in different banks
constexpr int kStageBytes = 4 * 32 * 16;       // of a warp
constexpr int kRingBytes = kWarps * kStages * kStageBytes;
constexpr int kSquares = kNorm ? kWarps * kTokens : 0;
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
        const bool there = inside && k + chunk * (4 * kChunk) < depth;
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

// Calls visit(k, place) for each piece of 8 elements of K that belongs to this lane; place: of token 0's, in 16 bytes.
template <class Visit>
__device__ __forceinline__ void for_each_piece(int warp, int rounds, int slots, Visit visit) {
  constexpr int kOfStep = kStepK / 8;
  for (int i = lane(); i < rounds * kOfStep; i += 32) {
    const int round = i / kOfStep, piece = i % kOfStep;
    const int plane = piece / (4 * kPieces) * kPieces + piece % kPieces;
    visit((round * (kSplit * kWarps) + warp) * kStepK + piece * 8, (round * kPlanes + plane) * slots * 4 + piece / kPieces % 4);
  }
}

// A token's 8 elements, times what they are to be.
__device__ __forceinline__ Vector<Element, 8> prepared(const uint4* from, const Element* gamma, float scale,
                                                       float& squares) {
  Vector<Element, 8> vector;
  vector.load(reinterpret_cast<const Element*>(from));
  if constexpr (kNorm) {
    float values[8], factors[8];
    vector.to_floats(values);
    load_floats(gamma, factors);
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      squares = fmaf(values[i], values[i], squares);
      values[i] *= (kScaleSums ? 1.0f : scale) * factors[i];
    }
    vector.from_floats(values);
  }
  Operand::arrange(vector);
  return vector;
}

// 1 / rms of a token.
__device__ __forceinline__ float row_scale(const float* squares, int token, int depth, float epsilon) {
  float sum = 0.0f;
#pragma unroll
  for (int part = 0; part < kWarps; ++part) sum += squares[part * kTokens + token];
  return rsqrtf(sum / static_cast<float>(depth) + epsilon);
}

// Sums of the squares of this warp's elements.
__device__ __forceinline__ void store_squares(float* squares, int warp, int token, float sum) {
  sum = warp_sum(sum);
  if (lane() == 0) squares[warp * kTokens + token] = sum;
}

// n from the rows that this warp has copied, in place; a lane touches its own pieces alone. gamma: this warp's.
__device__ __forceinline__ void arrange_rows(uint4* n, const Element* gamma, float* squares, int warp, int rounds, int tokens,
                                             int depth, float epsilon) {
  const int slots = kPaired ? 16 : tokens;
  if constexpr (kNorm && !kScaleSums) {
    for (int token = 0; token < tokens; ++token) {
      float sum = 0.0f;
      for_each_piece(warp, rounds, slots, [&](int, int place) {
        float values[8];
        load_floats(reinterpret_cast<const Element*>(n + place + token * 4), values);
#pragma unroll
        for (int i = 0; i < 8; ++i) sum = fmaf(values[i], values[i], sum);
      });
      store_squares(squares, warp, token, sum);
    }
    __syncthreads();
  }
  for (int token = 0; token < min(tokens, 8); ++token) {
    float sums[2] = {}, scales[2] = {};
    if constexpr (kNorm && !kScaleSums) {
      scales[0] = row_scale(squares, token, depth, epsilon);
      if (kPaired) scales[1] = row_scale(squares, token + 8, depth, epsilon);
    }
    for_each_piece(warp, rounds, slots, [&](int k, int place) {
      const Element* factors = gamma + (kNorm ? k : 0);
      uint4* own = n + place + token * 4;
      const Vector<Element, 8> upper = prepared(own, factors, scales[0], sums[0]);
      if constexpr (kPaired) {
        const Vector<Element, 8> lower = prepared(own + 32, factors, scales[1], sums[1]);
        own[0] = make_uint4(upper.words[0], lower.words[0], upper.words[1], lower.words[1]);
        own[32] = make_uint4(upper.words[2], lower.words[2], upper.words[3], lower.words[3]);
      } else {
        own[0] = make_uint4(upper.words[0], upper.words[2], upper.words[1], upper.words[3]);
      }
    });
    if constexpr (kScaleSums) {
      store_squares(squares, warp, token, sums[0]);
      if (kPaired) store_squares(squares, warp, token + 8, sums[1]);
    }
  }
}

__device__ __forceinline__ void add(float4& sum, const float4& other) {
  sum.x += other.x;
  sum.y += other.y;
  sum.z += other.z;
  sum.w += other.w;
}
__device__ __forceinline__ float component(const float4& v, int i) { return i == 0 ? v.x : i == 1 ? v.y : i == 2 ? v.z : v.w; }

// In a cluster: what the other blocks add to the tiles that this one finishes, a slot each. Nothing is used twice, so nobody
// waits to send.
template <int kBlocks>
struct ClusterInbox {
  float4* entries;  // [slot][block but this one][token][quads of 16 rows]
  u64* arrived;     // [slot]
  int tokens;

  __device__ __forceinline__ ClusterInbox(float4* first, int slots, int tokens)
      : entries(first), arrived(reinterpret_cast<u64*>(first + slots * (kBlocks - 1) * tokens * 4)), tokens(tokens) {}

  __device__ __forceinline__ float4* entry(int slot, int from, int token, int quad) const {
    return entries + ((slot * (kBlocks - 1) + from) * tokens + token) * 4 + quad;
  }
  // Of this thread's columns, i: gates and ups.
  static __device__ __forceinline__ int quad(int i) { return static_cast<int>(threadIdx.x) % kQuads + i * 2; }

  // used: slots that will be. Before anything is sent, the cluster must wait.
  __device__ __forceinline__ void begin(int used) const {
    for (int slot = static_cast<int>(threadIdx.x); slot < used; slot += kThreads) ptx::mbarrier_init(arrived + slot, 1);
    ptx::fence_mbarrier_init();
    for (int slot = static_cast<int>(threadIdx.x); slot < used; slot += kThreads)
      ptx::mbarrier_arrive_expect_tx(arrived + slot, static_cast<u32>((kBlocks - 1) * tokens * 64));
    ptx::cluster_arrive();
  }
  template <int N>
  __device__ __forceinline__ void send(const float4 (&sums)[N], int slot, int rank, int to, int token) const {
    const u32 barrier = ptx::map_shared_rank(arrived + slot, static_cast<u32>(to));
#pragma unroll
    for (int i = 0; i < N; ++i) {
      float4* place = entry(slot, rank - (rank > to), token, quad(i));
      ptx::store_async_cluster_f32x4(ptx::map_shared_rank(place, static_cast<u32>(to)), sums[i], barrier);
    }
  }
  // Adds all blocks' sums in the order of their ranks.
  template <int N>
  __device__ __forceinline__ void complete(float4 (&sums)[N], int slot, int rank, int token) const {
    ptx::mbarrier_wait_parity(arrived + slot, 0);
#pragma unroll
    for (int i = 0; i < N; ++i) {
      const float4 own = sums[i];
      sums[i] = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
#pragma unroll
      for (int block = 0; block < kBlocks; ++block)
        add(sums[i], block == rank ? own : *entry(slot, block - (block > rank), token, quad(i)));
    }
  }
};

using Inbox = ClusterInbox<kSplit>;

// Of a tile, in one warp: [8 rows of w][product of a pair].
using Sums = float[2][2][4];

// Of tokens 8 t + lane / 4: both products' sums for two rows of w.
__device__ __forceinline__ float2 sum_of(const Sums& sums, int half, int t) {
  const int upper = t * 2, lower = kPaired ? upper : 2;
  return make_float2(sums[half][0][upper] + sums[half][1][lower], sums[half][0][upper + 1] + sums[half][1][lower + 1]);
}

// sums += the products of a step.
__device__ __forceinline__ void multiply(Sums& sums, const uint4 (&words)[2][2], const uint4* n, int slots) {
#pragma unroll
  for (int plane = 0; plane < kPlanes; ++plane) {
    const uint4* own = n + plane * slots * 4;
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
        gemm::multiply(sums[half][i], a[i], b, ElementTag<Element>{});
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
  const int slots = kPaired ? 16 : tokens;
  const int part_floats = slots * kPartPitch;  // a warp's sums of a tile
  float* parts = reinterpret_cast<float*>(shared + kRingBytes);
  float* squares = parts + 2 * kWarps * part_floats;
  Element* factors = reinterpret_cast<Element*>(squares + kSquares);
  uint4* n = reinterpret_cast<uint4*>(factors + (kNorm ? end : 0)) + own_warp * rounds * kPlanes * slots * 4;
  unsigned char* ring = shared + own_warp * (kStages * kStageBytes) + lane() * 16;
  const Inbox inbox(reinterpret_cast<float4*>(factors + (kNorm ? end : 0)) + kWarps * rounds * kPlanes * slots * 4, slots_led,
                    tokens);

  int tile = static_cast<int>(blockIdx.x) / kSplit;
  Cursor next(w, w_stride, tile, columns, warp);
  if constexpr (kNorm) {
    for_each_piece(warp, rounds, 1, [&](int k, int) {
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
  for (int token = 0; token < tokens; ++token) {
    for_each_piece(warp, rounds, slots, [&](int k, int place) {
      ptx::cp_async<16>(n + place + token * 4, k < depth ? x + token * x_stride + k : x, k < depth ? 16 : 0);
    });
  }
  if constexpr (kPaired) {
    for (int token = tokens; token < 16; ++token)
      for_each_piece(warp, rounds, slots, [&](int, int place) { n[place + token * 4] = make_uint4(0, 0, 0, 0); });
  }
  ptx::cp_async_wait_all();
  arrange_rows(n, factors, squares, warp, rounds, tokens, depth, epsilon);
  __syncwarp();

  if constexpr (kSplit > 1) ptx::cluster_wait();
  const uint4* from = n + min(lane() / 4, kPaired ? 7 : tokens - 1) * 4 + lane() % 4;
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
        multiply(fresh, words, from + round * kPlanes * slots * 4, slots);
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          const float2 scale = own.at(half, round, columns + tile * kTileColumns);
#pragma unroll
          for (int t = 0; t < kTokenTiles; ++t) {
            const float2 sum = sum_of(fresh, half, t);
            scaled[half][t * 2] = fmaf(sum.x, scale.x, scaled[half][t * 2]);
            scaled[half][t * 2 + 1] = fmaf(sum.y, scale.y, scaled[half][t * 2 + 1]);
          }
        }
      } else {
        multiply(sums, words, from + round * kPlanes * slots * 4, slots);
      }
      __syncwarp();
      next.fetch(slot, columns, depth, end);
      stage = stage + 1 == kStages ? 0 : stage + 1;
    }
    if constexpr (kScaled) own = ahead;
    float* part = parts + (turn * kWarps + own_warp) * part_floats + lane() / 4 * kPartPitch + lane() % 4 * 2;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
#pragma unroll
      for (int t = 0; t < kTokenTiles; ++t) {
        if (!kPaired && lane() / 4 >= tokens) continue;
        *reinterpret_cast<float2*>(part + t * (8 * kPartPitch) + half * 8) =
            kScaled ? make_float2(scaled[half][t * 2], scaled[half][t * 2 + 1]) : sum_of(sums, half, t);
      }
    }
    __syncthreads();  // and whoever reads the other turn's parts has read them when all meet here the next time
    if (token < tokens) {
      const float4* of_token = reinterpret_cast<const float4*>(parts + turn * kWarps * part_floats + token * kPartPitch);
      float factor = Operand::kFactor;
      if constexpr (kScaleSums) factor *= row_scale(squares, token, depth, epsilon);
      float4 totals[kGated ? 2 : 1];
#pragma unroll
      for (int i = 0; i < (kGated ? 2 : 1); ++i) {
        totals[i] = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
#pragma unroll
        for (int p = 0; p < kWarps; ++p) add(totals[i], of_token[p * (part_floats / 4) + column / 4 + i * 2]);
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
