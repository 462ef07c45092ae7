// How an element-wise kernel is cut: which columns of which row a thread works on.
//
// kThreadsPerRow threads (a power of two, or the block) share a row and kRowsPerBlock rows a block. A row is cut into tiles
// of kThreadsPerRow * kVectorsPerThread vectors of kVectorSize elements: a thread loads all its vectors of a tile before it
// uses the first, because bytes in flight decide the speed of a kernel that does little else. Vector v of lane t covers
// columns (v * kThreadsPerRow + t) * kVectorSize of the tile onwards, so that neighbours in a warp read neighbouring
// addresses. blockIdx.x counts groups of rows, blockIdx.y tiles of a row.
//
// With kFullTiles the width is a multiple of a tile, and no column is tested against it.
#pragma once

#include "common/types.cuh"

namespace cki {

constexpr int kThreads = kThreadsPerRow * kRowsPerBlock;
constexpr int kTileColumns = kThreadsPerRow * kVectorsPerThread * kVectorSize;

// Where a block has several rows, the last block's may lie beyond the end.
__device__ __forceinline__ int tile_row() { return blockIdx.x * kRowsPerBlock + threadIdx.x / kThreadsPerRow; }

// First column of a thread's vector in the tile that starts at column `first`.
__device__ __forceinline__ int tile_column(int first, int vector) {
  const int lane = threadIdx.x % kThreadsPerRow;
  return first + (vector * kThreadsPerRow + lane) * kVectorSize;
}

__device__ __forceinline__ bool in_row(int column, int width) { return kFullTiles || column < width; }

// function(first column) for each tile of the row that this block works on. The planner keeps the sum below 2^31.
template <typename Function>
__device__ __forceinline__ void for_each_tile(int width, Function function) {
  for (int first = blockIdx.y * kTileColumns; first < width; first += gridDim.y * kTileColumns) function(first);
}

}  // namespace cki
