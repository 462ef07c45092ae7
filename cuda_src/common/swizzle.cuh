// The shared-memory swizzle of TMA and wgmma as a function of byte offsets.
//
// A tile is stored as rows of Span bytes (128, 64 or 32); the 16-byte chunks of a row are permuted by an XOR of the
// chunk index with row bits, so that a column of chunks, which ldmatrix and wgmma read, spreads over all banks:
//   Span 128: bits 4-6 ^= bits 7-9   pattern of 8 rows, 1024 bytes
//   Span  64: bits 4-5 ^= bits 7-8   pattern of 8 rows,  512 bytes
//   Span  32: bit  4   ^= bit  7     pattern of 8 rows,  256 bytes
// The hardware applies it to absolute shared addresses; offsets agree with them when the tile starts at a multiple of
// the pattern's size. Use it for every access by hand (cp.async, stores, ldmatrix) to a tile that TMA or wgmma also
// touches.
#pragma once

#include "common/types.cuh"

namespace cki {

template <int Span>
__device__ __forceinline__ constexpr u32 swizzle(u32 byte_offset) {
  static_assert(Span == 0 || Span == 32 || Span == 64 || Span == 128, "the span is 32, 64 or 128 bytes, or 0 for none");
  if constexpr (Span == 128) return byte_offset ^ ((byte_offset >> 3) & 0x70);
  if constexpr (Span == 64) return byte_offset ^ ((byte_offset >> 3) & 0x30);
  if constexpr (Span == 32) return byte_offset ^ ((byte_offset >> 3) & 0x10);
  return byte_offset;
}

}  // namespace cki
