// New keys and values into a paged cache, and queries beside them: norm, rotation, quantisation and scatter in one
// launch.
//
//   q, k:  x = x / sqrt(mean(x^2) + eps) * (weight + weight_offset)   where there is a weight, over the head dimension
//          (a, b) = (a cos t - b sin t, a sin t + b cos t)            for each rotated pair, t = position * frequency
//   k, v:  code = e4m3(x / scale)                                     for an e4m3 cache
//          cache[slot / block_size, slot % block_size, head, :] = x or code
//
// q [tokens, q_heads, kHeadDim]  k [tokens, kv_heads, kHeadDim]  v [tokens, kv_heads, kValueDim]   any strides
// q_out as q.  k_cache [blocks, block_size, kv_heads, kHeadDim], v_cache [.., kValueDim]           any strides
// k_scale, v_scale fp32: [blocks, block_size, kv_heads], row-major, written (kTokenScales: the row's largest magnitude
// / 448), or [kv_heads], read.  table [positions, kRotaryDim] fp32: cosines, then sines.
// Bytes moved: each element once in and once out; cosines and sines stay in L2.
//
// Pairs are (i, i + kRotaryDim / 2), or with kInterleaved (2i, 2i + 1), of the first kRotaryDim elements. Without a
// table an angle is computed in fp64 as a fraction of a turn: position * frequency in fp32 is off by 0.008 at 100000.
//
// Everything between load and store is fp32 and not rounded in between. A block takes some heads of one token, so
// angles are computed once for all of them. A row of a head belongs to kLanes lanes, eight elements each; partners of
// a pair meet through shared memory, because neox partners lie in other lanes and at any distance.
//
// A slot below 0 or past the cache is skipped: nothing is written for it. A position outside the table turns nothing.
#include "common/convert_element.cuh"
#include "common/reduce.cuh"
#include "common/types.cuh"
#include "common/vec.cuh"

using namespace cki;

constexpr int kPart = 8;  // elements of a lane
constexpr int kWidest = kHeadDim > kValueDim ? kHeadDim : kValueDim;
// Lanes of a row: a power of two, so that rows do not straddle warps.
constexpr int kLanes =
    kWidest <= 8 ? 1 : kWidest <= 16 ? 2 : kWidest <= 32 ? 4 : kWidest <= 64 ? 8 : kWidest <= 128 ? 16 : 32;
constexpr int kRows = kThreads / kLanes;  // rows that a block works on at a time
constexpr int kPairs = kRotaryDim / 2;
constexpr bool kQuantize = sizeof(CacheElement) == 1;
constexpr float kLargestCode = 448.0f;

// Eight elements of a row of `dim`, the first of them at `p`; past the end `values` stay as they are.
template <class T>
__device__ __forceinline__ void load_part(const T* p, i64 step, int first, int dim, float (&values)[kPart]) {
  if constexpr (kVectorLoads) {
    if (first < dim) load_floats(p, values);
  } else {
#pragma unroll
    for (int e = 0; e < kPart; ++e)
      if (first + e < dim) values[e] = to_float(p[e * step]);
  }
}

// Rounds to T and stores. e4m3 saturates; values are already divided by their scale.
template <class T>
__device__ __forceinline__ void store_part(T* p, i64 step, int first, int dim, const float (&values)[kPart]) {
  if constexpr (sizeof(T) == 1) {
    u32 words[2] = {};
#pragma unroll
    for (int e = 0; e < kPart; e += 2)
      words[e / 4] |= static_cast<u32>(ptx::f32x2_to_e4m3x2(values[e], values[e + 1])) << (e % 4 * 8);
    if constexpr (kVectorStores) {
      if (first < dim) store_words(p, words);
    } else {
#pragma unroll
      for (int e = 0; e < kPart; ++e)
        if (first + e < dim) p[e * step].bits = static_cast<u8>(words[e / 4] >> (e % 4 * 8));
    }
  } else if constexpr (kVectorStores) {
    if (first < dim) store_floats(p, values);
  } else {
#pragma unroll
    for (int e = 0; e < kPart; ++e)
      if (first + e < dim) p[e * step] = from_float<T>(values[e]);
  }
}

// Where element i of a row lies in the row's place in shared memory: lanes that read or write their e-th elements
// together then touch neighbouring words.
__device__ __forceinline__ int spread(int i) { return i % kPart * kLanes + i / kPart; }

// Rotates the pairs of a row. `row` is shared memory of this row alone.
__device__ __forceinline__ void rotate(float (&values)[kPart], int first, float* row, const float* cosines,
                                       const float* sines) {
  const auto pair_of = [](int i) { return kInterleaved ? i / 2 : i < kPairs ? i : i - kPairs; };
  const auto is_second = [](int i) { return kInterleaved ? i % 2 != 0 : i >= kPairs; };
#pragma unroll
  for (int e = 0; e < kPart; ++e) row[spread(first + e)] = values[e];
  __syncwarp();
#pragma unroll
  for (int e = 0; e < kPart; ++e) {
    const int i = first + e;
    if (i >= kRotaryDim) break;
    const bool second = is_second(i);
    const float partner = row[spread(kInterleaved ? i ^ 1 : second ? i - kPairs : i + kPairs)];
    const float sine = second ? sines[pair_of(i)] : -sines[pair_of(i)];
    values[e] = fmaf(values[e], cosines[pair_of(i)], partner * sine);
  }
  __syncwarp();  // before the next row takes this place
}

extern "C" __global__ void __launch_bounds__(kThreads)
    append_kv(const Element* q, const Element* __restrict__ k, const Element* __restrict__ v, Element* q_out,
              CacheElement* k_cache, CacheElement* v_cache, float* k_scale, float* v_scale,
              const SlotIndex* __restrict__ slots, const PositionIndex* __restrict__ positions,
              const float* __restrict__ table, const NormWeight* __restrict__ q_weight,
              const NormWeight* __restrict__ k_weight,                                                       //
              i64 q_token, i64 q_head, i64 q_step, i64 k_token, i64 k_head, i64 k_step,                      //
              i64 v_token, i64 v_head, i64 v_step, i64 q_out_token, i64 q_out_head, i64 q_out_step,          //
              i64 k_cache_block, i64 k_cache_token, i64 k_cache_head, i64 k_cache_step,                      //
              i64 v_cache_block, i64 v_cache_token, i64 v_cache_head, i64 v_cache_step,                      //
              i64 slots_stride, i64 positions_stride, i64 table_stride, i64 q_weight_step, i64 k_weight_step,
              i64 num_slots, i64 table_rows, int block_size, int q_heads, int kv_heads, int parts,           //
              double log2_base, float eps, float weight_offset) {
  __shared__ float cosines[kPairs + 1], sines[kPairs + 1];
  __shared__ float exchange[kRows][kLanes * kPart];
  const int token = static_cast<int>(blockIdx.x) / parts;
  const int part = static_cast<int>(blockIdx.x) - token * parts;
  const int thread = static_cast<int>(threadIdx.x);

  if constexpr (kRotaryDim > 0) {
    const i64 position = static_cast<i64>(positions[token * positions_stride]);
    for (int pair = thread; pair < kPairs; pair += kThreads) {
      float cosine = 1.0f, sine = 0.0f;
      if constexpr (kHasTable) {
        if (position >= 0 && position < table_rows) {
          cosine = table[position * table_stride + pair];
          sine = table[position * table_stride + kPairs + pair];
        }
      } else {
        const double turns = static_cast<double>(position) * exp2(-log2_base * (2.0 * pair / kRotaryDim)) *
                             0.15915494309189533577;  // 1 / (2 pi)
        const float angle = static_cast<float>((turns - rint(turns)) * 6.28318530717958647692);
        cosine = cosf(angle);
        sine = sinf(angle);
      }
      cosines[pair] = cosine;
      sines[pair] = kInverse ? -sine : sine;
    }
    __syncthreads();
  }

  i64 block = 0, offset = 0;
  bool stored = false;
  if constexpr (kHasCache) {
    const i64 slot = static_cast<i64>(slots[token * slots_stride]);
    stored = slot >= 0 && slot < num_slots;
    block = stored ? slot / block_size : 0;
    offset = stored ? slot - block * block_size : 0;
  }

  // Rows of the token: its query heads, then its key heads, then its value heads. All lanes of a warp take the same
  // trips.
  const int first = thread % kLanes * kPart;
  const int rows = (kHasQuery ? q_heads : 0) + (kHasCache ? 2 * kv_heads : 0);
  for (int first_row = part * kRows; first_row < rows; first_row += parts * kRows) {
    const int row = first_row + thread / kLanes;
    const bool is_query = kHasQuery && row < q_heads;
    const int kv_row = row - (kHasQuery ? q_heads : 0);
    const bool is_key = !is_query && kv_row < kv_heads;
    const bool is_value = !is_query && !is_key && row < rows;
    const int head = is_query ? row : is_key ? kv_row : kv_row - kv_heads;

    float values[kPart] = {};
    if (is_query) load_part(q + token * q_token + head * q_head + first * q_step, q_step, first, kHeadDim, values);
    if constexpr (kHasCache) {
      if (is_key) load_part(k + token * k_token + head * k_head + first * k_step, k_step, first, kHeadDim, values);
      if (is_value) load_part(v + token * v_token + head * v_head + first * v_step, v_step, first, kValueDim, values);
    }

    if constexpr (kNormQuery || kNormKey) {
      float squares = 0.0f;
#pragma unroll
      for (int e = 0; e < kPart; ++e) squares = fmaf(values[e], values[e], squares);
      squares = warp_sum<kLanes>(squares);
      if ((kNormQuery && is_query) || (kNormKey && is_key)) {
        const float factor = rsqrtf(squares / kHeadDim + eps);
        const NormWeight* weight = is_query ? q_weight : k_weight;
        const i64 step = is_query ? q_weight_step : k_weight_step;
#pragma unroll
        for (int e = 0; e < kPart; ++e)
          if (first + e < kHeadDim) values[e] *= factor * (to_float(weight[(first + e) * step]) + weight_offset);
      }
    }

    if constexpr (kRotaryDim > 0) {
      float rotated[kPart];
#pragma unroll
      for (int e = 0; e < kPart; ++e) rotated[e] = values[e];
      rotate(rotated, first, exchange[thread / kLanes], cosines, sines);
      if (!is_value) {
#pragma unroll
        for (int e = 0; e < kPart; ++e) values[e] = rotated[e];
      }
    }

    if constexpr (kHasCache && kQuantize) {
      float scale = 1.0f;
      if constexpr (kTokenScales) {
        float largest = 0.0f;
#pragma unroll
        for (int e = 0; e < kPart; ++e) largest = fmaxf(largest, fabsf(values[e]));
        largest = warp_max<kLanes>(largest);
        scale = largest > 0.0f ? largest / kLargestCode : 1.0f;
        float* scales = is_key ? k_scale : v_scale;
        if (stored && (is_key || is_value) && first == 0)
          scales[(block * block_size + offset) * kv_heads + head] = scale;
      } else if (is_key || is_value) {
        scale = (is_key ? k_scale : v_scale)[head];
      }
      if (!is_query) {
#pragma unroll
        for (int e = 0; e < kPart; ++e) values[e] /= scale;
      }
    }

    if (is_query) {
      Element* target = q_out + token * q_out_token + head * q_out_head + first * q_out_step;
      store_part(target, q_out_step, first, kHeadDim, values);
    }
    if constexpr (kHasCache) {
      if (is_key && stored) {
        CacheElement* target = k_cache + block * k_cache_block + offset * k_cache_token + head * k_cache_head;
        store_part(target + first * k_cache_step, k_cache_step, first, kHeadDim, values);
      }
      if (is_value && stored) {
        CacheElement* target = v_cache + block * v_cache_block + offset * v_cache_token + head * v_cache_head;
        store_part(target + first * v_cache_step, v_cache_step, first, kValueDim, values);
      }
    }
  }
}
