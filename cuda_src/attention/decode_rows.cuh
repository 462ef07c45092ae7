// The rows of a unit in one warp: queries, softmax state and output, all in registers, and what one tile of keys adds.
//
// A row is a query and one of the heads that share its KV head. A lane holds rows 8 n + 2 t and 8 n + 2 t + 1 (t =
// lane % 4) of each row tile n; the eight lanes of equal t hold different keys of them, and share one reference.
#pragma once

#include "attention/decode_combine.cuh"
#include "attention/decode_tile.cuh"
#include "attention/logits.cuh"
#include "common/convert_element.cuh"
#include "common/online_softmax.cuh"
#include "common/types.cuh"
#include "ptx/math.cuh"

namespace cki::attention {

template <class Stage, int kRowTiles, class Features>
struct DecodeRows {
  using Keys = typename Stage::Keys;
  using Values = typename Stage::Values;
  using CacheElement = typename Keys::Element;
  using Compute = typename ComputeType<CacheElement>::Type;
  static constexpr bool kQuantized = sizeof(CacheElement) == 1;
  static constexpr int kSteps = Keys::kRowBytes / (kQuantized ? 16 : 32);
  static constexpr int kColumnTiles = Values::kRowBytes / static_cast<int>(sizeof(CacheElement)) / 16;
  static constexpr float kSlack = 8.0f;        // powers of two that a score may exceed its row's reference by
  static constexpr float kScaleSlack = 16.0f;  // times that a value's scale may exceed the values' reference

  const typename Keys::PairsOfRow keys_read = key_pairs<Keys>();
  const typename Values::PairsOfRow values_read = value_pairs<Values>();
  u32 queries[kRowTiles][kSteps][2];
  float output[kRowTiles][kColumnTiles][4];
  float reference[kRowTiles][2];
  float sum[kRowTiles][2];      // of this lane's keys
  int position[kRowTiles][2];   // of the row's query among the keys; it sees none after it
  float slope[kRowTiles][2];    // ALiBi
  float key_factor[kRowTiles][2];  // e4m3: what products are multiplied by, besides the scale of the key
  float value_reference;           // scales of tokens: the output is in units of it

  static __device__ __forceinline__ int lane() { return static_cast<int>(threadIdx.x % 32); }
  static __device__ __forceinline__ int row_of(int n, int e) { return n * kTileRows + lane() % 4 * 2 + e; }

  // Calls visit(n, e) for each of the lane's rows.
  template <class Visit>
  static __device__ __forceinline__ void for_each_row(Visit visit) {
#pragma unroll
    for (int n = 0; n < kRowTiles; ++n) {
#pragma unroll
      for (int e = 0; e < 2; ++e) visit(n, e);
    }
  }

  // A new unit. address(row): where a row's query begins, null past the last row. position_of(row), slope_of(row).
  // factor: by which all keys are multiplied.
  template <bool kPairs, class Address, class PositionOf, class SlopeOf>
  __device__ __forceinline__ void begin(Address address, i64 dim_stride, int head_dim, float factor,
                                        PositionOf position_of, SlopeOf slope_of) {
    value_reference = 0.0f;
    for_each_row([&](int n, int e) {
      reference[n][e] = negative_infinity();
      sum[n][e] = 0.0f;
      position[n][e] = position_of(row_of(n, e));
      if constexpr (Features::kAlibi) slope[n][e] = slope_of(row_of(n, e));
    });
#pragma unroll
    for (int n = 0; n < kRowTiles; ++n) {
#pragma unroll
      for (int m = 0; m < kColumnTiles; ++m) {
#pragma unroll
        for (int i = 0; i < 4; ++i) output[n][m][i] = 0.0f;
      }
      load_queries<kPairs>(n, address(n * kTileRows + lane() / 4), dim_stride, head_dim, factor);
    }
  }

  // One tile. all_seen: every row sees all of its keys. left: the window (Features::kLimitLeft).
  __device__ __forceinline__ void attend(const unsigned char* tile, int first_key, bool all_seen, int left,
                                         const LogitRules& rules, float exponent_scale, float slack) {
    const float* scales = reinterpret_cast<const float*>(tile + Stage::kScale) + lane() / 4;
    float scores[kRowTiles][4];
    multiply_queries<Keys>(scores, queries, tile, keys_read);
    bool exceeds = false;
    for_each_row([&](int n, int e) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const int key = first_key + lane() / 4 + half * 8;
        float logit = scores[n][half * 2 + e];
        if constexpr (kQuantized) logit *= key_factor[n][e];
        if constexpr (Stage::kScales) logit *= scales[half * 8];
        if constexpr (Features::kSoftcap) {
          logit = soft_capped(logit, rules);
        } else if constexpr (Features::kScaleFirst) {
          logit *= rules.scale;
        }
        if constexpr (Features::kAlibi) logit -= slope[n][e] * fabsf(static_cast<float>(position[n][e] - key));
        if (!all_seen) {
          bool visible = key <= position[n][e];
          if constexpr (Features::kLimitLeft) visible = visible && key >= position[n][e] - left;
          if (!visible) logit = negative_infinity();
        }
        scores[n][half * 2 + e] = logit;
        exceeds = exceeds || logit > reference[n][e] + slack;
      }
    });
    if (__any_sync(kFullWarp, exceeds)) move_references(scores, exponent_scale);

    for_each_row([&](int n, int e) {
      const float subtract = reference[n][e] == negative_infinity() ? 0.0f : reference[n][e];
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        float& score = scores[n][half * 2 + e];
        score = ptx::ex2_approx((score - subtract) * exponent_scale);
        sum[n][e] += score;
      }
    });
    if constexpr (Stage::kScales) scale_weights(scores, scales + kTileKeys);
    multiply_weights<Values>(output, scores, tile + Stage::kValues, values_read);
  }

  // Writes the state of the rows below `rows`. value_factor: by which all values are multiplied.
  template <class State>
  __device__ __forceinline__ void store(float* state, int rows, float exponent_scale, float value_factor) {
    if constexpr (Stage::kScales) value_factor *= value_reference;
    for_each_row([&](int n, int e) {
      float total = sum[n][e];
#pragma unroll
      for (int distance = 4; distance < 32; distance *= 2) total += __shfl_xor_sync(kFullWarp, total, distance);
      if (row_of(n, e) >= rows) return;
      float* row = state + row_of(n, e) * State::kPitch;
      if (lane() / 4 == 0)
        *reinterpret_cast<float2*>(row + State::kColumns) = make_float2(reference[n][e] * exponent_scale, total);
#pragma unroll
      for (int m = 0; m < kColumnTiles; ++m) {
#pragma unroll
        for (int half = 0; half < 2; ++half)
          row[value_column<CacheElement>(m, half)] = output[n][m][half * 2 + e] * value_factor;
      }
    });
  }

 private:
  template <bool kPairs, class Element>
  __device__ __forceinline__ void load_queries(int n, const Element* row, i64 dim_stride, int head_dim, float factor) {
    const int first = lane() % 4 * kQueryLaneStep<CacheElement>;  // of the lane's elements
    const bool present = row != nullptr;
    const Element* own = present ? row + first * dim_stride : nullptr;
    const auto element = [&](int d) {
      return present && first + d < head_dim ? to_float(own[d * dim_stride]) : 0.0f;
    };
#pragma unroll
    for (int step = 0; step < kSteps; ++step) {
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const int d = query_element<CacheElement>(step, i);
        if constexpr (sizeof(Compute) == 4) {
          queries[n][step][i] = __float_as_uint(element(d));
        } else if constexpr (kPairs) {
          queries[n][step][i] = present && first + d < head_dim ? *reinterpret_cast<const u32*>(own + d) : 0u;
        } else {
          queries[n][step][i] = pack_pair<Element>(element(d), element(d + 1));
        }
      }
    }
    if constexpr (kQuantized) fit_into_f16<Element>(n, factor);
  }

  // Queries as f16, times a power of two that brings the row's largest element to [128, 256): bf16 reaches further than
  // f16. What undoes it goes into the lanes that hold the row's scores.
  template <class Element>
  __device__ __forceinline__ void fit_into_f16(int n, float factor) {
    float largest = 0.0f;
#pragma unroll
    for (int step = 0; step < kSteps; ++step) {
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        float even, odd;
        unpack_pair<Element>(queries[n][step][i], even, odd);
        largest = fmaxf(largest, fmaxf(fabsf(even), fabsf(odd)));
      }
    }
    largest = warp_reduce<Max, 4>(largest);
    const u32 exponent = min(max(__float_as_uint(largest) >> 23, 10u), 250u);
    const float up = __uint_as_float((261 - exponent) << 23), down = __uint_as_float((exponent - 7) << 23);
#pragma unroll
    for (int e = 0; e < 2; ++e)
      key_factor[n][e] = factor * __shfl_sync(kFullWarp, down, (lane() % 4 * 2 + e) * 4);
#pragma unroll
    for (int step = 0; step < kSteps; ++step) {
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        float even, odd;
        unpack_pair<Element>(queries[n][step][i], even, odd);
        queries[n][step][i] = pack_pair<Compute>(even * up, odd * up);
      }
    }
  }

  // Every reference becomes the row's largest score so far; what was accumulated follows.
  __device__ __forceinline__ void move_references(const float (&scores)[kRowTiles][4], float exponent_scale) {
    for_each_row([&](int n, int e) {
      float largest = fmaxf(scores[n][e], scores[n][e + 2]);
#pragma unroll
      for (int distance = 4; distance < 32; distance *= 2)
        largest = fmaxf(largest, __shfl_xor_sync(kFullWarp, largest, distance));
      largest = fmaxf(largest, reference[n][e]);
      const float subtract = largest == negative_infinity() ? 0.0f : largest;
      const float correction = ptx::ex2_approx((reference[n][e] - subtract) * exponent_scale);
      reference[n][e] = largest;
      sum[n][e] *= correction;
#pragma unroll
      for (int m = 0; m < kColumnTiles; ++m) {
        output[n][m][e] *= correction;
        output[n][m][e + 2] *= correction;
      }
    });
  }

  // Weights times the scales of their values, in units of the largest scale so far, so that f16 holds them.
  __device__ __forceinline__ void scale_weights(float (&weights)[kRowTiles][4], const float* scales) {
    const float first = scales[0], second = scales[8];
    float largest = fmaxf(first, second);
    if (__any_sync(kFullWarp, largest > value_reference * kScaleSlack)) {
      largest = fmaxf(warp_max(largest), value_reference);
      const float correction = value_reference / largest;
      value_reference = largest;
#pragma unroll
      for (int n = 0; n < kRowTiles; ++n) {
#pragma unroll
        for (int m = 0; m < kColumnTiles; ++m) {
#pragma unroll
          for (int i = 0; i < 4; ++i) output[n][m][i] *= correction;
        }
      }
    }
    const float inverse = value_reference > 0.0f ? 1.0f / value_reference : 0.0f;
    for_each_row([&](int n, int e) {
      weights[n][e] *= first * inverse;
      weights[n][e + 2] *= second * inverse;
    });
  }
};

}  // namespace cki::attention
