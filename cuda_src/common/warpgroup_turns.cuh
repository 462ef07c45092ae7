// Ping-pong: the consumer warpgroups of a block take turns at starting their products.
//
// Without order all warpgroups tend to wait for the tensor core at the same time, and to do everything else (a softmax, the
// finish of a tile) at the same time. In turns, one's other work runs while another's products do. Each warpgroup has a
// named barrier on which it and the warpgroup before it meet: take() waits there, pass() arrives at the next one's. All
// must take equally many turns, also for work that they skip; finish() ends them.
#pragma once

#include "ptx/barrier.cuh"

namespace cki {

template <int kConsumerCount, bool kEnabled>
struct WarpgroupTurns {
  static constexpr bool kInTurn = kEnabled && kConsumerCount > 1;
  static constexpr int kMembers = 2 * 128;

  int own;  // barrier ids, from 1: 0 is __syncthreads
  int next;

  // The last warpgroup passes the first turn to the first.
  __device__ __forceinline__ explicit WarpgroupTurns(int consumer)
      : own(1 + consumer), next(consumer + 1 == kConsumerCount ? 1 : 2 + consumer) {
    if (kInTurn && next == 1) pass();
  }

  __device__ __forceinline__ void take() const {
    if constexpr (kInTurn) ptx::bar_sync(own, kMembers);
  }
  __device__ __forceinline__ void pass() const {
    if constexpr (kInTurn) ptx::bar_arrive(next, kMembers);
  }
  // The first warpgroup meets the last turn that was passed to it, so that no barrier is left half full.
  __device__ __forceinline__ void finish() const {
    if constexpr (kInTurn) {
      if (own == 1) take();
    }
  }
};

}  // namespace cki
