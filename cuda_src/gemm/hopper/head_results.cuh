// The end of few_rows_fp8.cu's tiles that are heads of queries, keys and values (kHeads): norm of the head, rotation, and the place in
// the paged cache. For that kernel's prelude and constants.
//
// What kv/append_kv.cu computes, of products that are not rounded in between. A head is a tile of 128 columns; element i turns with
// i + 64, which the other consumer's same lane has.
#pragma once

#include "common/convert_element.cuh"
#include "common/reduce.cuh"
#include "common/types.cuh"
#include "ptx/barrier.cuh"

namespace cki::gemm {

constexpr int kHeadColumns = 128;

// positions, slots: of rows; table: cosines, then sines of a position (kHasTable). Caches: dense [slots, kv_heads, 128].
struct Heads {
  const int* positions;
  const i64* slots;
  const float* table;
  const bf16 *q_norm, *k_norm;  // kHeadNorm
  bf16 *k_cache, *v_cache;
  int q_heads, kv_heads, table_rows;
  i64 num_slots;
  double log2_base;
};

// The cosines and sines of a thread's columns in its rows; known before the products.
template <int kHalves, int kCount>
struct HeadAngles {
  float cosines[kHalves][kCount], sines[kHalves][kCount];

  // pair(i): of column i of the thread.
  template <class PairOf>
  __device__ __forceinline__ void find(const Heads& heads, const int (&rows)[kHalves], PairOf pair_of) {
    i64 position[kHalves];
#pragma unroll
    for (int half = 0; half < kHalves; ++half) position[half] = heads.positions[rows[half]];
#pragma unroll
    for (int i = 0; i < kCount; ++i) {
      const int pair = pair_of(i);
      [[maybe_unused]] double frequency = 0.0;  // turns a position
      if constexpr (!kHasTable) frequency = exp2(-heads.log2_base * (2.0 * pair / kHeadColumns)) * 0.15915494309189533577;
#pragma unroll
      for (int half = 0; half < kHalves; ++half) {
        float cosine = 1.0f, sine = 0.0f;
        if constexpr (kHasTable) {
          if (position[half] >= 0 && position[half] < heads.table_rows) {
            const float* row = heads.table + position[half] * kHeadColumns;
            cosine = row[pair];
            sine = row[kHeadColumns / 2 + pair];
          }
        } else {
          const double turns = static_cast<double>(position[half]) * frequency;
          sincospif(static_cast<float>((turns - rint(turns)) * 2.0), &sine, &cosine);
        }
        cosines[half][i] = cosine;
        sines[half][i] = sine;
      }
    }
  }
};

// values: of a thread's rows, `kCount` columns, column_of(i) of the head, of the half `consumer`. sums: of squares of rows, by
// rows of the tile; swap: kConsumers * kHalves * kCount * 128 floats. Two consumers of four warps call it.
template <int kHalves, int kCount, class ColumnOf>
__device__ __forceinline__ void finish_head(float (&values)[kHalves][kCount], const HeadAngles<kHalves, kCount>& angles,
                                            const Heads& heads, int head, int consumer, const int (&rows)[kHalves], int count, float epsilon, float* sums, float* swap,
                                            bf16* q, i64 q_row, ColumnOf column_of) {
  constexpr int kConsumerThreads = 128, kTileRows = 64;
  const int thread = static_cast<int>(threadIdx.x) % kConsumerThreads;
  const bool is_query = head < heads.q_heads, is_key = !is_query && head < heads.q_heads + heads.kv_heads;
  if (is_query || is_key) {
    float squares[kHalves] = {};
    float* own = swap + consumer * (kHalves * kCount * kConsumerThreads) + thread;
    const float* other = swap + (1 - consumer) * (kHalves * kCount * kConsumerThreads) + thread;
#pragma unroll
    for (int half = 0; half < kHalves; ++half) {
#pragma unroll
      for (int i = 0; i < kCount; ++i) {
        own[(half * kCount + i) * kConsumerThreads] = values[half][i];
        squares[half] = fmaf(values[half][i], values[half][i], squares[half]);
      }
      squares[half] = warp_sum<4>(squares[half]);
      if (threadIdx.x % 4 == 0) sums[consumer * kTileRows + rows[half]] = squares[half];
    }
    ptx::bar_sync(1, 2 * kConsumerThreads);
    const bf16* weights = is_query ? heads.q_norm : heads.k_norm;
#pragma unroll
    for (int half = 0; half < kHalves; ++half) {
      float factor = 1.0f;
      if constexpr (kHeadNorm)
        factor = rsqrtf((squares[half] + sums[(1 - consumer) * kTileRows + rows[half]]) / kHeadColumns + epsilon);
#pragma unroll
      for (int i = 0; i < kCount; ++i) {
        float value = values[half][i] * factor, partner = other[(half * kCount + i) * kConsumerThreads] * factor;
        if constexpr (kHeadNorm) {
          value *= to_float(weights[column_of(i)]);
          partner *= to_float(weights[column_of(i) ^ (kHeadColumns / 2)]);
        }
        const float sine = consumer == 0 ? -angles.sines[half][i] : angles.sines[half][i];
        values[half][i] = fmaf(value, angles.cosines[half][i], partner * sine);
      }
    }
    ptx::bar_sync(1, 2 * kConsumerThreads);  // before the next tile's values take these places
  }
#pragma unroll
  for (int half = 0; half < kHalves; ++half) {
    if (rows[half] >= count) continue;
    bf16* to = q + rows[half] * q_row + static_cast<i64>(head) * kHeadColumns;
    if (!is_query) {
      const i64 slot = heads.slots[rows[half]];
      if (slot < 0 || slot >= heads.num_slots) continue;
      const int kv_head = head - heads.q_heads - (is_key ? 0 : heads.kv_heads);
      to = (is_key ? heads.k_cache : heads.v_cache) + (slot * heads.kv_heads + kv_head) * kHeadColumns;
    }
#pragma unroll
    for (int i = 0; i < kCount; i += 2)
      *reinterpret_cast<u32*>(to + column_of(i)) = pack_pair<bf16>(values[half][i], values[half][i + 1]);
  }
}

}  // namespace cki::gemm
