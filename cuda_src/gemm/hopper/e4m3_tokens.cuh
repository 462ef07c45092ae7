// What the blocks of linear_tokens_e4m3.cu keep in shared memory, how n is arranged, and the products. For its prelude.
//
//   ring      kStages stages of w (128 rows of 128 codes) and of x (two boxes of all tokens, 128 bytes of each), of which the
//             arrangers make n in its place
//   gamma     of each stage's part of K (kNorm)
//   barriers of the ring, for w, x and n of a stage, and of a part's squares; the squares; powers of n
//
// n is two e4m3 numbers an element, of which the first is n rounded and the second what that left, times a power of two for each
// token and stage, by which the largest of its elements is in [128, 256). Each has four bits, so the two have the eight of bf16:
// elements down to 2^-9 of the largest are kept exactly, and smaller ones within 2^-17 of it.
#pragma once

#include "common/stage_ring.cuh"
#include "common/types.cuh"
#include "common/wgmma_descriptor.cuh"
#include "gemm/hopper/even_work.cuh"
#include "ptx/convert.cuh"
#include "ptx/fence.cuh"
#include "ptx/mbarrier.cuh"
#include "ptx/wgmma.cuh"

namespace cki::gemm {

constexpr int kSpan = 128;   // bytes of a row in shared memory: the swizzle
constexpr int kDepth = 128;  // elements of K in a stage
constexpr int kSteps = 4;    // products of a stage, of 32 codes of w's rows
constexpr int kScaleBlock = 128;
constexpr int kRows = 128;  // of w in a stage: two consumers' 64
constexpr int kTileColumns = kGated ? kRows / 2 : kRows;  // of y
constexpr int kConsumerThreads = 256, kArrangerThreads = 128;
constexpr int kThreads = kConsumerThreads + kArrangerThreads + 128;  // of the last warpgroup one thread a warp works
// Of a thread, in steps of eight: a block has 65536.
constexpr int kConsumerRegisters = 184, kArrangerRegisters = 104, kProducerRegisters = 32;
constexpr int kBoxes = 2;              // of x in a stage
constexpr int kBox = kTokens * kSpan;  // bytes: 64 elements of K of all tokens
constexpr int kBytesX = kBoxes * kBox;
constexpr int kBytesW = kRows * kSpan, kStageBytes = kBytesW + kBytesX;
constexpr int kColumns = 2 * kTokens;  // of a product: both parts of n
constexpr int kSums = kTokens / 2;     // of a thread
constexpr int kConsumerWarps = kConsumerThreads / 32;
constexpr int kWarpPart = kSums * 32 + kTokens;  // floats of a warp's part: its sums, the squares
constexpr int kPartFloats = kConsumerWarps * kWarpPart;

constexpr int kGammaAt = kStages * kStageBytes;
constexpr int kBarriersAt = kGammaAt + (kNorm ? kStages * kDepth * 2 : 0);
constexpr int kArrivedAt = kBarriersAt + StageRing<kStages>::kBytes;
constexpr int kReadyAt = kArrivedAt + kStages * 8;
constexpr int kSquaresRingAt = kReadyAt + kStages * 8;
constexpr int kSquaresAt = kSquaresRingAt + StageRing<1>::kBytes;
constexpr int kPowersAt = kSquaresAt + (1 + kConsumerWarps) * kTokens * 4;
constexpr int kSharedBytes = kPowersAt + kStages * kTokens * 4;
static_assert(kPowersAt - kBarriersAt <= 3072, "what the planner allows for");
static_assert(kTokens == 8 || kTokens == 16, "half the columns of a wgmma, and arranged by four warps");

using Ring = StageRing<kStages>;  // `full`: w has arrived
// Of a part. Every thread arrives for itself: once a part, and racecheck does not see what a lane vouches for of others.
using SquaresRing = StageRing<1>;
// For the same reason those lanes arrive that read and write a stage's powers: four of a consumer's warp, of an arranger's
// four.
constexpr int kReleasing = 4, kPieces = 8;

struct Shared {
  unsigned char* memory;
  __device__ __forceinline__ Ring ring() const { return Ring(memory + kBarriersAt); }
  __device__ __forceinline__ u64* arrived() const { return reinterpret_cast<u64*>(memory + kArrivedAt); }  // x, gamma
  __device__ __forceinline__ u64* ready() const { return reinterpret_cast<u64*>(memory + kReadyAt); }
  __device__ __forceinline__ SquaresRing squares_ring() const { return SquaresRing(memory + kSquaresRingAt); }
  __device__ __forceinline__ float* squares() const { return reinterpret_cast<float*>(memory + kSquaresAt); }
  __device__ __forceinline__ float* warp_squares(int warp) const { return squares() + (1 + warp) * kTokens; }
  __device__ __forceinline__ float* powers(int stage) const {
    return reinterpret_cast<float*>(memory + kPowersAt) + stage * kTokens;
  }
  __device__ __forceinline__ unsigned char* x(int stage) const { return memory + stage * kStageBytes + kBytesW; }
  __device__ __forceinline__ unsigned char* gamma(int stage) const { return memory + kGammaAt + stage * (kDepth * 2); }
  // By one thread.
  __device__ __forceinline__ void initialise() const {
    ring().initialise(kConsumerWarps * kReleasing);
    for (int i = 0; i < kStages; ++i) {
      ptx::mbarrier_init(arrived() + i, kBoxes);
      ptx::mbarrier_init(ready() + i, kArrangerThreads / kPieces);
    }
    squares_ring().initialise(kConsumerThreads, kArrangerThreads);
  }
};

__device__ __forceinline__ int lane() { return static_cast<int>(threadIdx.x) % 32; }

// A consumer's warp is done with a stage.
__device__ __forceinline__ void release(Ring& ring) {
  __syncwarp();
  if (lane() < kReleasing) ptx::mbarrier_arrive(ring.empty + ring.stage);
  ring.advance();
}

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
