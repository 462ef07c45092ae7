// A tile's sums in shared memory: written as wgmma's accumulators have them, read by rows, of which a warp has four at a time.
//
// A tile has 128 columns, of which two consumers have 64 each. Slab s is 16 or 8 rows (kSlabRows) of consumer s % 2, and slabs 2n and
// 2n + 1 are the same rows. Eight columns lie at place (column / 8) ^ (row % 8): neither writes nor reads meet in a bank.
#pragma once

#include "common/types.cuh"

namespace cki::gemm {

// A lane's part of a row of 128: columns 32 i + first to 32 i + first + 3, i = 0 to 3, of the row lane / 8 of four.
using RowPart = float[4][4];
__device__ __forceinline__ int first_column(int lane) { return lane % 8 * 4; }

template <int kSlabRows, int kSlabStride>
struct RowSlabs {
  static constexpr int kColumns = 64;
  static constexpr int kStride = kSlabStride;  // bytes
  static_assert(kStride >= kSlabRows * kColumns * 4, "slabs lie apart");

  unsigned char* memory;

  // Columns 8 j + 2 (lane % 4) and the next of a row of slab s.
  __device__ __forceinline__ void put(int lane, int s, int row, int j, float2 pair) const {
    *reinterpret_cast<float2*>(row_of(s, row) + (j ^ row % 8) * 8 + lane % 4 * 2) = pair;
  }

  // Of a row of all slabs.
  __device__ __forceinline__ void get(int lane, int row, RowPart& values) const {
    const int in_slab = row % kSlabRows;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int at = ((i % 2 * 4 + lane % 8 / 2) ^ in_slab % 8) * 8 + lane % 2 * 4;
      const float4 found = *reinterpret_cast<const float4*>(row_of(row / kSlabRows * 2 + i / 2, in_slab) + at);
      values[i][0] = found.x;
      values[i][1] = found.y;
      values[i][2] = found.z;
      values[i][3] = found.w;
    }
  }

 private:
  __device__ __forceinline__ float* row_of(int s, int row) const {
    return reinterpret_cast<float*>(memory + s * kStride) + row * kColumns;
  }
};

}  // namespace cki::gemm
