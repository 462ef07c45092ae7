// A decoder's products of few tokens (M = 1 to 16): the norm before, gates and residual in one launch; w by registers.
//
//   y[M, N] = act(n w^T + bias) + residual           n = x, or RMS norm: x / rms(x) * gamma, rounded to Element (kNorm)
//   y[M, N] = act(n wg^T + bias_g) * (n wu^T + bias_u)   gate and up below one another in w, [2 N, K] (kGated)
//
// w is of x's type, or e4m3 with a scale for each block of 128 x 128 (W8A16): codes become x's type exactly, and the sums of
// each 128 products are multiplied by their block's scale.
//
// Why beside linear.cu. A decode step is a chain of such products, each bound by reading its weight, and what lies between
//          them costs more than it computes: a launch of a norm or an activation takes 2 to 3 us, in which memory idles.
//          Here they are part of the products. And the weight never depends on the launch before: this kernel begins to
//          read it while that one still runs (kProgrammatic), 64 KB on every SM, which no other way of launching does.
//
// Work.    A block computes tiles of 16 rows of w, all of K, tile after tile (blockIdx.x, + gridDim.x, ...): one block an SM
//          of half its registers, so that the next launch fits beside it. 8 warps take 128 bytes of K each in turn.
// Loads.   No shared memory for w: what a lane loads, 16 bytes of a row, is its operand of two products or four
//          (decode_operand.cuh). A warp's load is 8 rows of 64 bytes; kDepth steps of 4 loads are under way in each lane, also
//          beyond the end of a tile.
// x.       In shared memory, normalised once by each block: it is small, and L2 has it. Rows of x from M on repeat the last.
// Sums.    fp32: the tensor core's over a warp's part of K, then the 8 warps' in a fixed order through shared memory. A row's
//          result depends on nothing but that row, whatever M and the grid are.
//
// w and gamma are read before the launch before has ended, so that one must not write them.
// Rows begin at multiples of 16 bytes; K is a multiple of 8, of 16 with codes. Strides in elements.
//
// Grid: (blocks). Prelude: Element (cki::f16, cki::bf16), Bias (Element or float), kTokenTiles (1 or 2, of 8 tokens), kDepth,
//   Code (Element or cki::e4m3), kNorm, kGated, kActivation, kHasBias, kHasResidual, kProgrammatic.
// Dynamic shared memory: kParts floats, M rows of x_pitch elements, and with kNorm K elements of gamma.
#include "common/convert_element.cuh"
#include "common/reduce.cuh"
#include "common/types.cuh"
#include "common/vec.cuh"
#include "gemm/activation.cuh"
#include "gemm/fragments.cuh"
#include "gemm/skinny/decode_operand.cuh"
#include "ptx/cp_async.cuh"
#include "ptx/grid_dependency.cuh"
#include "ptx/memory.cuh"

using namespace cki;

constexpr int kWarps = 8;
constexpr int kThreads = kWarps * 32;
using Operand = gemm::DecodeOperand<Element, Code>;
constexpr bool kScaled = sizeof(Code) == 1;
constexpr int kChunk = Operand::kChunk;
constexpr int kStepK = 8 * kChunk;  // elements of K that a warp takes at a time: 128 bytes of w
constexpr int kScaleBlock = 128;
constexpr int kTileRows = 16;    // of w: the rows of one product
constexpr int kTileColumns = kGated ? 8 : 16;  // of y
constexpr int kTokens = kTokenTiles * 8;
constexpr int kPart = kTokenTiles * kTileRows * 8;  // a warp's sums of a tile
constexpr int kParts = 2 * kWarps * kPart;          // of two tiles, in turn

// What a lane holds of a step: [row lane / 4 and 8 below][16 bytes at lane % 4 * 16, and the same 64 later]; their scales.
struct Step {
  uint4 words[2][2];
  float scales[kScaled ? 2 : 1];
};

using Sums = float[kTokenTiles][4];

__device__ __forceinline__ int lane() { return static_cast<int>(threadIdx.x) % 32; }
__device__ __forceinline__ int warp() { return static_cast<int>(threadIdx.x) / 32; }

// Where a lane reads the weight next: kDepth steps from its `k` on, of the two rows of a tile that are its own.
struct Cursor {
  const Code* rows[2];  // at k
  i64 row_step;            // elements from a tile's rows to those of this block's next
  int column;              // of y, that the upper row belongs to
  int k;

  __device__ __forceinline__ Cursor(const Code* w, i64 stride, int columns) {
    const int row = lane() / 4;
    column = static_cast<int>(blockIdx.x) * kTileColumns + row;
    k = warp() * kStepK + lane() % 4 * kChunk;
    rows[0] = w + column * stride + k;
    rows[1] = rows[0] + (kGated ? columns : 8) * stride;
    row_step = static_cast<i64>(gridDim.x) * kTileColumns * stride;
  }

  __device__ __forceinline__ Step load(int d, int columns, int depth, const float* scales, i64 scale_stride) const {
    Step loaded;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const bool inside = column + (kGated ? 0 : half * 8) < columns;
#pragma unroll
      for (int chunk = 0; chunk < 2; ++chunk) {
        const int offset = d * (kWarps * kStepK) + chunk * (4 * kChunk);
        loaded.words[half][chunk] = make_uint4(0, 0, 0, 0);
        if (inside && k + offset < depth)
          loaded.words[half][chunk] = ptx::load_global_nc_no_allocate_16(rows[half] + offset);
      }
      if constexpr (kScaled) {
        const int row = column + half * (kGated ? columns : 8), block = (k + d * (kWarps * kStepK)) / kScaleBlock;
        loaded.scales[half] = inside && block * kScaleBlock < depth ? scales[row / kScaleBlock * scale_stride + block] : 0.0f;
      }
    }
    return loaded;
  }

  // On by kDepth steps; behind the last of a tile's `steps` to this block's next tile.
  __device__ __forceinline__ void advance(int steps) {
    constexpr int kOn = kDepth * kWarps * kStepK;
    const int end = steps * (kWarps * kStepK);
    const bool in_tile = k + kOn < end;
    const i64 on = in_tile ? kOn : row_step - end + kOn;
    rows[0] += on;
    rows[1] += on;
    k += in_tile ? kOn : kOn - end;
    column += in_tile ? 0 : static_cast<int>(gridDim.x) * kTileColumns;
  }
};

// sum += the products of a step. x: the row of the lane's token of the first tile; second: that of the second tile.
__device__ __forceinline__ void multiply(Sums& sum, const Step& step, const Element* x, const Element* second) {
  Sums fresh = {};
  Sums& target = kScaled ? fresh : sum;
#pragma unroll
  for (int chunk = 0; chunk < 2; ++chunk) {
#pragma unroll
    for (int pair = 0; pair < Operand::kProducts / 2; ++pair) {
      uint4 tokens[kTokenTiles];
#pragma unroll
      for (int tile = 0; tile < kTokenTiles; ++tile)
        tokens[tile] = *reinterpret_cast<const uint4*>((tile == 0 ? x : second) + chunk * (4 * kChunk) + pair * 8);
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        u32 upper[2], lower[2];
        Operand::registers(step.words[0][chunk], pair * 2 + i, upper);
        Operand::registers(step.words[1][chunk], pair * 2 + i, lower);
        const u32 a[4] = {upper[0], lower[0], upper[1], lower[1]};
#pragma unroll
        for (int tile = 0; tile < kTokenTiles; ++tile) {
          const u32 b[2] = {i == 0 ? tokens[tile].x : tokens[tile].z, i == 0 ? tokens[tile].y : tokens[tile].w};
          gemm::multiply(target[tile], a, b, ElementTag<Element>{});
        }
      }
    }
  }
  if constexpr (kScaled) {
#pragma unroll
    for (int tile = 0; tile < kTokenTiles; ++tile) {
#pragma unroll
      for (int i = 0; i < 4; ++i) sum[tile][i] = fmaf(fresh[tile][i], step.scales[i / 2], sum[tile][i]);
    }
  }
}

// Starts the copies of x's rows, and of nothing but them; zeros behind the end of K, for zeros of w times anything must be
// zeros.
__device__ __forceinline__ void copy_rows(Element* rows, const Element* x, i64 x_stride, int tokens, int depth, int pitch) {
  const int thread = static_cast<int>(threadIdx.x);
  for (int token = 0; token < tokens; ++token) {
    for (int k = thread * 8; k < depth; k += kThreads * 8)
      ptx::cp_async<16>(rows + token * pitch + k, x + token * x_stride + k);
    if (depth + thread < (depth + kStepK - 1) / kStepK * kStepK) rows[token * pitch + depth + thread] = Element{};
  }
}

// What this thread has copied, as the products want it. A barrier must follow.
__device__ __forceinline__ void arrange_rows(Element* rows, int tokens, int depth, int pitch) {
  for (int token = 0; token < tokens; ++token) {
    for (int k = static_cast<int>(threadIdx.x) * 8; k < depth; k += kThreads * 8) {
      Vector<Element, 8> vector;
      vector.load(rows + token * pitch + k);
      Operand::arrange(vector);
      vector.store(rows + token * pitch + k);
    }
  }
}

// Normalises rows in shared memory. A barrier must follow.
__device__ __forceinline__ void normalise_rows(Element* rows, int tokens, int depth, int pitch, const Element* gamma,
                                               float epsilon, float (&scratch)[kTokens][kWarps]) {
  const int first = static_cast<int>(threadIdx.x) * 8;
  for (int token = 0; token < tokens; ++token) {
    float squares = 0.0f;
    for (int k = first; k < depth; k += kThreads * 8) {
      float values[8];
      load_floats(rows + token * pitch + k, values);
#pragma unroll
      for (int i = 0; i < 8; ++i) squares = fmaf(values[i], values[i], squares);
    }
    squares = warp_sum(squares);
    if (lane() == 0) scratch[token][warp()] = squares;
  }
  __syncthreads();
  for (int token = 0; token < tokens; ++token) {
    float squares = 0.0f;
#pragma unroll
    for (int part = 0; part < kWarps; ++part) squares += scratch[token][part];
    const float scale = rsqrtf(squares / static_cast<float>(depth) + epsilon);
    for (int k = first; k < depth; k += kThreads * 8) {
      float values[8], factors[8];
      load_floats(rows + token * pitch + k, values);
      load_floats(gamma + k, factors);
#pragma unroll
      for (int i = 0; i < 8; ++i) values[i] = values[i] * scale * factors[i];
      Vector<Element, 8> vector;
      vector.from_floats(values);
      Operand::arrange(vector);
      vector.store(rows + token * pitch + k);
    }
  }
}

extern "C" __global__ void __launch_bounds__(kThreads, 2)
    linear_decode(const Element* x, const Code* w, const float* scales, const Bias* bias, const Element* residual, Element* y,
                  const Element* gamma, int tokens, int columns, int depth, int x_pitch, float epsilon, i64 x_stride,
                  i64 w_stride, i64 scale_stride, i64 bias_stride, i64 residual_stride, i64 y_stride) {
  extern __shared__ __align__(16) unsigned char shared[];
  __shared__ float scratch[kTokens][kWarps];
  float* parts = reinterpret_cast<float*>(shared);
  Element* rows = reinterpret_cast<Element*>(parts + kParts);
  Element* factors = rows + tokens * x_pitch;

  const int tiles = (columns + kTileColumns - 1) / kTileColumns;
  const int all_steps = (depth + kStepK - 1) / kStepK;
  const int steps = (all_steps + kWarps * kDepth - 1) / (kWarps * kDepth) * kDepth;  // of a warp, a tile
  Cursor next(w, w_stride, columns);

  Step ring[kDepth];
#pragma unroll
  for (int d = 0; d < kDepth; ++d) ring[d] = next.load(d, columns, depth, scales, scale_stride);
  if constexpr (kNorm) {
    for (int k = static_cast<int>(threadIdx.x) * 8; k < depth; k += kThreads * 8) ptx::cp_async<16>(factors + k, gamma + k);
  }
  if constexpr (kProgrammatic) {
    ptx::griddepcontrol_launch_dependents();
    ptx::griddepcontrol_wait();
  }
  copy_rows(rows, x, x_stride, tokens, depth, x_pitch);
  ptx::cp_async_wait_all();
  if constexpr (kScaled && !kNorm) arrange_rows(rows, tokens, depth, x_pitch);
  __syncthreads();
  if constexpr (kNorm) {
    normalise_rows(rows, tokens, depth, x_pitch, factors, epsilon, scratch);
    __syncthreads();
  }

  const int token_row = lane() / 4;
  const Element* first = rows + min(token_row, tokens - 1) * x_pitch + lane() % 4 * kChunk;
  const Element* second = rows + min(token_row + 8, tokens - 1) * x_pitch + lane() % 4 * kChunk;
  // The one element of each tile that this thread finishes.
  const int column = static_cast<int>(threadIdx.x) % kTileColumns;
  const int token = static_cast<int>(threadIdx.x) / kTileColumns;
  int turn = 0;
  for (int tile = static_cast<int>(blockIdx.x); tile < tiles; tile += static_cast<int>(gridDim.x)) {
    const int y_column = tile * kTileColumns + column;
    const bool finishes = token < tokens && y_column < columns;
    float addend = 0.0f;
    if constexpr (kHasResidual) {
      if (finishes) addend = to_float(residual[token * residual_stride + y_column]);
    }
    Sums sum = {};
#pragma unroll 1
    for (int base = 0; base < steps; base += kDepth) {
      next.advance(steps);
#pragma unroll
      for (int d = 0; d < kDepth; ++d) {
        const int k = ((base + d) * kWarps + warp()) * kStepK;
        if (k < depth) multiply(sum, ring[d], first + k, second + k);
        ring[d] = next.load(d, columns, depth, scales, scale_stride);
      }
    }
    float* part = parts + (turn * kWarps + warp()) * kPart + lane() / 4 * 8 + lane() % 4 * 2;
#pragma unroll
    for (int t = 0; t < kTokenTiles; ++t) {
      *reinterpret_cast<float2*>(part + t * (kTileRows * 8)) = make_float2(sum[t][0], sum[t][1]);
      *reinterpret_cast<float2*>(part + t * (kTileRows * 8) + 64) = make_float2(sum[t][2], sum[t][3]);
    }
    __syncthreads();  // and whoever reads the other turn's parts has read them when all meet here the next time
    if (finishes) {
      const float* from = parts + turn * kWarps * kPart + token / 8 * (kTileRows * 8) + token % 8;
      const auto total = [&](int row) {
        float value = 0.0f;
#pragma unroll
        for (int part = 0; part < kWarps; ++part) value += from[part * kPart + row * 8];
        return value * Operand::kFactor;
      };
      const auto biased = [&](int row, int at) {
        return kHasBias ? total(row) + to_float(bias[at * bias_stride]) : total(row);
      };
      float value = gemm::activate<static_cast<gemm::Activation>(kActivation)>(biased(column, y_column));
      if constexpr (kGated) value *= biased(column + 8, columns + y_column);
      y[token * y_stride + y_column] = from_float<Element>(value + addend);
    }
    turn ^= 1;
  }
}
