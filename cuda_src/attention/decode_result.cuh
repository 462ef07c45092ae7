// Where the rows of a unit belong in the caller's tensors, and their last step: shared by the kernels that end rows.
#pragma once

#include "attention/decode_combine.cuh"
#include "common/convert_element.cuh"
#include "common/types.cuh"
#include "common/vec.cuh"

namespace cki::attention {

// out [batch, queries, heads, dim] by strides; lse [batch, heads, queries] fp32, dense, may be null; sinks [heads], may
// be null. kDense: columns follow one another, four are a vector, and rows begin at multiples of it.
template <class Element, int kValueDim, int kGroup, bool kDense>
struct DecodeResult {
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
    write_columns(at, column, values, end.factor);
    if (column == 0 && lse != nullptr) lse[at.lse] = end.lse;
  }

 private:
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
