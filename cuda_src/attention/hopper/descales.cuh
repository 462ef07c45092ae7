// What codes of e4m3 stand for: a factor for each batch, or sequence, and KV head; its queries share it.
#pragma once

#include "common/types.cuh"

namespace cki::attention {

// Not 0, by which a hidden key's -inf would become NaN; a NaN stays.
__device__ __forceinline__ float positive(float factor) { return factor < 1e-30f ? 1e-30f : factor; }

struct Descales {
  const float* q;
  const float* k;
  const float* v;
  i64 q_batch, q_head, k_batch, k_head, v_batch, v_head;

  __device__ __forceinline__ float of_logits(int batch, int kv_head) const {
    return positive(q[batch * q_batch + kv_head * q_head] * k[batch * k_batch + kv_head * k_head]);
  }
  __device__ __forceinline__ float of_values(int batch, int kv_head) const { return v[batch * v_batch + kv_head * v_head]; }
};

}  // namespace cki::attention
