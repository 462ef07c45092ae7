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
// angles are computed once for all of them. A row of a head belongs to kLanes lanes, eight elements each. Partners of
// a pair lie in one lane (kInterleaved), or at the same place of another lane's elements, or, where kRotaryDim / 2 is no
// multiple of eight, meet through shared memory.
//
// A decoding step has so few rows that latencies are all its time: everything that can be loaded is asked for at once,
// before the angles are computed; and the launch may begin while the one before it ends (kProgrammatic).
//
// A slot below 0 or past the cache is skipped: nothing is written for it. A position outside the table turns nothing.
#include "common/convert_element.cuh"
#include "common/reduce.cuh"
#include "common/types.cuh"
#include "common/vec.cuh"
#include "ptx/grid_dependency.cuh"

using namespace cki;

constexpr int kPart = 8;  // elements of a lane
constexpr int kWidest = kHeadDim > kValueDim ? kHeadDim : kValueDim;
// Lanes of a row: a power of two, so that rows do not straddle warps.
constexpr int kLanes =
    kWidest <= 8 ? 1 : kWidest <= 16 ? 2 : kWidest <= 32 ? 4 : kWidest <= 64 ? 8 : kWidest <= 128 ? 16 : 32;
constexpr int kRows = kThreads / kLanes;  // rows that a block works on at a time
constexpr int kPairs = kRotaryDim / 2;
static_assert(kPairs <= kThreads, "a thread computes one angle");
constexpr bool kExchange = kRotaryDim > 0 && !kInterleaved && kPairs % kPart != 0;
constexpr bool kQuantize = sizeof(CacheElement) == 1;
// Rows that a lane has asked for: two where nothing but rotation is done, of many tokens, and memory's latency is most of a
// block's time. A decoding step's blocks have one.
constexpr int kAhead = kHasCache ? 1 : 2;
constexpr float kLargestCode = 448.0f;

// Eight elements of a row, as they lie in memory until they are needed: an access is waited for where its result is used.
template <class T, bool kVectors>
struct Part {
  Vector<T, kPart> vector;
  float values[kPart];

  // The first of them is at `p`; elements from `dim` on are 0.
  __device__ __forceinline__ void load(const T* p, i64 step, int first, int dim) {
    if constexpr (kVectors) {
      vector.fill_zero();
      if (first < dim) vector.load(p);
    } else {
#pragma unroll
      for (int e = 0; e < kPart; ++e) values[e] = first + e < dim ? to_float(p[e * step]) : 0.0f;
    }
  }
  __device__ __forceinline__ void to_floats(float (&result)[kPart]) const {
    if constexpr (kVectors) {
      vector.to_floats(result);
    } else {
#pragma unroll
      for (int e = 0; e < kPart; ++e) result[e] = values[e];
    }
  }
};

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

// The cosine and the signed sine of each of a lane's elements: the same in every row, so registers keep them.
struct Angles {
  float cosines[kPart], sines[kPart];

  __device__ __forceinline__ void load(int first, const float* all_cosines, const float* all_sines) {
#pragma unroll
    for (int e = 0; e < kPart; ++e) {
      const int i = first + e;
      if (i >= kRotaryDim) break;
      const bool second = kInterleaved ? i % 2 != 0 : i >= kPairs;
      const int pair = kInterleaved ? i / 2 : second ? i - kPairs : i;
      cosines[e] = all_cosines[pair];
      sines[e] = second ? all_sines[pair] : -all_sines[pair];
    }
  }
};

// Rotates the pairs of a row. `row` is shared memory of this row alone (kExchange).
__device__ __forceinline__ void rotate(float (&values)[kPart], int first, float* row, const Angles& angles) {
  float partners[kPart];
  if constexpr (kExchange) {
#pragma unroll
    for (int e = 0; e < kPart; ++e) row[spread(first + e)] = values[e];
    __syncwarp();
#pragma unroll
    for (int e = 0; e < kPart; ++e) {
      const int i = first + e;
      if (i < kRotaryDim) partners[e] = row[spread(i >= kPairs ? i - kPairs : i + kPairs)];
    }
    __syncwarp();  // before the next row takes this place
  } else {
    constexpr int kLanesApart = kPairs / kPart;
    const int lane = static_cast<int>(threadIdx.x % 32);
    const int other = first >= kRotaryDim ? lane : first >= kPairs ? lane - kLanesApart : lane + kLanesApart;
#pragma unroll
    for (int e = 0; e < kPart; ++e)
      partners[e] = kInterleaved ? values[e ^ 1] : __shfl_sync(kFullWarp, values[e], other);
  }
#pragma unroll
  for (int e = 0; e < kPart; ++e) {
    if (first + e >= kRotaryDim) break;
    values[e] = fmaf(values[e], angles.cosines[e], partners[e] * angles.sines[e]);
  }
}

// What a row of a token is: its query heads come first, then its key heads, then its value heads.
struct TokenRow {
  bool is_query, is_key, is_value;
  int head;

  TokenRow() = default;
  __device__ __forceinline__ TokenRow(int row, int rows, int q_heads, int kv_heads) {
    const int kv_row = row - (kHasQuery ? q_heads : 0);
    is_query = kHasQuery && row < q_heads;
    is_key = !is_query && kv_row < kv_heads;
    is_value = !is_query && !is_key && row < rows;
    head = is_query ? row : is_key ? kv_row : kv_row - kv_heads;
  }
};

extern "C" __global__ void __launch_bounds__(kThreads)
    append_kv(const Element* q, const Element* k, const Element* v, Element* q_out,
              CacheElement* k_cache, CacheElement* v_cache, float* k_scale, float* v_scale,
              const SlotIndex* slots, const PositionIndex* positions, const float* table,                   //
              const NormWeight* q_weight, const NormWeight* k_weight,                                        //
              i64 q_token, i64 q_head, i64 q_step, i64 k_token, i64 k_head, i64 k_step,                      //
              i64 v_token, i64 v_head, i64 v_step, i64 q_out_token, i64 q_out_head, i64 q_out_step,          //
              i64 k_cache_block, i64 k_cache_token, i64 k_cache_head, i64 k_cache_step,                      //
              i64 v_cache_block, i64 v_cache_token, i64 v_cache_head, i64 v_cache_step,                      //
              i64 slots_stride, i64 positions_stride, i64 table_stride, i64 q_weight_step, i64 k_weight_step,
              i64 num_slots, i64 table_rows, int block_size, int q_heads, int kv_heads,                      //
              double log2_base, float eps, float weight_offset) {
  __shared__ __align__(16) float cosines[kPairs + 1], sines[kPairs + 1];
  __shared__ float exchange[kExchange ? kRows : 1][kLanes * kPart];
  const int token = static_cast<int>(blockIdx.x);
  const int part = static_cast<int>(blockIdx.y), parts = static_cast<int>(gridDim.y);
  const int thread = static_cast<int>(threadIdx.x);
  const int first = thread % kLanes * kPart;
  const int rows = (kHasQuery ? q_heads : 0) + (kHasCache ? 2 * kv_heads : 0);

  const auto frequency_of_pair = [&] {  // turns a position, of this thread's pair; 1 / (2 pi)
    return exp2(-log2_base * (2.0 * thread / kRotaryDim)) * 0.15915494309189533577;
  };
  // It takes a microsecond: before the launch ahead has ended, or else while the rows are on their way.
  [[maybe_unused]] double frequency = 0.0;
  if constexpr (kRotaryDim > 0 && !kHasTable && kProgrammatic) frequency = frequency_of_pair();

  if constexpr (kProgrammatic) {
    ptx::griddepcontrol_launch_dependents();
    ptx::griddepcontrol_wait();
  }
  const i64 position = kRotaryDim > 0 ? static_cast<i64>(positions[token * positions_stride]) : 0;
  const i64 slot = kHasCache ? static_cast<i64>(slots[token * slots_stride]) : -1;
  int first_row = part * kRows;
  Part<Element, kVectorLoads> part_of_row[kAhead];
  Part<NormWeight, kVectorWeights> part_of_weight[kAhead];
  TokenRow next[kAhead];
  const auto load = [&](int place, int from) {
    const TokenRow& row = next[place] = TokenRow(from + thread / kLanes, rows, q_heads, kv_heads);
    const auto of = [&](auto of_query, auto of_key, auto of_value) {
      return row.is_query ? of_query : row.is_key ? of_key : of_value;
    };
    const i64 step = kVectorLoads ? 1 : of(q_step, k_step, v_step);
    const Element* source = of(q, k, v) + token * of(q_token, k_token, v_token) +
                            row.head * of(q_head, k_head, v_head) + first * step;
    const bool is_any = row.is_query || row.is_key || row.is_value;
    part_of_row[place].load(source, step, first, !is_any ? 0 : row.is_value ? kValueDim : kHeadDim);
    if constexpr (kNormQuery || kNormKey) {
      const bool normed = (kNormQuery && row.is_query) || (kNormKey && row.is_key);
      const NormWeight* weight = row.is_query ? q_weight : k_weight;
      const i64 weight_step = kVectorWeights ? 1 : row.is_query ? q_weight_step : k_weight_step;
      part_of_weight[place].load(weight + first * weight_step, weight_step, first, normed ? kHeadDim : 0);
    }
  };
#pragma unroll
  for (int place = 0; place < kAhead; ++place) load(place, first_row + place * parts * kRows);

  Angles angles;
  if constexpr (kRotaryDim > 0) {
    if (thread < kPairs) {
      float cosine = 1.0f, sine = 0.0f;
      if constexpr (kHasTable) {
        if (position >= 0 && position < table_rows) {
          cosine = table[position * table_stride + thread];
          sine = table[position * table_stride + kPairs + thread];
        }
      } else {
        if constexpr (!kProgrammatic) frequency = frequency_of_pair();
        const double turns = static_cast<double>(position) * frequency;
        const float half_turns = static_cast<float>((turns - rint(turns)) * 2.0);
        sincospif(half_turns, &sine, &cosine);
      }
      cosines[thread] = cosine;
      sines[thread] = kInverse ? -sine : sine;
    }
    __syncthreads();
    angles.load(first, cosines, sines);
  }

  const bool stored = kHasCache && slot >= 0 && slot < num_slots;
  const i64 block = !stored ? 0 : kBlockShift >= 0 ? slot >> kBlockShift : slot / block_size;
  const i64 offset = stored ? slot - block * block_size : 0;

  // All lanes of a warp take the same trips, and load for a later one before they compute.
  const auto trip = [&](int place) {
    float values[kPart];
    part_of_row[place].to_floats(values);
    [[maybe_unused]] float weights[kPart];
    if constexpr (kNormQuery || kNormKey) part_of_weight[place].to_floats(weights);
    const TokenRow row = next[place];
    if (first_row + kAhead * parts * kRows < rows) load(place, first_row + kAhead * parts * kRows);
    if constexpr (kNormQuery || kNormKey) {
      float squares = 0.0f;
#pragma unroll
      for (int e = 0; e < kPart; ++e) squares = fmaf(values[e], values[e], squares);
      squares = warp_sum<kLanes>(squares);
      if ((kNormQuery && row.is_query) || (kNormKey && row.is_key)) {
        const float factor = rsqrtf(squares / kHeadDim + eps);
#pragma unroll
        for (int e = 0; e < kPart; ++e) values[e] *= factor * (weights[e] + weight_offset);
      }
    }

    if constexpr (kRotaryDim > 0) {
      float rotated[kPart];
#pragma unroll
      for (int e = 0; e < kPart; ++e) rotated[e] = values[e];
      rotate(rotated, first, exchange[kExchange ? thread / kLanes : 0], angles);
      if (!row.is_value) {
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
        float* scales = row.is_key ? k_scale : v_scale;
        if (stored && (row.is_key || row.is_value) && first == 0)
          scales[(block * block_size + offset) * kv_heads + row.head] = scale;
      } else if (row.is_key || row.is_value) {
        scale = (row.is_key ? k_scale : v_scale)[row.head];
      }
      if (!row.is_query) {
#pragma unroll
        for (int e = 0; e < kPart; ++e) values[e] /= scale;
      }
    }

    if (row.is_query) {
      Element* target = q_out + token * q_out_token + row.head * q_out_head + first * q_out_step;
      store_part(target, q_out_step, first, kHeadDim, values);
    }
    if constexpr (kHasCache) {
      if (stored && (row.is_key || row.is_value)) {
        const i64 step = row.is_key ? k_cache_step : v_cache_step;
        CacheElement* target = (row.is_key ? k_cache : v_cache) +
                               block * (row.is_key ? k_cache_block : v_cache_block) +
                               offset * (row.is_key ? k_cache_token : v_cache_token) +
                               row.head * (row.is_key ? k_cache_head : v_cache_head);
        store_part(target + first * (kVectorStores ? 1 : step), step, first, row.is_key ? kHeadDim : kValueDim, values);
      }
    }
  };
  for (;;) {
#pragma unroll
    for (int place = 0; place < kAhead; ++place) {
      trip(place);
      first_row += parts * kRows;
      if (first_row >= rows) return;
    }
  }
}
