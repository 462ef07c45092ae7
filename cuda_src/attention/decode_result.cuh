// Where the rows of a unit belong in the caller's tensors, and their last step: shared by the kernels that end rows.
#pragma once

#include "attention/decode_combine.cuh"
#include "common/convert_element.cuh"
#include "common/e4m3_codes.cuh"
#include "common/e4m3_parts.cuh"
#include "common/types.cuh"
#include "common/vec.cuh"

namespace cki::attention {

// out [batch, queries, heads, dim] by strides; lse [batch, heads, queries] fp32, dense, may be null; sinks [heads], may
// be null. kDense: columns follow one another, four are a vector, and rows begin at multiples of it.
// kCodes: a row of 128 columns, rounded to Element, becomes e4m3 codes in out, rows of all heads, and its scale in lse; with 2, of
// two parts, those of sequence b in rows 16 (b / 8) + b % 8 and eight below (e4m3_parts.cuh).
template <class Element, int kValueDim, int kGroup, bool kDense, int kCodes = 0>
struct DecodeResult {
  static_assert(kCodes == 0 || kValueDim == 128, "one scale a row");
  Element* out;
  float* lse;
  const float* sinks;
  i64 out_batch, out_query, out_head, out_dim;
  i64 sinks_stride;
  int queries;
  int heads;

  // Where row `row` of a KV head's queries * kGroup belongs, and its sink.
  struct RowPlace {
    Element* target;
    i64 lse;
    float sink;
  };
  __device__ __forceinline__ RowPlace locate(int sequence, int kv_head, int row) const {
    const int query = row / kGroup, head = kv_head * kGroup + row % kGroup;
    return {out + sequence * out_batch + query * out_query + head * out_head,
            (static_cast<i64>(sequence) * heads + head) * queries + query,
            sinks == nullptr ? negative_infinity() : sinks[head * sinks_stride]};
  }

  // The row. One warp calls it.
  template <class Row>
  __device__ __forceinline__ void write(const RowPlace& at, const Row& total) const {
    const RowEnd end(total.reference, total.sum, at.sink);
    if constexpr (kCodes > 0) {
      write_codes(at.lse, total.values[0], end.factor);
      return;
    }
    constexpr int kVectors = static_cast<int>(sizeof(total.values) / sizeof(float4));
#pragma unroll
    for (int j = 0; j < kVectors; ++j)
      write_columns(at, j * 128 + static_cast<int>(threadIdx.x % 32) * 4, total.values[j], end.factor);
    if (threadIdx.x % 32 == 0 && lse != nullptr) lse[at.lse] = end.lse;
  }

  // Four columns of it. Lanes of a warp may have different ones.
  __device__ __forceinline__ void write_part(const RowPlace& at, int column, float4 values, float reference,
                                             float sum) const {
    const RowEnd end(reference, sum, at.sink);
    if constexpr (kCodes > 0) {  // all of the row
      write_codes(at.lse, values, end.factor);
      return;
    }
    write_columns(at, column, values, end.factor);
    if (column == 0 && lse != nullptr) lse[at.lse] = end.lse;
  }

 private:
  __device__ __forceinline__ void write_codes(i64 row, float4 v, float factor) const {
    const int lane = static_cast<int>(threadIdx.x % 32);
    float values[4] = {v.x * factor, v.y * factor, v.z * factor, v.w * factor};
#pragma unroll
    for (int i = 0; i < 4; ++i) values[i] = to_float(from_float<Element>(values[i]));
    const float largest = warp_max(largest_finite(0.0f, values));
    u8* codes = reinterpret_cast<u8*>(out) + lane * 4;
    float scale;
    if constexpr (kCodes == 1) {
      scale = e4m3_scale(largest);
      store_e4m3(codes + row * kValueDim, values, inverse_of_scale(scale));
    } else {
      float up;
      power_of(largest, up, scale);
      u16 high[2], low[2];
#pragma unroll
      for (int i = 0; i < 2; ++i) split_pair(values[i * 2] * up, values[i * 2 + 1] * up, high[i], low[i]);
      const int sequence = static_cast<int>(row) / heads, head = static_cast<int>(row) - sequence * heads;
      codes += (static_cast<i64>(sequence / 8 * 16 + sequence % 8) * heads + head) * kValueDim;
      *reinterpret_cast<u32*>(codes) = high[0] | static_cast<u32>(high[1]) << 16;
      *reinterpret_cast<u32*>(codes + 8 * static_cast<i64>(heads) * kValueDim) = low[0] | static_cast<u32>(low[1]) << 16;
    }
    if (lane == 0) lse[row] = scale;
  }

  __device__ __forceinline__ void write_columns(const RowPlace& at, int column, float4 v, float factor) const {
    const float values[4] = {v.x * factor, v.y * factor, v.z * factor, v.w * factor};
    if constexpr (kDense) {
      if (column < kValueDim) store_floats(at.target + column, values);
    } else {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        if (column + i < kValueDim) at.target[(column + i) * out_dim] = from_float<Element>(values[i]);
      }
    }
  }
};

}  // namespace cki::attention
