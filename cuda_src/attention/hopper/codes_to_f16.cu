// Codes of e4m3 as f16, which holds them exactly: for the attention kernel of 16-bit operands (attention.cu, kDescaled),
// which serves what that of e4m3 does not.
//
//   q [batch, queries, heads, head_dim], k [batch, keys, kv_heads, head_dim], v [batch, keys, kv_heads, value_dim] by
//   strides -> the same in f16, dense but for rows of a multiple of 8 elements, of which those past the end are 0
//
// A thread converts 8 elements of a row. Bytes: codes once, twice as many written. Grid: (pieces of the largest / kThreads, 3).
// Prelude: kWide: 8 codes of a row are one load.
#include "common/convert_element.cuh"
#include "common/types.cuh"

using namespace cki;

constexpr int kThreads = 256;

extern "C" __global__ void __launch_bounds__(kThreads)
    codes_to_f16(const u8* __restrict__ q, const u8* __restrict__ k, const u8* __restrict__ v, uint4* q_out, uint4* k_out,
                 uint4* v_out, i64 q_batch, i64 q_sequence, i64 q_head, i64 q_dim, i64 k_batch, i64 k_sequence, i64 k_head,
                 i64 k_dim, i64 v_batch, i64 v_sequence, i64 v_head, i64 v_dim, int batch, int queries, int keys, int heads,
                 int kv_heads, int head_dim, int value_dim) {
  const i64 unit = static_cast<i64>(blockIdx.x) * kThreads + threadIdx.x;
  const auto convert = [&](const u8* codes, uint4* out, i64 batch_stride, i64 token_stride, i64 head_stride, i64 dim_stride,
                           int tokens, int rows, int dim) {
    const int pieces = (dim + 7) / 8;
    const i64 row = unit / pieces, token = row / rows;
    const int first = static_cast<int>(unit - row * pieces) * 8, head = static_cast<int>(row - token * rows);
    if (token >= static_cast<i64>(batch) * tokens) return;
    codes += token / tokens * batch_stride + token % tokens * token_stride + head * head_stride + first * dim_stride;
    u32 pairs[4];
    if constexpr (kWide) {
      const uint2 words = *reinterpret_cast<const uint2*>(codes);
#pragma unroll
      for (int i = 0; i < 4; ++i) pairs[i] = (i < 2 ? words.x : words.y) >> i % 2 * 16 & 0xffffu;
    } else {
      const auto code = [&](int i) { return first + i < dim ? static_cast<u32>(codes[i * dim_stride]) : 0u; };
#pragma unroll
      for (int i = 0; i < 4; ++i) pairs[i] = code(2 * i) | code(2 * i + 1) << 8;
    }
    const auto converted = [&](int i) { return e4m3x2_as_f16x2(static_cast<u16>(pairs[i])); };
    out[unit] = make_uint4(converted(0), converted(1), converted(2), converted(3));
  };
  if (blockIdx.y == 0) {
    convert(q, q_out, q_batch, q_sequence, q_head, q_dim, queries, heads, head_dim);
  } else if (blockIdx.y == 1) {
    convert(k, k_out, k_batch, k_sequence, k_head, k_dim, keys, kv_heads, head_dim);
  } else {
    convert(v, v_out, v_batch, v_sequence, v_head, v_dim, keys, kv_heads, value_dim);
  }
}
