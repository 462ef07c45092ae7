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
    const int query = row / kGroup, head = kv_head * kGroup + row % kGroup;
    const RowEnd end(total.reference, total.sum, sinks == nullptr ? negative_infinity() : sinks[head * sinks_stride]);
    Element* target = out + sequence * out_batch + query * out_query + head * out_head;
    constexpr int kVectors = static_cast<int>(sizeof(total.values) / sizeof(float4));
#pragma unroll
    for (int j = 0; j < kVectors; ++j) {
      const int column = j * 128 + static_cast<int>(threadIdx.x % 32) * 4;
      const float4 v = total.values[j];
      const float values[4] = {v.x * end.factor, v.y * end.factor, v.z * end.factor, v.w * end.factor};
      if constexpr (kDense) {
        if (column < kValueDim) store_floats(target + column, values);
      } else {
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          if (column + i < kValueDim) target[(column + i) * out_dim] = from_float<Element>(values[i]);
        }
      }
    }
    if (threadIdx.x % 32 == 0 && lse != nullptr)
      lse[(static_cast<i64>(sequence) * heads + head) * queries + query] = end.lse;
  }
};

}  // namespace cki::attention
