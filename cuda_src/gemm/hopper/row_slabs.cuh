// A tile's sums in shared memory: written as wgmma's accumulators have them, read by rows.
//
// A tile has 128 columns, of which two consumers have 64 each. Slab s is 16 or 8 rows (kSlabRows) of consumer s % 2, and slabs 2n and
// 2n + 1 are the same rows. A warp writes one slab and reads rows of any. Eight columns lie at place (column / 8) ^ (row % 8): neither
// the writes of 8 bytes nor the reads of 16 meet in a bank.
#pragma once

#include "common/types.cuh"

namespace cki::gemm {

template <int kSlabRows, int kSlabStride>
struct RowSlabs {
  static constexpr int kColumns = 64;
  static constexpr int kStride = kSlabStride;  // bytes
  static_assert(kStride >= kSlabRows * kColumns * 4, "slabs lie apart");

  unsigned char* memory;

  // Columns 8 j + 2 (lane % 4) and the next of a row of slab s.
  __device__ __forceinline__ void put(int lane, int s, int row, int j, float2 pair) const {
    const int at = (j ^ row % 8) * 8 + lane % 4 * 2;
    *reinterpret_cast<float2*>(row_of(s, row) + at) = pair;
  }

  // Columns 4 lane to 4 lane + 3, of 128, of a row of all slabs.
  __device__ __forceinline__ void get(int lane, int row, float (&values)[4]) const {
    const int in_slab = row % kSlabRows;
    const int at = (lane % 16 / 2 ^ in_slab % 8) * 8 + lane % 2 * 4;
    const float4 found = *reinterpret_cast<const float4*>(row_of(row / kSlabRows * 2 + lane / 16, in_slab) + at);
    values[0] = found.x;
    values[1] = found.y;
    values[2] = found.z;
    values[3] = found.w;
  }

 private:
  __device__ __forceinline__ float* row_of(int s, int row) const {
    return reinterpret_cast<float*>(memory + s * kStride) + row * kColumns;
  }
};

}  // namespace cki::gemm
