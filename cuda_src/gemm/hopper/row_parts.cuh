// Rows of 128 columns, of which a warp has four at a time: of a tile's sums, rounded, and as e4m3 codes with a scale.
#pragma once

#include "common/e4m3_codes.cuh"
#include "common/e4m3_parts.cuh"
#include "common/reduce.cuh"
#include "common/types.cuh"
#include "common/vec.cuh"

namespace cki::gemm {

// A lane's part of a row of 128: columns 32 i + first to 32 i + first + 3, i = 0 to 3, of the row lane / 8 of four.
using RowPart = float[4][4];
__device__ __forceinline__ int first_column(int lane) { return lane % 8 * 4; }

// A tile's sums in shared memory, written as wgmma's accumulators have them. Of the 128 columns two consumers have 64 each: slab s is
// 16 or 8 rows (kSlabRows) of consumer s % 2, and slabs 2n and 2n + 1 are the same rows. Eight columns lie at place (column / 8) ^
// (row % 8): neither writes nor reads meet in a bank.
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

// Dense rows of `columns` in bf16.
struct RoundedRows {
  bf16* rows;
  int columns;

  // As CodeRows.
  __device__ __forceinline__ void write(int lane, const RowPart& values, int row, int group, bool stored) const {
    if (!stored) return;
    bf16* to = rows + static_cast<i64>(row) * columns + group * 128 + first_column(lane);
#pragma unroll
    for (int i = 0; i < 4; ++i) store_floats(to + i * 32, values[i]);
  }
};

// Dense codes of `columns`, and scales of 128 neighbours:
//   scale = the largest |value| / 448, code = e4m3(value / scale)         or, kTwoParts, a power of two, and codes of two parts, eight
//   rows apart (e4m3_parts.cuh).
template <bool kTwoParts>
struct CodeRows {
  u8* codes;
  float* scales;
  int columns;

  // By whole warps. stored: whether there is such a row.
  __device__ __forceinline__ void write(int lane, const RowPart& values, int row, int group, bool stored) const {
    float largest = 0.0f;
#pragma unroll
    for (int i = 0; i < 4; ++i) largest = largest_finite(largest, values[i]);
    largest = warp_max<8>(largest);
    float scale, inverse;
    if constexpr (kTwoParts) {
      power_of(largest, inverse, scale);
    } else {
      scale = e4m3_scale(largest);
      inverse = inverse_of_scale(scale);
    }
    if (!stored) return;
    u8* to = codes + static_cast<i64>(kTwoParts ? row / 8 * 16 + row % 8 : row) * columns + group * 128 + first_column(lane);
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      if constexpr (kTwoParts) {
        u16 high[2], low[2];
        split_pair(values[i][0] * inverse, values[i][1] * inverse, high[0], low[0]);
        split_pair(values[i][2] * inverse, values[i][3] * inverse, high[1], low[1]);
        *reinterpret_cast<u32*>(to + i * 32) = high[0] | static_cast<u32>(high[1]) << 16;
        *reinterpret_cast<u32*>(to + i * 32 + 8 * static_cast<i64>(columns)) = low[0] | static_cast<u32>(low[1]) << 16;
      } else {
        store_e4m3<4>(to + i * 32, values[i], inverse);
      }
    }
    if (lane % 8 == 0) scales[row * static_cast<i64>(columns / 128) + group] = scale;
  }
};

}  // namespace cki::gemm
