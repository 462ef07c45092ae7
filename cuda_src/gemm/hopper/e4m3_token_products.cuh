// The consumers' products of linear_tokens_e4m3.cu. For that kernel's prelude.
#pragma once

#include "common/types.cuh"
#include "common/wgmma_descriptor.cuh"
#include "gemm/hopper/e4m3_token_stages.cuh"
#include "ptx/mbarrier.cuh"
#include "ptx/wgmma.cuh"

namespace cki::gemm {

// Waits for a stage, and starts its products.
__device__ __forceinline__ void start_products(float (&products)[kColumns / 2], const Shared& shared, Ring& ring, u64 w,
                                               u64 n) {
  ring.wait_full();
  ptx::mbarrier_wait_parity(shared.ready() + ring.stage, ring.phase);
  ptx::wgmma_fence();
  const u32 stage = static_cast<u32>(ring.stage * kStageBytes);
#pragma unroll
  for (int step = 0; step < kSteps; ++step) {
    const u32 at = stage + static_cast<u32>(step * 32);
    ptx::wgmma<kColumns, e4m3>(products, wgmma_descriptor_advance(w, at), wgmma_descriptor_advance(n, at), step > 0);
  }
  ptx::wgmma_commit_group();
  ring.advance();
}

// sum += w n^T of a part. Tensor cores add their products with fewer bits than fp32 has, so a stage's are alone,
// and then added to the sums, while the next stage's run. upper_scales, lower_scales: of the two rows, for each stage of K.
__device__ __forceinline__ void multiply(float (&sum)[kSums], const Shared& shared, Ring& ring, u64 w, u64 n,
                                         const WorkPart& part, const float* upper_scales, const float* lower_scales) {
  Ring done = ring;  // a stage behind
  float even[kColumns / 2], odd[kColumns / 2];
  float upper = 0.0f, lower = 0.0f;  // of the stage behind
  // Adds the products of the stage behind, which have ended. k: the next one.
  const auto add = [&](float(&products)[kColumns / 2], int k) {
    ptx::wgmma_fence_registers(products);
    float2 powers[kTokens / 8] = {};
    if (lane() < kReleasing) {
#pragma unroll
      for (int j = 0; j < kTokens / 8; ++j)
        powers[j] = *reinterpret_cast<const float2*>(shared.powers(done.stage) + j * 8 + lane() * 2);
    }
    release(done);
#pragma unroll
    for (int j = 0; j < kTokens / 8; ++j) {
      const float first = __shfl_sync(0xffffffffu, powers[j].x, lane() % 4);
      const float second = __shfl_sync(0xffffffffu, powers[j].y, lane() % 4);
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const float factor = (i % 2 == 0 ? first : second) * (i < 2 ? upper : lower);
        sum[j * 4 + i] = fmaf(products[j * 4 + i] + products[kSums + j * 4 + i], factor, sum[j * 4 + i]);
      }
    }
    if (k < part.end) {
      upper = upper_scales[k];
      if constexpr (kGated) lower = lower_scales[k];
    }
    if constexpr (!kGated) lower = upper;
  };
  int k = part.first;
  upper = upper_scales[k];
  lower = kGated ? lower_scales[k] : upper;
  start_products(even, shared, ring, w, n);
#pragma unroll 1
  for (; k + 2 < part.end; k += 2) {
    start_products(odd, shared, ring, w, n);
    ptx::wgmma_wait_group<1>();
    add(even, k + 1);
    start_products(even, shared, ring, w, n);
    ptx::wgmma_wait_group<1>();
    add(odd, k + 2);
  }
  if (k + 1 < part.end) {
    start_products(odd, shared, ring, w, n);
    ptx::wgmma_wait_group<1>();
    add(even, k + 1);
    ptx::wgmma_wait_group<0>();
    add(odd, k + 2);
  } else {
    ptx::wgmma_wait_group<0>();
    add(even, k + 1);
  }
}

}  // namespace cki::gemm
