// fp32 queries, keys and values as three pieces of bf16 each (fp32_pieces.cuh), for attention_fp32.cu.
//
//   q [batch, queries, heads, head_dim], k [batch, keys, kv_heads, head_dim], v [batch, keys, kv_heads, value_dim] by
//   strides, the last 1 -> [batch, tokens, heads, 3, dim rounded up to 8] bf16, columns past the end 0
//
// A thread splits 8 elements of a row. Bytes: 4 an element read, 6 written. Grid: (groups of the largest / kThreads, 3).
// It also zeroes the counter of the dynamic schedule, where there is one.
// Prelude: kWide: rows are whole groups, at multiples of 16 bytes.
#include "common/convert_element.cuh"
#include "common/online_softmax.cuh"
#include "common/types.cuh"
#include "common/vec.cuh"
#include "ptx/grid_dependency.cuh"

using namespace cki;

constexpr int kThreads = 256, kGroup = 8, kPieces = 3;

// The next piece of x, which keeps the rest. What bf16 would round to infinity is cut off; what is not finite has one piece.
__device__ __forceinline__ float take_piece(float& x) {
  float piece = to_float(from_float<bf16>(x));
  if (!(fabsf(piece) < positive_infinity())) {
    if (!(fabsf(x) < positive_infinity())) {
      x = 0.0f;
      return piece;
    }
    piece = __uint_as_float(__float_as_uint(x) & 0xffff0000u);
  }
  x -= piece;
  return piece;
}

extern "C" __global__ void __launch_bounds__(kThreads)
    split_fp32(const float* __restrict__ q, const float* __restrict__ k, const float* __restrict__ v, u32* q_out, u32* k_out,
               u32* v_out, u32* counter, i64 q_batch, i64 q_sequence, i64 q_head, i64 k_batch, i64 k_sequence, i64 k_head, i64 v_batch,
               i64 v_sequence, i64 v_head, int batch, int queries, int keys, int heads, int kv_heads, int head_dim,
               int value_dim) {
  ptx::griddepcontrol_launch_dependents();
  if (counter != nullptr && blockIdx.x + blockIdx.y + threadIdx.x == 0) *counter = 0;
  const i64 unit = static_cast<i64>(blockIdx.x) * kThreads + threadIdx.x;
  const auto split = [&](const float* from, u32* out, i64 batch_stride, i64 token_stride, i64 head_stride, int tokens,
                         int rows, int dim) {
    const int groups = (dim + kGroup - 1) / kGroup;
    const i64 row = unit / groups, token = row / rows;
    const int group = static_cast<int>(unit - row * groups), head = static_cast<int>(row - token * rows);
    if (token >= static_cast<i64>(batch) * tokens) return;
    from += token / tokens * batch_stride + token % tokens * token_stride + head * head_stride + group * kGroup;
    float x[kGroup];
    if constexpr (kWide) {
      load_floats(from, x);
    } else {
#pragma unroll
      for (int i = 0; i < kGroup; ++i) x[i] = group * kGroup + i < dim ? from[i] : 0.0f;
    }
#pragma unroll
    for (int piece = 0; piece < kPieces; ++piece) {
      u32 words[kGroup / 2];
#pragma unroll
      for (int i = 0; i < kGroup / 2; ++i) {
        const float first = take_piece(x[2 * i]), second = take_piece(x[2 * i + 1]);
        words[i] = pack_pair<bf16>(first, second);
      }
      store_words(out + ((row * kPieces + piece) * groups + group) * (kGroup / 2), words);
    }
  };
  if (blockIdx.y == 0) {
    split(q, q_out, q_batch, q_sequence, q_head, queries, heads, head_dim);
  } else if (blockIdx.y == 1) {
    split(k, k_out, k_batch, k_sequence, k_head, keys, kv_heads, head_dim);
  } else {
    split(v, v_out, v_batch, v_sequence, v_head, keys, kv_heads, value_dim);
  }
}
