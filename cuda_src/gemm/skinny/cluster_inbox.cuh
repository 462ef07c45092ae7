// Sums of a tile that the blocks of a cluster, each with its part of K, bring together in the one that finishes it.
//
// Blocks take turns at finishing, so each has inboxes for the tiles it will finish. Sums travel through distributed shared memory
// by stores that complete on a barrier there (st.async): who sends waits for nothing, who finishes waits for its bytes.
#pragma once

#include "common/types.cuh"
#include "ptx/cluster.cuh"
#include "ptx/mbarrier.cuh"

namespace cki::gemm {

__device__ __forceinline__ void add(float4& sum, const float4& other) {
  sum.x += other.x;
  sum.y += other.y;
  sum.z += other.z;
  sum.w += other.w;
}

// What the other blocks add to the tiles that this one finishes, a slot each. Nothing is used twice, so nobody
// waits to send.
// kQuads: threads that have four columns each of a token; they follow one another.
template <int kBlocks, int kThreads, int kQuads>
struct ClusterInbox {
  float4* entries;  // [slot][block but this one][token][quads of 16 rows]
  u64* arrived;     // [slot]
  int tokens;

  __device__ __forceinline__ ClusterInbox(float4* first, int slots, int tokens)
      : entries(first), arrived(reinterpret_cast<u64*>(first + slots * (kBlocks - 1) * tokens * 4)), tokens(tokens) {}

  __device__ __forceinline__ float4* entry(int slot, int from, int token, int quad) const {
    return entries + ((slot * (kBlocks - 1) + from) * tokens + token) * 4 + quad;
  }
  // Of this thread's columns, i: gates and ups.
  static __device__ __forceinline__ int quad(int i) { return static_cast<int>(threadIdx.x) % kQuads + i * 2; }

  // used: slots that will be. Before anything is sent, the cluster must wait.
  __device__ __forceinline__ void begin(int used) const {
    for (int slot = static_cast<int>(threadIdx.x); slot < used; slot += kThreads) ptx::mbarrier_init(arrived + slot, 1);
    ptx::fence_mbarrier_init();
    for (int slot = static_cast<int>(threadIdx.x); slot < used; slot += kThreads)
      ptx::mbarrier_arrive_expect_tx(arrived + slot, static_cast<u32>((kBlocks - 1) * tokens * 64));
    ptx::cluster_arrive();
  }
  template <int N>
  __device__ __forceinline__ void send(const float4 (&sums)[N], int slot, int rank, int to, int token) const {
    const u32 barrier = ptx::map_shared_rank(arrived + slot, static_cast<u32>(to));
#pragma unroll
    for (int i = 0; i < N; ++i) {
      float4* place = entry(slot, rank - (rank > to), token, quad(i));
      ptx::store_async_cluster_f32x4(ptx::map_shared_rank(place, static_cast<u32>(to)), sums[i], barrier);
    }
  }
  // Adds all blocks' sums in the order of their ranks.
  template <int N>
  __device__ __forceinline__ void complete(float4 (&sums)[N], int slot, int rank, int token) const {
    ptx::mbarrier_wait_parity(arrived + slot, 0);
#pragma unroll
    for (int i = 0; i < N; ++i) {
      const float4 own = sums[i];
      sums[i] = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
#pragma unroll
      for (int block = 0; block < kBlocks; ++block)
        add(sums[i], block == rank ? own : *entry(slot, block - (block > rank), token, quad(i)));
    }
  }
};

}  // namespace cki::gemm
