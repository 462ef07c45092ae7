// A product's tiles cut evenly over the blocks of a launch: each block takes as many stages of K as any other, so all SMs read
// the weight until the end, whatever the number of tiles is (stream-K, Osama et al., arXiv:2301.03598).
//
// Stages are numbered tile by tile, and block b takes those from b * stages / blocks to the next block's first. What a block
// does of one tile is a part. A tile of several parts is finished by the last block that stored its sums: it adds them in
// the order of the blocks, so the result is the same in every run, and no block waits.
#pragma once

#include "common/types.cuh"
#include "ptx/fence.cuh"
#include "ptx/memory.cuh"

namespace cki::gemm {

struct EvenWork {
  int tile_stages;  // of K
  int stages;       // of all tiles
  int blocks;       // no more than stages

  __device__ __forceinline__ int first_stage(int block) const {
    return static_cast<int>(static_cast<i64>(block) * stages / blocks);
  }
  // The block that takes a stage.
  __device__ __forceinline__ int block_of(int stage) const {
    return static_cast<int>(((static_cast<i64>(stage) + 1) * blocks - 1) / stages);
  }
  __device__ __forceinline__ int first_block(int tile) const { return block_of(tile * tile_stages); }
  __device__ __forceinline__ int last_block(int tile) const { return block_of((tile + 1) * tile_stages - 1); }

  // Where a block's part of a tile is stored: of all tiles that it takes a part in, only its first and last are shared.
  __device__ __forceinline__ int slot(int block, int tile) const {
    return 2 * block + (first_stage(block) / tile_stages == tile ? 0 : 1);
  }
};

// A block's stages, part by part: the tile, and the stages of K [first, end) in it.
struct WorkPart {
  int tile, first, end;
};

template <class Visit>
__device__ __forceinline__ void for_each_part(const EvenWork& work, int block, const Visit& visit) {
  const int end = work.first_stage(block + 1);
#pragma unroll 1
  for (int stage = work.first_stage(block); stage < end;) {
    const int tile = stage / work.tile_stages, first = stage - tile * work.tile_stages;
    const int count = min(work.tile_stages - first, end - stage);
    visit(WorkPart{tile, first, first + count});
    stage += count;
  }
}

// By a warp that has stored its share of a tile's sums: whether the same warps of all `parts` have, and this is to add them.
// counter: of these warps; zero before the launch, and after it.
__device__ __forceinline__ bool is_last_part(u32* counter, int parts) {
  ptx::fence_acq_rel_gpu();
  __syncwarp();
  int is_last = 0;
  if (threadIdx.x % 32 == 0) {
    is_last = ptx::atom_add_acq_rel_gpu(counter, 1) == static_cast<u32>(parts - 1);
    if (is_last) ptx::store_relaxed_gpu(counter, 0);
  }
  is_last = __shfl_sync(0xffffffffu, is_last, 0);
  if (is_last) ptx::fence_acq_rel_gpu();
  return is_last != 0;
}

}  // namespace cki::gemm
