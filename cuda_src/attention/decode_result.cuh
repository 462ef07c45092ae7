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

  // Row `row` of a KV head's queries * kGroup. One warp calls it.
  template <class Row>
  __device__ __forceinline__ void write(int sequence, int kv_head, int row, const Row& total) const {
    const RowOf at(*this, sequence, kv_head, row);
    const RowEnd end(total.reference, total.sum, at.sink);
    constexpr int kVectors = static_cast<int>(sizeof(total.values) / sizeof(float4));
#pragma unroll
    for (int j = 0; j < kVectors; ++j)
      write_columns(at, j * 128 + static_cast<int>(threadIdx.x % 32) * 4, total.values[j], end.factor);
    if (threadIdx.x % 32 == 0 && lse != nullptr) lse[at.lse] = end.lse;
  }

  // Four columns of that row. Lanes of a warp may have different ones.
  __device__ __forceinline__ void write_part(int sequence, int kv_head, int row, int column, float4 values,
                                             float reference, float sum) const {
    const RowOf at(*this, sequence, kv_head, row);
    const RowEnd end(reference, sum, at.sink);
    write_columns(at, column, values, end.factor);
    if (column == 0 && lse != nullptr) lse[at.lse] = end.lse;
  }

 private:
  // Where a row belongs, and its sink.
  struct RowOf {
    Element* target;
    i64 lse;
    float sink;

    __device__ __forceinline__ RowOf(const DecodeResult& result, int sequence, int kv_head, int row) {
      const int query = row / kGroup, head = kv_head * kGroup + row % kGroup;
      target = result.out + sequence * result.out_batch + query * result.out_query + head * result.out_head;
      lse = (static_cast<i64>(sequence) * result.heads + head) * result.queries + query;
      sink = result.sinks == nullptr ? negative_infinity() : result.sinks[head * result.sinks_stride];
    }
  };

  __device__ __forceinline__ void write_columns(const RowOf& at, int column, float4 v, float factor) const {
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
