// What the blocks of linear_tokens.cu keep in shared memory, and how they share the work. For that kernel's prelude.
//
//   ring      kStages stages of w (128 rows of 128 bytes) and of x (boxes of all tokens, 128 bytes of each)
//   arranged  kArranged stages of n as the products take it; none where that is x itself
//   barriers of the ring, of what is arranged, of a part's squares; the squares
#pragma once

#include "common/stage_ring.cuh"
#include "common/types.cuh"
#include "gemm/hopper/even_work.cuh"
#include "gemm/skinny/decode_operand.cuh"
#include "ptx/mbarrier.cuh"

namespace cki::gemm {

using Operand = DecodeOperand<bf16, Code>;
constexpr bool kCodes = sizeof(Code) == 1;
constexpr bool kArranges = kCodes || kNorm;
constexpr bool kFolds = kCodes && kNorm && !kGated;  // scales of w into n, which is rounded anyway
constexpr int kSpan = 128;                                        // bytes of a row in shared memory: the swizzle
constexpr int kDepth = kSpan / static_cast<int>(sizeof(Code));    // elements of K in a stage
constexpr int kSteps = kDepth / 16;
constexpr int kScaleBlock = 128;
constexpr int kRows = 128;  // of w in a stage: two consumers' 64
constexpr int kTileColumns = kGated ? kRows / 2 : kRows;  // of y
constexpr int kConsumerThreads = 256, kArrangerThreads = 128;
constexpr int kThreads = kConsumerThreads + kArrangerThreads + 128;  // of the last warpgroup one thread works
// Of a thread, in steps of eight: a block has 65536.
constexpr int kConsumerRegisters = 184, kArrangerRegisters = 104, kProducerRegisters = 32;
constexpr int kArranged = 3;       // stages of n
constexpr int kBox = kTokens * kSpan;  // bytes: 64 elements of K of all tokens
constexpr int kBytesX = kDepth / 64 * kBox;
constexpr int kBytesW = kRows * kSpan, kStageBytes = kBytesW + kBytesX;
constexpr int kSums = kTokens / 2;  // of a thread
constexpr int kConsumerWarps = kConsumerThreads / 32;
constexpr int kWarpPart = kSums * 32 + kTokens;           // floats of a warp's part: its sums, the squares
constexpr int kPartFloats = kConsumerWarps * kWarpPart;

constexpr int kArrangedAt = kStages * kStageBytes;
constexpr int kBarriersAt = kArrangedAt + (kArranges ? kArranged * kBytesX : 0);
constexpr int kSquaresAt = kBarriersAt + StageRing<kStages>::kBytes + StageRing<kArranged>::kBytes + StageRing<1>::kBytes;
// Of the arrangers' two halves, and each consumer warp's own.
constexpr int kSharedBytes = kSquaresAt + (2 + kConsumerWarps) * kTokens * 4;
static_assert(kSharedBytes <= kBarriersAt + 3072, "what the planner allows for");
static_assert(kTokens == 8 || kTokens == 16 || kTokens == 32 || kTokens == 64, "tokens of a wgmma");

// Arrangers: a lane makes 16 positions of a token; warps share a stage's steps by fours, and the tokens.
constexpr int kStepGroups = kSteps / 4;
constexpr int kPass = 8 * (4 / kStepGroups);
constexpr int kItems = kTokens > kPass ? kTokens / kPass : 1;
// A power of two, by which codes' registers are too small (decode_operand.cuh).
constexpr float kOfX = kCodes ? 0x1p60f : 1.0f;

using Ring = StageRing<kStages>;
using ArrangedRing = StageRing<kArranged>;
// Of a part. Every thread arrives for itself: once a part, and racecheck does not see what a lane vouches for of others.
using SquaresRing = StageRing<1>;

struct Shared {
  unsigned char* memory;
  __device__ __forceinline__ Ring ring() const { return Ring(memory + kBarriersAt); }
  __device__ __forceinline__ ArrangedRing arranged() const { return ArrangedRing(memory + kBarriersAt + Ring::kBytes); }
  __device__ __forceinline__ SquaresRing squares_ring() const {
    return SquaresRing(memory + kBarriersAt + Ring::kBytes + ArrangedRing::kBytes);
  }
  __device__ __forceinline__ float* squares() const { return reinterpret_cast<float*>(memory + kSquaresAt); }
  __device__ __forceinline__ float* warp_squares(int warp) const { return squares() + (2 + warp) * kTokens; }
};

__device__ __forceinline__ int lane() { return static_cast<int>(threadIdx.x) % 32; }

}  // namespace cki::gemm
