// The end of a product's tile that is a head of Q, K or V, of 128 columns: norm and rotation, keys and values into a paged cache.
//
//   q, k:  x = x / sqrt(mean(x^2) + epsilon) * gamma                         (kNorm)
//          (a, b) = (a cos t - b sin t, a sin t + b cos t)                    pairs (i, i + 64), t of the token's position
//   k, v:  cache[slot / block_size, slot % block_size, head, :] = x
//
// as kv/append_kv.cu, but of sums that were not rounded before. Eight lanes have a row (RowPart). Cosines, sines and slots
// of the block's rows wait in shared memory: another warp brings them while products run.
//
// A slot below 0 or past the cache is skipped; a position outside the table turns nothing.
#pragma once

#include "common/convert_element.cuh"
#include "common/reduce.cuh"
#include "common/types.cuh"
#include "common/vec.cuh"
#include "gemm/hopper/row_parts.cuh"
#include "ptx/cp_async.cuh"

namespace cki::gemm {

constexpr int kHeadColumns = 128;

// Heads of queries, keys, values, in this order. q: where rows of queries go, q_row elements apart. table: [table_rows, 128] of
// cosines, then sines. Elements of a cache's row are neighbours.
struct HeadTensors {
  bf16* q;
  const bf16 *q_gamma, *k_gamma;
  bf16 *k_cache, *v_cache;
  const i64* slots;
  const int* positions;
  const float* table;
  i64 q_row, k_block, k_token, k_head, v_block, v_token, v_head, num_slots;
  int table_rows, block_size, q_heads, kv_heads;
  float epsilon;

  __device__ __forceinline__ bool is_value(int head) const { return head >= q_heads + kv_heads; }
};

// Of kRows rows of a block.
template <int kRows>
struct HeadRows {
  static constexpr int kBytes = kRows * (kHeadColumns * 4 + 8);

  unsigned char* memory;

  __device__ __forceinline__ float* angles(int row) const { return reinterpret_cast<float*>(memory) + row * kHeadColumns; }
  __device__ __forceinline__ i64& slot(int row) const {
    return reinterpret_cast<i64*>(memory + kRows * kHeadColumns * 4)[row];
  }

  // By one warp. first_row: the block's, of `rows` that exist.
  __device__ __forceinline__ void bring(const HeadTensors& heads, int first_row, int rows) const {
    const int lane = static_cast<int>(threadIdx.x) % 32;
#pragma unroll 4
    for (int i = 0; i < min(kRows, rows - first_row); ++i) {
      const int position = heads.positions[first_row + i];
      if (lane == 0) slot(i) = heads.slots[first_row + i];
      float* to = angles(i) + lane * 4;
      if (position >= 0 && position < heads.table_rows) {
        ptx::cp_async<16>(to, heads.table + static_cast<i64>(position) * kHeadColumns + lane * 4);
      } else {
        const float turned = lane < 16 ? 1.0f : 0.0f;
        *reinterpret_cast<float4*>(to) = make_float4(turned, turned, turned, turned);
      }
    }
    ptx::cp_async_wait_all();
  }
};

// A row's values. at: of the block's rows; row: of the step's, and whether there is such a one. gamma: of the head.
template <bool kNorm, int kBlockShift, int kRows>
__device__ __forceinline__ void finish_head(int lane, RowPart& values, const RowPart& gamma, const HeadRows<kRows>& found,
                                            const HeadTensors& heads, int head, int at, int row, bool stored) {
  const bool is_query = head < heads.q_heads, is_value = heads.is_value(head);
  if (!is_value) {
    float factor = 1.0f;
    if constexpr (kNorm) {
      float squares = 0.0f;
#pragma unroll
      for (int i = 0; i < 16; ++i) squares = fmaf(values[i / 4][i % 4], values[i / 4][i % 4], squares);
      factor = rsqrtf(warp_sum<8>(squares) / kHeadColumns + heads.epsilon);
    }
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const float* angles = found.angles(at) + i * 32 + first_column(lane);
      const float4 cosines = *reinterpret_cast<const float4*>(angles);
      const float4 sines = *reinterpret_cast<const float4*>(angles + kHeadColumns / 2);
      const float cosine[4] = {cosines.x, cosines.y, cosines.z, cosines.w}, sine[4] = {sines.x, sines.y, sines.z, sines.w};
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        const float a = values[i][e] * (kNorm ? factor * gamma[i][e] : 1.0f);
        const float b = values[i + 2][e] * (kNorm ? factor * gamma[i + 2][e] : 1.0f);
        values[i][e] = fmaf(a, cosine[e], -b * sine[e]);
        values[i + 2][e] = fmaf(b, cosine[e], a * sine[e]);
      }
    }
  }
  bf16* to = heads.q + row * heads.q_row + head * kHeadColumns;
  if (!is_query) {
    const i64 slot = found.slot(at);
    const i64 block = kBlockShift >= 0 ? slot >> (kBlockShift >= 0 ? kBlockShift : 0) : slot / heads.block_size;
    const i64 token = slot - block * heads.block_size;
    const int kv_head = head - heads.q_heads - (is_value ? heads.kv_heads : 0);
    to = is_value ? heads.v_cache + block * heads.v_block + token * heads.v_token + kv_head * heads.v_head
                  : heads.k_cache + block * heads.k_block + token * heads.k_token + kv_head * heads.k_head;
    stored = stored && slot >= 0 && slot < heads.num_slots;
  }
  if (!stored) return;
#pragma unroll
  for (int i = 0; i < 4; ++i) store_floats(to + i * 32 + first_column(lane), values[i]);
}

}  // namespace cki::gemm
