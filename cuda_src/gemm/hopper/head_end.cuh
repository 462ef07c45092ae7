// The end of a product's tile that is a head of Q, K or V, of 128 columns: norm and rotation, keys and values into a paged cache.
//
//   q, k:  x = x / sqrt(mean(x^2) + epsilon) * gamma                         (kNorm)
//          (a, b) = (a cos t - b sin t, a sin t + b cos t)                    pairs (i, i + 64), t of the token's position
//   k, v:  cache[slot / block_size, slot % block_size, head, :] = x
//
// as kv/append_kv.cu, but of sums that were not rounded before. A warp has whole rows, four neighbours a lane, several at a time. What
// comes from memory is asked for before the sums are complete.
//
// A slot below 0 or past the cache is skipped; a position outside the table turns nothing.
#pragma once

#include "common/convert_element.cuh"
#include "common/reduce.cuh"
#include "common/types.cuh"
#include "common/vec.cuh"

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

// What a warp needs of memory for kRows rows, kStep apart, of one head.
template <int kRows, int kStep, bool kNorm>
struct HeadInputs {
  i64 slots[kRows];
  int positions[kRows];
  float4 cosines[kRows], sines[kRows];
  Vector<bf16, 4> gamma;

  // As early as rows are known. rows: that exist.
  __device__ __forceinline__ void load_places(const HeadTensors& heads, int first_row, int rows) {
#pragma unroll
    for (int i = 0; i < kRows; ++i) {
      const int row = min(first_row + i * kStep, rows - 1);
      slots[i] = heads.slots[row];
      positions[i] = heads.positions[row];
    }
  }

  __device__ __forceinline__ void load(int lane, const HeadTensors& heads, int head) {
    if (heads.is_value(head)) return;
    if constexpr (kNorm) gamma.load((head < heads.q_heads ? heads.q_gamma : heads.k_gamma) + lane * 4);
#pragma unroll
    for (int i = 0; i < kRows; ++i) {
      const bool known = positions[i] >= 0 && positions[i] < heads.table_rows;
      const float* row = heads.table + static_cast<i64>(positions[i]) * kHeadColumns + lane % 16 * 4;
      cosines[i] = known ? *reinterpret_cast<const float4*>(row) : make_float4(1.0f, 1.0f, 1.0f, 1.0f);
      sines[i] = known ? *reinterpret_cast<const float4*>(row + kHeadColumns / 2) : make_float4(0.0f, 0.0f, 0.0f, 0.0f);
    }
  }

  // Rows [from, from + kTogether) of kRows: a lane's values of them.
  template <int kTogether, int kBlockShift>
  __device__ __forceinline__ void finish(int lane, float (&values)[kTogether][4], const HeadTensors& heads, int head, int from,
                                         int first_row, int rows) const {
    const bool is_query = head < heads.q_heads, is_value = heads.is_value(head);
    if (!is_value) {
      normalise(values, heads.epsilon);
      rotate(lane, values, from);
    }
#pragma unroll
    for (int n = 0; n < kTogether; ++n) {
      const int row = first_row + (from + n) * kStep;
      const i64 slot = slots[from + n];
      const i64 block = kBlockShift >= 0 ? slot >> (kBlockShift >= 0 ? kBlockShift : 0) : slot / heads.block_size;
      const i64 token = slot - block * heads.block_size;
      bf16* to;
      if (is_query) {
        to = heads.q + row * heads.q_row + head * kHeadColumns;
      } else if (is_value) {
        to = heads.v_cache + block * heads.v_block + token * heads.v_token + (head - heads.q_heads - heads.kv_heads) * heads.v_head;
      } else {
        to = heads.k_cache + block * heads.k_block + token * heads.k_token + (head - heads.q_heads) * heads.k_head;
      }
      if (row < rows && (is_query || (slot >= 0 && slot < heads.num_slots))) store_floats(to + lane * 4, values[n]);
    }
  }

 private:
  template <int kTogether>
  __device__ __forceinline__ void normalise(float (&values)[kTogether][4], float epsilon) const {
    if constexpr (kNorm) {
      float weights[4];
      gamma.to_floats(weights);
#pragma unroll
      for (int n = 0; n < kTogether; ++n) {
        float squares = 0.0f;
#pragma unroll
        for (int e = 0; e < 4; ++e) squares = fmaf(values[n][e], values[n][e], squares);
        const float factor = rsqrtf(warp_sum(squares) / kHeadColumns + epsilon);
#pragma unroll
        for (int e = 0; e < 4; ++e) values[n][e] *= factor * weights[e];
      }
    }
  }

  // A value's partner is the same of the lane 16 away.
  template <int kTogether>
  __device__ __forceinline__ void rotate(int lane, float (&values)[kTogether][4], int from) const {
    const float sign = lane < 16 ? -1.0f : 1.0f;
#pragma unroll
    for (int n = 0; n < kTogether; ++n) {
      const float cosine[4] = {cosines[from + n].x, cosines[from + n].y, cosines[from + n].z, cosines[from + n].w};
      const float sine[4] = {sines[from + n].x, sines[from + n].y, sines[from + n].z, sines[from + n].w};
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        const float other = __shfl_xor_sync(kFullWarp, values[n][e], 16);
        values[n][e] = fmaf(values[n][e], cosine[e], other * (sign * sine[e]));
      }
    }
  }
};

}  // namespace cki::gemm
