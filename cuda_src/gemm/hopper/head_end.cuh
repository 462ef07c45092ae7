// The end of a product's tile that is a head of Q, K or V, of 128 columns: norm and rotation, keys and values into a paged cache.
//
//   q, k:  x = x / sqrt(mean(x^2) + epsilon) * gamma                         (kNorm)
//          (a, b) = (a cos t - b sin t, a sin t + b cos t)                    pairs (i, i + 64), t of the token's position
//   k, v:  cache[slot / block_size, slot % block_size, head, :] = x
//
// as kv/append_kv.cu, but of sums that were not rounded before. A head's halves are two warps', a pair (i, i + 64) of the same lane
// in both: they tell each other sums of squares and what is to be rotated, through shared memory, at one barrier. What comes from
// memory is asked for before the sums are complete.
//
// A slot below 0 or past the cache is skipped; a position outside the table turns nothing.
#pragma once

#include "common/convert_element.cuh"
#include "common/reduce.cuh"
#include "common/types.cuh"
#include "gemm/hopper/tiles.cuh"
#include "ptx/barrier.cuh"

namespace cki::gemm {

constexpr int kHeadColumns = 128, kHeadPairs = kHeadColumns / 4 / 4;  // of a lane: neighbours in half a head

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

// What a lane needs of memory for its rows (kRows, eight apart) of one head.
template <int kRows, bool kNorm>
struct HeadInputs {
  i64 slots[kRows];
  int positions[kRows];
  float2 cosines[kRows][kHeadPairs], sines[kRows][kHeadPairs];
  u32 gamma[kHeadPairs], others_gamma[kHeadPairs];

  // As early as rows are known.
  __device__ __forceinline__ void load_places(const HeadTensors& heads, int first_row, int rows) {
#pragma unroll
    for (int i = 0; i < kRows; ++i) {
      const int row = min(first_row + i * 8, rows - 1);
      slots[i] = heads.slots[row];
      positions[i] = heads.positions[row];
    }
  }

  // half: of the head, 0 or 1.
  __device__ __forceinline__ void load(const HeadTensors& heads, int head, int half) {
    if (heads.is_value(head)) return;
    const int first = opaque_lane() % 4 * 2;
    const bf16* weight = head < heads.q_heads ? heads.q_gamma : heads.k_gamma;
#pragma unroll
    for (int j = 0; j < kHeadPairs; ++j) {
      const int at = first + j * 8;
      if constexpr (kNorm) {
        gamma[j] = *reinterpret_cast<const u32*>(weight + half * kHeadColumns / 2 + at);
        others_gamma[j] = *reinterpret_cast<const u32*>(weight + (1 - half) * kHeadColumns / 2 + at);
      }
#pragma unroll
      for (int i = 0; i < kRows; ++i) {
        const bool known = positions[i] >= 0 && positions[i] < heads.table_rows;
        const float* row = heads.table + static_cast<i64>(positions[i]) * kHeadColumns + at;
        cosines[i][j] = known ? *reinterpret_cast<const float2*>(row) : make_float2(1.0f, 1.0f);
        sines[i][j] = known ? *reinterpret_cast<const float2*>(row + kHeadColumns / 2) : make_float2(0.0f, 0.0f);
      }
    }
  }
};

// Where two warps tell each other values: kRows * kHeadPairs float2 of each lane, a warp's own and the other's; and sums of squares,
// for each row.
struct HeadExchange {
  float2 *own, *other;
  float2 *own_squares, *other_squares;
};

// A lane's values of its rows. threads: of the block that come here, at barrier 1. kAgain: more heads follow in the same memory.
template <int kRows, bool kNorm, int kBlockShift, bool kAgain>
__device__ __forceinline__ void finish_head(const float (&values)[kRows][2 * kHeadPairs], const HeadInputs<kRows, kNorm>& inputs,
                                            const HeadTensors& heads, const HeadExchange& exchange, int head, int half,
                                            int first_row, int rows, int threads) {
  const int lane = opaque_lane(), first = half * kHeadColumns / 2 + lane % 4 * 2;
  const bool is_query = head < heads.q_heads, is_value = heads.is_value(head);
  float squares[kRows];
  if (!is_value) {
    __syncwarp();  // lanes may still read what lies here
#pragma unroll
    for (int i = 0; i < kRows; ++i) {
      squares[i] = 0.0f;
#pragma unroll
      for (int j = 0; j < kHeadPairs; ++j) {
        exchange.own[(i * kHeadPairs + j) * 32 + lane] = make_float2(values[i][j * 2], values[i][j * 2 + 1]);
        squares[i] = fmaf(values[i][j * 2], values[i][j * 2], fmaf(values[i][j * 2 + 1], values[i][j * 2 + 1], squares[i]));
      }
      if constexpr (kNorm) {
        squares[i] = warp_sum<4>(squares[i]);
        if (lane % 4 == 0) exchange.own_squares[i * 8].x = squares[i];
      }
    }
    ptx::bar_sync(1, threads);
  }
#pragma unroll
  for (int i = 0; i < kRows; ++i) {
    const int row = first_row + i * 8;
    const i64 slot = inputs.slots[i];
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
    const bool stored = row < rows && (is_query || (slot >= 0 && slot < heads.num_slots));
    float factor = 1.0f;
    if (kNorm && !is_value)
      factor = rsqrtf((squares[i] + exchange.other_squares[i * 8].x) / kHeadColumns + heads.epsilon);
#pragma unroll
    for (int j = 0; j < kHeadPairs; ++j) {
      float2 value = make_float2(values[i][j * 2], values[i][j * 2 + 1]);
      if (!is_value) {
        float2 other = exchange.other[(i * kHeadPairs + j) * 32 + lane];
        if constexpr (kNorm) {
          float weight[2], others[2];
          unpack_pair<bf16>(inputs.gamma[j], weight[0], weight[1]);
          unpack_pair<bf16>(inputs.others_gamma[j], others[0], others[1]);
          value = make_float2(value.x * (factor * weight[0]), value.y * (factor * weight[1]));
          other = make_float2(other.x * (factor * others[0]), other.y * (factor * others[1]));
        }
        const float2 cosine = inputs.cosines[i][j], sine = inputs.sines[i][j];
        const float sign = half == 0 ? -1.0f : 1.0f;
        value = make_float2(fmaf(value.x, cosine.x, other.x * (sign * sine.x)), fmaf(value.y, cosine.y, other.y * (sign * sine.y)));
      }
      if (stored) *reinterpret_cast<u32*>(to + first + j * 8) = pack_pair<bf16>(value.x, value.y);
    }
  }
  if (kAgain && !is_value) ptx::bar_sync(1, threads);
}

}  // namespace cki::gemm
