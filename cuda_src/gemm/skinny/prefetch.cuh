// A block's first weights towards L2, before it may read anything.
//
// A kernel launched while the one before it still runs must not read what that one may be writing, and a weight may be
// such a thing. A prefetch into L2 is no read: L2 is where all SMs see the same memory, and a later write changes the line
// there. So the memory is busy while the other kernel's last blocks finish.
//
// A row of a tile along N is short, and a bulk prefetch of it takes its address from uniform registers: a warp's 32 turn
// into a loop of 3 ns each. By sectors, a warp asks for eight such rows at once.
#pragma once

#include "common/types.cuh"
#include "ptx/bulk.cuh"
#include "ptx/memory.cuh"

namespace cki::gemm {

// K [k, k_end) and columns [first_column, +kBlockN) of a weight whose rows in memory, `stride` elements apart, run along N
// (kAlongN) or K and begin at multiples of 16 bytes, as k and first_column do in them. kSectors: along N by sectors.
template <int kBlockN, bool kAlongN, int kThreads, bool kSectors, class Element>
__device__ __forceinline__ void prefetch_weight(const Element* w, i64 stride, int k, int k_end, int first_column,
                                                int columns) {
  const int column_end = min(first_column + kBlockN, columns);
  const int begin = kAlongN ? first_column : k;
  const int extent = (kAlongN ? column_end : k_end) - begin;
  const u32 bytes = static_cast<u32>(max(extent, 0)) * static_cast<u32>(sizeof(Element)) / 16 * 16;
  if (bytes == 0) return;
  const int row_end = kAlongN ? k_end : column_end;
  if constexpr (kSectors && kAlongN) {
    constexpr int kPerSector = 32 / static_cast<int>(sizeof(Element)), kAcross = kBlockN / kPerSector;
#pragma unroll 1
    for (int i = static_cast<int>(threadIdx.x); i < (k_end - k) * kAcross; i += kThreads) {
      const int column = first_column + i % kAcross * kPerSector;
      if (column < column_end) ptx::prefetch_global_l2(w + ((k + i / kAcross) * stride + column));
    }
    return;
  }
#pragma unroll 1
  for (int row = (kAlongN ? k : first_column) + static_cast<int>(threadIdx.x); row < row_end; row += kThreads)
    ptx::bulk_prefetch_l2(w + (row * stride + begin), bytes);
}

}  // namespace cki::gemm
