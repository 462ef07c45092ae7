// What the blocks of linear_tokens_e4m3.cu keep in shared memory. For that kernel's prelude.
//
//   ring      kStages stages of w (128 rows of 128 codes) and of x (two boxes of all tokens, 128 bytes of each), of which the
//             arrangers make n in its place
//   gamma     of each stage's part of K (kNorm)
//   barriers of the ring, for w, x and n of a stage, and of a part's squares; the squares; powers of n
#pragma once

#include "common/stage_ring.cuh"
#include "common/types.cuh"
#include "gemm/hopper/even_work.cuh"
#include "ptx/mbarrier.cuh"

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
constexpr float kOfX = 1.0f;  // no power of two for all of x

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

}  // namespace cki::gemm
