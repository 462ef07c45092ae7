// The arrangers of linear_tokens.cu: n of each stage of x, in the order of the products. For that kernel's prelude.
#pragma once

#include "common/types.cuh"
#include "gemm/hopper/token_stages.cuh"
#include "ptx/convert.cuh"
#include "ptx/fence.cuh"
#include "ptx/mbarrier.cuh"
#include "ptx/memory.cuh"

namespace cki::gemm {

// Where four elements of a step of n come from in a stage: group t of 4.
__device__ __forceinline__ int source_of(int step, int t) { return kCodes ? 32 * t + 4 * step : 16 * step + 4 * t; }

// Four warps: n of each stage in the order of the products, and the squares of each part.
__device__ __forceinline__ void arrange(const Shared& shared, const EvenWork& work, int block, const bf16* gamma, int depth,
                                        const float* scales, i64 scale_stride) {
  const int thread = static_cast<int>(threadIdx.x) - kConsumerThreads, warp = thread / 32;
  const int group = warp % kStepGroups;
  const int step = lane() % 4 + group * 4;                      // of 16 positions
  const int first_token = lane() / 4 + warp / kStepGroups * 8;  // and every kPass-th from there
  const bool works = first_token < kTokens;
  Ring ring = shared.ring();
  ArrangedRing arranged = shared.arranged();
  SquaresRing squares_ring = shared.squares_ring();
  for_each_part(work, block, [&](const WorkPart& part) {
    float squares[kItems] = {};
    const float* own_scales = scales + part.tile * scale_stride;
    // Of the next stage, asked for a stage ahead.
    uint2 gammas[4] = {};
    float scale = 1.0f;
    const auto fetch = [&](int k) {
      if constexpr (kNorm) {
#pragma unroll
        for (int t = 0; t < 4; ++t) {
          const int at = k * kDepth + source_of(step, t);
          gammas[t] = at < depth ? ptx::load_global_nc_8(gamma + at) : make_uint2(0, 0);
        }
      }
      if constexpr (kFolds) scale = own_scales[k];
    };
    fetch(part.first);
#pragma unroll 1
    for (int k = part.first; k < part.end; ++k) {
      float factors[4][4];
#pragma unroll
      for (int t = 0; t < 4; ++t) {
        ptx::bf16x2_to_f32x2(gammas[t].x, factors[t][0], factors[t][1]);
        ptx::bf16x2_to_f32x2(gammas[t].y, factors[t][2], factors[t][3]);
#pragma unroll
        for (int e = 0; e < 4; ++e) factors[t][e] = kNorm ? factors[t][e] * (kOfX * scale) : kOfX * scale;
      }
      if (k + 1 < part.end) fetch(k + 1);
      ring.wait_full();
      arranged.wait_empty();
      const unsigned char* from = shared.memory + ring.stage * kStageBytes + kBytesW;
      unsigned char* to = shared.memory + kArrangedAt + arranged.stage * kBytesX;
      if (works) {
#pragma unroll
        for (int item = 0; item < kItems; ++item) {
          const int token = first_token + item * kPass;
          u32 words[8];
#pragma unroll
          for (int t = 0; t < 4; ++t) {
            const int at = source_of(step, t), chunk = at % 64 / 8 ^ token % 8;
            const uint2 pair =
                *reinterpret_cast<const uint2*>(from + at / 64 * kBox + token * kSpan + chunk * 16 + at % 8 * 2);
            float values[4];
            ptx::bf16x2_to_f32x2(pair.x, values[0], values[1]);
            ptx::bf16x2_to_f32x2(pair.y, values[2], values[3]);
#pragma unroll
            for (int e = 0; e < 4; ++e) {
              if constexpr (kNorm) squares[item] = fmaf(values[e], values[e], squares[item]);
              values[e] *= factors[t][e];
            }
            words[kCodes ? t : t * 2] = ptx::f32x2_to_bf16x2(values[0], values[kCodes ? 2 : 1]);
            words[kCodes ? t + 4 : t * 2 + 1] = ptx::f32x2_to_bf16x2(values[kCodes ? 1 : 2], values[3]);
          }
          unsigned char* row = to + step / 4 * kBox + token * kSpan;
#pragma unroll
          for (int half = 0; half < 2; ++half) {
            const u32* own = words + half * 4;
            *reinterpret_cast<uint4*>(row + ((step % 4 * 2 + half) ^ token % 8) * 16) =
                make_uint4(own[0], own[1], own[2], own[3]);
          }
        }
      }
      ptx::fence_proxy_async_shared();
      __syncwarp();
      if (lane() == 0) ptx::mbarrier_arrive(arranged.full + arranged.stage);
      arranged.advance();
      ring.release();
    }
    if constexpr (kNorm) {
      squares_ring.wait_empty();
#pragma unroll
      for (int item = 0; item < kItems; ++item) {
        float sum = squares[item];
        sum += __shfl_xor_sync(0xffffffffu, sum, 1);
        sum += __shfl_xor_sync(0xffffffffu, sum, 2);
        if (works && lane() % 4 == 0) shared.squares()[group * kTokens + first_token + item * kPass] = sum;
      }
      ptx::mbarrier_arrive(squares_ring.full);
      squares_ring.advance();
    }
  });
}

}  // namespace cki::gemm
