// The arrangers of linear_tokens_e4m3.cu: n of each stage of x, in its place. For that kernel's prelude.
//
// n is two e4m3 numbers an element, of which the first is n rounded and the second what that left, times a
// power of two for each token and stage, by which the largest of its elements is in [128, 256). Each has four bits, so the
// two have the eight of bf16: elements down to 2^-9 of the largest are kept exactly, and smaller ones within 2^-17 of it.
#pragma once

#include "common/types.cuh"
#include "gemm/hopper/e4m3_token_stages.cuh"
#include "ptx/convert.cuh"
#include "ptx/fence.cuh"
#include "ptx/mbarrier.cuh"

namespace cki::gemm {

// Eight elements in 16 bytes.
__device__ __forceinline__ void to_floats(const uint4& words, float (&values)[8]) {
  ptx::bf16x2_to_f32x2(words.x, values[0], values[1]);
  ptx::bf16x2_to_f32x2(words.y, values[2], values[3]);
  ptx::bf16x2_to_f32x2(words.z, values[4], values[5]);
  ptx::bf16x2_to_f32x2(words.w, values[6], values[7]);
}

// The power of two that brings `largest` to [128, 256), and what undoes it: not a number where `largest` is none.
__device__ __forceinline__ void power_of(float largest, float& up, float& down) {
  const u32 exponent = min(max(__float_as_uint(largest) >> 23, 8u), 254u);
  up = __uint_as_float((261 - exponent) << 23);
  down = __float_as_uint(largest) >= 0x7f800000u ? largest : __uint_as_float((exponent - 7) << 23);
}

// Four elements: rounded to e4m3, and the rest.
__device__ __forceinline__ void split(const float* values, u32& high, u32& low) {
  u32 words[2][2];
#pragma unroll
  for (int pair = 0; pair < 2; ++pair) {
    const float first = values[pair * 2], second = values[pair * 2 + 1];
    words[0][pair] = ptx::f32x2_to_e4m3x2(first, second);
    float first_high, second_high;
    ptx::f16x2_to_f32x2(ptx::e4m3x2_to_f16x2(static_cast<u16>(words[0][pair])), first_high, second_high);
    words[1][pair] = ptx::f32x2_to_e4m3x2(first - first_high, second - second_high);
  }
  high = words[0][0] | words[0][1] << 16;
  low = words[1][0] | words[1][1] << 16;
}

// Four warps: n of each stage, and the squares of each part. Eight lanes have a token's row, each eight elements of a box.
__device__ __forceinline__ void arrange(const Shared& shared, const EvenWork& work, int block, int depth) {
  const int thread = static_cast<int>(threadIdx.x) - kConsumerThreads;
  const int piece = thread % kPieces, token = thread / kPieces;
  const bool works = token < kTokens;  // of a warp all or none
  Ring ring = shared.ring();
  SquaresRing squares_ring = shared.squares_ring();
  for_each_part(work, block, [&](const WorkPart& part) {
    float squares = 0.0f;
#pragma unroll 1
    for (int k = part.first; k < part.end; ++k) {
      ptx::mbarrier_wait_parity(shared.arrived() + ring.stage, ring.phase);
      if (works) {
        unsigned char* const row = shared.x(ring.stage) + token * kSpan;
        float values[kBoxes][8], largest = 0.0f;
#pragma unroll
        for (int box = 0; box < kBoxes; ++box) {
          to_floats(*reinterpret_cast<const uint4*>(row + box * kBox + (piece ^ token % 8) * 16), values[box]);
          float gammas[8] = {};
          if constexpr (kNorm) {
            const int at = box * 64 + piece * 8;
            uint4 words = make_uint4(0, 0, 0, 0);
            if (k * kDepth + at < depth) words = *reinterpret_cast<const uint4*>(shared.gamma(ring.stage) + at * 2);
            to_floats(words, gammas);
          }
#pragma unroll
          for (int i = 0; i < 8; ++i) {
            if constexpr (kNorm) {
              squares = fmaf(values[box][i], values[box][i], squares);
              values[box][i] *= gammas[i];
            }
            largest = fmaxf(largest, fabsf(values[box][i]));
          }
        }
#pragma unroll
        for (int distance = 1; distance < kPieces; distance *= 2)
          largest = fmaxf(largest, __shfl_xor_sync(0xffffffffu, largest, distance));
        float up, down;
        power_of(largest, up, down);
        if (piece == 0) shared.powers(ring.stage)[token] = down;
        __syncwarp();  // all have read the row
#pragma unroll
        for (int box = 0; box < kBoxes; ++box) {
#pragma unroll
          for (int i = 0; i < 8; ++i) values[box][i] *= up;
          uint2 high, low;
          split(values[box], high.x, low.x);
          split(values[box] + 4, high.y, low.y);
          const int at = ((box * 4 + piece / 2) ^ token % 8) * 16 + piece % 2 * 8;
          *reinterpret_cast<uint2*>(row + at) = high;
          *reinterpret_cast<uint2*>(row + kBox + at) = low;
        }
      }
      ptx::fence_proxy_async_shared();
      __syncwarp();
      if (piece == 0) ptx::mbarrier_arrive(shared.ready() + ring.stage);
      ring.advance();
    }
    if constexpr (kNorm) {
      squares_ring.wait_empty();
#pragma unroll
      for (int distance = 1; distance < kPieces; distance *= 2)
        squares += __shfl_xor_sync(0xffffffffu, squares, distance);
      if (works && piece == 0) shared.squares()[token] = squares;
      ptx::mbarrier_arrive(squares_ring.full);
      squares_ring.advance();
    }
  });
}

}  // namespace cki::gemm
