// Rings of buffers in shared memory between the producer and the consumers of a block.
//
// A stage of a ring has two mbarriers. `full` completes when the producer has announced the bytes of a copy and TMA has
// delivered them; `empty` completes when every consumer warp has said that it reads the stage no more. A ring has a
// cursor in each thread that uses it: the stage that comes next, and how often the ring has been walked through, odd or
// even, which is the parity that a wait names.
#pragma once

#include "common/types.cuh"
#include "ptx/mbarrier.cuh"

namespace cki {

template <int kStageCount>
struct StageRing {
  static constexpr int kStages = kStageCount;
  static constexpr int kBytes = 2 * kStages * static_cast<int>(sizeof(u64));

  u64* full;
  u64* empty;
  int stage = 0;
  u32 phase = 0;

  __device__ __forceinline__ explicit StageRing(unsigned char* memory)
      : full(reinterpret_cast<u64*>(memory)), empty(reinterpret_cast<u64*>(memory) + kStages) {}

  // By one thread of the block, before the barrier that publishes it. consumers: arrivals at `empty`, a stage, of warps or of
  // threads.  arrivals: of producers at `full`.
  __device__ __forceinline__ void initialise(int consumers, u32 arrivals = 1) const {
    for (int i = 0; i < kStages; ++i) {
      ptx::mbarrier_init(full + i, arrivals);
      ptx::mbarrier_init(empty + i, static_cast<u32>(consumers));
    }
  }

  __device__ __forceinline__ void advance() {
    if (++stage == kStages) {
      stage = 0;
      phase ^= 1;
    }
  }

  // Consumers: the stage's data has arrived.
  __device__ __forceinline__ void wait_full() const { ptx::mbarrier_wait_parity(full + stage, phase); }

  // Consumers: this warp is done with the stage; on to the next. All its lanes must have finished their reads.
  __device__ __forceinline__ void release() {
    if (threadIdx.x % 32 == 0) ptx::mbarrier_arrive(empty + stage);
    advance();
  }

  // The same where each thread that uses the ring arrives for itself.
  __device__ __forceinline__ void release_by_one() {
    ptx::mbarrier_arrive(empty + stage);
    advance();
  }

  // The same in a ring with a stage for each consumer, whose cursor stays where it is.
  __device__ __forceinline__ void release_own() {
    if (threadIdx.x % 32 == 0) ptx::mbarrier_arrive(empty + stage);
    phase ^= 1;
  }

  // Producer: all consumers are done with the stage's last contents. A fresh barrier answers at once.
  __device__ __forceinline__ void wait_empty() const { ptx::mbarrier_wait_parity(empty + stage, phase ^ 1); }

  // Both for a whole warp, of which one lane asks.
  __device__ __forceinline__ void warp_wait_full() const {
    if (threadIdx.x % 32 == 0) wait_full();
    __syncwarp();
  }
  __device__ __forceinline__ void warp_wait_empty() const {
    if (threadIdx.x % 32 == 0) wait_empty();
    __syncwarp();
  }
};

}  // namespace cki
