// The consumers' products of linear_tokens.cu. For that kernel's prelude.
#pragma once

#include "common/types.cuh"
#include "common/wgmma_descriptor.cuh"
#include "gemm/hopper/token_stages.cuh"
#include "gemm/hopper/token_results.cuh"
#include "ptx/wgmma.cuh"

namespace cki::gemm {

constexpr int kHalf = kSteps / 2;
using HalfStage = u32[kHalf][4];  // a consumer's registers of w

__device__ __forceinline__ void fence_registers(HalfStage& a) {
#pragma unroll
  for (int step = 0; step < kHalf; ++step) ptx::wgmma_fence_registers(a[step]);
}

// A constant as a type, for lambdas.
template <bool kValue>
struct Always {
  constexpr operator bool() const { return kValue; }
};

// Half of the codes of a stage.
__device__ __forceinline__ void load_codes(HalfStage& a, const unsigned char* w, const Place& place, int half) {
  const unsigned char* from = w + place.row * kSpan + ((lane() % 4 * 2 + half) ^ place.row % 8) * 16;
  const uint4 upper_words = *reinterpret_cast<const uint4*>(from);
  const uint4 lower_words = *reinterpret_cast<const uint4*>(from + 8 * kSpan);  // swizzled alike
#pragma unroll
  for (int i = 0; i < kHalf; ++i) {
    u32 upper[2], lower[2];
    Operand::registers(upper_words, i, upper);
    Operand::registers(lower_words, i, lower);
    a[i][0] = upper[0];
    a[i][1] = lower[0];
    a[i][2] = upper[1];
    a[i][3] = lower[1];
  }
}

// Starts the products of half a stage, added to `sum` or in its place. n: of that half.
__device__ __forceinline__ void start_products(float (&sum)[kSums], HalfStage& a, u64 n, bool adds) {
  fence_registers(a);
  ptx::wgmma_fence();
#pragma unroll
  for (int step = 0; step < kHalf; ++step)
    ptx::wgmma<kTokens, bf16>(sum, a[step], wgmma_descriptor_advance(n, static_cast<u32>(step * 32)), adds || step > 0);
  ptx::wgmma_commit_group();
}

// sum += w n^T of a part, of codes. Half a stage's codes are moved while the products of the half before run.
// upper_scales, lower_scales: of the two rows, for each stage of K; n has them already where both are one (kFolds).
__device__ __forceinline__ void multiply_codes(float (&sum)[kSums], const Shared& shared, Ring& ring, ArrangedRing& arranged,
                                               const Place& place, const WorkPart& part, const float* upper_scales,
                                               const float* lower_scales) {
  static_assert(!kCodes || kHalf == 4, "a half is 64 elements of K, 16 codes of a row in each lane");
  ArrangedRing done = arranged;  // behind `arranged` by the stage under way
  HalfStage first, second;
  float even[kFolds ? 1 : kSums], odd[kFolds ? 1 : kSums];  // products of stages in turn
  const u64 n = wgmma_descriptor_k_major<kSpan>(shared.memory + kArrangedAt);
  // Adds the products of stage k, which have ended.
  const auto add = [&](auto& products, int k) {
    if constexpr (!kFolds) {
      const float upper = upper_scales[k], lower = lower_scales[k];
      ptx::wgmma_fence_registers(products);
#pragma unroll
      for (int i = 0; i < kSums; ++i) sum[i] = fmaf(products[i], i / 2 % 2 == 0 ? upper : lower, sum[i]);
    }
    done.release();
  };
  const auto start = [&](auto& products, HalfStage& a, u64 at, bool adds) {
    if constexpr (kFolds) {
      start_products(sum, a, at, true);
    } else {
      start_products(products, a, at, adds);
    }
  };
  // Starts stage k's products, and adds those of the stage before, if there is one in this part.
  const auto stage = [&](auto& products, auto& before, int k, auto is_first) {
    ring.wait_full();
    arranged.wait_full();
    const unsigned char* w = shared.memory + ring.stage * kStageBytes;
    const u64 at = wgmma_descriptor_advance(n, static_cast<u32>(arranged.stage * kBytesX));
    if constexpr (!is_first) {
      ptx::wgmma_wait_group<1>();
      fence_registers(first);
    }
    load_codes(first, w, place, 0);
    start(products, first, at, false);
    if constexpr (!is_first) {
      ptx::wgmma_wait_group<1>();
      fence_registers(second);
      add(before, k - 1);
    }
    load_codes(second, w, place, 1);
    __syncwarp();
    ring.release();
    start(products, second, wgmma_descriptor_advance(at, kBox), true);
    arranged.advance();
  };
  ptx::wgmma_fence_registers(sum);
  int k = part.first;
  stage(even, odd, k, Always<true>{});
#pragma unroll 1
  for (; k + 2 < part.end; k += 2) {
    stage(odd, even, k + 1, Always<false>{});
    stage(even, odd, k + 2, Always<false>{});
  }
  if (k + 1 < part.end) {
    stage(odd, even, k + 1, Always<false>{});
    ptx::wgmma_wait_group<0>();
    add(odd, k + 1);
  } else {
    ptx::wgmma_wait_group<0>();
    add(even, k);
  }
  ptx::wgmma_fence_registers(sum);
}

// The same of 16-bit weights, from where they and n lie; a stage behind what is started is released.
__device__ __forceinline__ void multiply_plain(float (&sum)[kSums], const Shared& shared, Ring& ring, ArrangedRing& arranged,
                                               const Place& place, const WorkPart& part) {
  const u64 w = wgmma_descriptor_k_major<kSpan>(shared.memory + place.thread / 128 * (64 * kSpan));
  const u64 n = wgmma_descriptor_k_major<kSpan>(shared.memory + (kArranges ? kArrangedAt : kBytesW));
  Ring read = ring;
  ArrangedRing done = arranged;
  const auto release = [&]() {
    read.release();
    if constexpr (kArranges) done.release();
  };
  ptx::wgmma_fence_registers(sum);
#pragma unroll 1
  for (int k = part.first; k < part.end; ++k) {
    ring.wait_full();
    const u32 w_at = static_cast<u32>(ring.stage * kStageBytes);
    u32 n_at = w_at;
    if constexpr (kArranges) {
      arranged.wait_full();
      n_at = static_cast<u32>(arranged.stage * kBytesX);
      arranged.advance();
    }
    ring.advance();
    ptx::wgmma_fence();
#pragma unroll
    for (int step = 0; step < kSteps; ++step) {
      const u32 on = static_cast<u32>(step * 32);
      ptx::wgmma<kTokens, bf16>(sum, wgmma_descriptor_advance(w, w_at + on), wgmma_descriptor_advance(n, n_at + on), true);
    }
    ptx::wgmma_commit_group();
    if (k > part.first) {
      ptx::wgmma_wait_group<1>();
      release();
    }
  }
  ptx::wgmma_wait_group<0>();
  ptx::wgmma_fence_registers(sum);
  release();
}

}  // namespace cki::gemm
