// From accumulators to the output: rows of 16-byte stores.
//
// In wgmma's layout the four lanes of a row hold two neighbouring columns each of every block of eight. They exchange, so
// that each lane has all eight columns of every fourth block and stores 16 bytes; eight rows of 64 bytes a store
// instruction. Outputs at other alignments or strides take narrower stores without exchange.
#pragma once

#include "common/convert_element.cuh"
#include "common/types.cuh"
#include "common/vec.cuh"
#include "ptx/memory.cuh"

namespace cki::attention {

// Transposes a 4x4 matrix of words over the lanes of a quad: lane t's word i goes to lane i's word t.
__device__ __forceinline__ void transpose_in_quad(u32 (&words)[4]) {
  constexpr u32 kFullWarp = 0xffffffffu;
  const int lane = static_cast<int>(threadIdx.x) % 4;
#pragma unroll
  for (int distance = 1; distance <= 2; distance *= 2) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      if (i & distance) continue;
      const bool upper = (lane & distance) != 0;
      const u32 received = __shfl_xor_sync(kFullWarp, upper ? words[i] : words[i + distance], distance);
      if (upper) {
        words[i] = received;
      } else {
        words[i + distance] = received;
      }
    }
  }
}

// Stores this lane's part of row `r` (0 or 1). All lanes of the warp call it; is_stored: whether the row exists.
// kWide: rows are 16-byte aligned and value_dim is a multiple of 8. kPair: 4-byte aligned, an even value_dim.
template <class Element, bool kWide, bool kPair, int kCount>
__device__ __forceinline__ void store_row(Element* row, i64 dim_stride, const float (&output)[kCount], int r,
                                          int value_dim, bool is_stored) {
  constexpr int kBlocks = kCount / 4;  // of eight columns
  const int lane = static_cast<int>(threadIdx.x) % 4;
  if constexpr (kWide) {
#pragma unroll
    for (int first = 0; first < kBlocks; first += 4) {
      u32 words[4];
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const int at = min(first + i, kBlocks - 1) * 4 + 2 * r;  // past the end: anything, unstored
        words[i] = pack_pair<Element>(output[at], output[at + 1]);
      }
      transpose_in_quad(words);
      const int column = (first + lane) * 8;
      if (is_stored && column < value_dim) {
        ptx::store_global_16(row + column, make_uint4(words[0], words[1], words[2], words[3]));
      }
    }
  } else {
    if (!is_stored) return;
#pragma unroll
    for (int block = 0; block < kBlocks; ++block) {
      const int column = block * 8 + lane * 2;
      const float pair[2] = {output[block * 4 + 2 * r], output[block * 4 + 2 * r + 1]};
      if constexpr (kPair) {
        if (column < value_dim) store_floats(row + column, pair);
      } else {
        if (column < value_dim) row[column * dim_stride] = from_float<Element>(pair[0]);
        if (column + 1 < value_dim) row[(column + 1) * dim_stride] = from_float<Element>(pair[1]);
      }
    }
  }
}

}  // namespace cki::attention
