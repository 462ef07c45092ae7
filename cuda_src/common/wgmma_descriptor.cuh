// The 64-bit matrix descriptors by which wgmma finds its operands in shared memory.
//
//   bits  0-13  start address >> 4 (of the 18-bit shared address)
//   bits 16-29  leading byte offset >> 4 (LBO)
//   bits 32-45  stride byte offset >> 4 (SBO)
//   bits 49-51  base offset, 0 for tiles that start at a multiple of their swizzle pattern (1024, 512 or 256 bytes)
//   bits 62-63  swizzle: 0 none, 1 = 128 bytes, 2 = 64 bytes, 3 = 32 bytes
//
// K-major (the usual form of A and B: each row of the tile is contiguous along K). Rows of Span bytes, swizzled; SBO
// steps over 8 rows. LBO is unused with a swizzle. A K step (16 elements of 2 bytes or 32 of 1: 32 bytes) within a
// row adds 32 bytes to the start address; the hardware swizzles the final address, so the sum needs no XOR. With no
// swizzle an 8x16-byte core matrix is 128 contiguous bytes, LBO steps over core matrices along K, SBO over core
// matrices along rows.
//
// MN-major (16-bit only; the tile as it lies when K is the row index, such as V in P V). Slabs of [K rows][Span bytes
// of columns], swizzled; SBO steps over 8 K rows (8 * Span bytes), LBO over to the next slab of columns. A K step of
// 16 adds 16 * Span bytes.
#pragma once

#include "common/types.cuh"
#include "ptx/address.cuh"

namespace cki {

// Which index of an operand is contiguous in memory.
enum class Major { k = 0, mn = 1 };

// Span: 128, 64, 32, or 0 for no swizzle. Offsets in bytes, multiples of 16.
template <int Span>
__device__ __forceinline__ u64 wgmma_descriptor(const void* tile, u32 leading_bytes, u32 stride_bytes) {
  static_assert(Span == 0 || Span == 32 || Span == 64 || Span == 128, "the span is 32, 64 or 128 bytes, or 0 for none");
  constexpr u64 kMode = Span == 128 ? 1 : Span == 64 ? 2 : Span == 32 ? 3 : 0;
  return static_cast<u64>((ptx::shared_address(tile) & 0x3ffff) >> 4) |
         static_cast<u64>((leading_bytes & 0x3ffff) >> 4) << 16 |
         static_cast<u64>((stride_bytes & 0x3ffff) >> 4) << 32 | kMode << 62;
}

// K-major tile whose rows are Span bytes apart.
template <int Span>
__device__ __forceinline__ u64 wgmma_descriptor_k_major(const void* tile) {
  static_assert(Span != 0, "without a swizzle both offsets must be given: use wgmma_descriptor<0>");
  return wgmma_descriptor<Span>(tile, 16, 8 * Span);
}

// MN-major slabs of K rows of Span bytes; `slab_bytes` separates slabs of Span/2 columns (ignored for a single one).
template <int Span>
__device__ __forceinline__ u64 wgmma_descriptor_mn_major(const void* tile, u32 slab_bytes) {
  static_assert(Span != 0, "without a swizzle both offsets must be given: use wgmma_descriptor<0>");
  return wgmma_descriptor<Span>(tile, slab_bytes, 8 * Span);
}

// The descriptor moved on by `bytes` (a multiple of 16) from its start address.
__device__ __forceinline__ u64 wgmma_descriptor_advance(u64 descriptor, u32 bytes) { return descriptor + (bytes >> 4); }

}  // namespace cki
