// Tiles of queries, keys and values in shared memory, and how they get there.
//
// A tile is rows of kDim elements, each row followed by 16 unused bytes. The pitch is then an odd number of 16-byte chunks,
// so the eight rows that one ldmatrix phase reads lie in eight different groups of banks whatever kDim is, and the four
// rows of fp32 values that a warp reads word by word lie 8 banks apart. An XOR swizzle would save the 16 bytes but wants
// rows of 128 bytes (not 40, 80 or 96 elements), and its addresses cannot be immediate offsets of one base register.
//
// kDim is the head dimension rounded up to 16; elements past the real one, and rows past the last, are filled with zeros
// here, so the caller's tensors need no padding.
#pragma once

#include "common/types.cuh"
#include "ptx/cp_async.cuh"

namespace cki::attention {

template <class ElementType, int kRowCount, int kDim>
struct Tile {
  using Element = ElementType;
  static constexpr int kRows = kRowCount;
  static constexpr int kRowBytes = kDim * static_cast<int>(sizeof(Element));
  static constexpr int kPitch = kRowBytes + 16;  // bytes
  static constexpr int kBytes = kRows * kPitch;
  static_assert(kDim % 16 == 0, "whole mma steps");
};

// Calls visit(row, piece) for the pieces of kCopyBytes that this thread copies.
template <class T, int kCopyBytes, int kThreads, class Visit>
__device__ __forceinline__ void for_each_own_piece(Visit visit) {
  constexpr int kPieces = T::kRowBytes / kCopyBytes;
  constexpr int kTotal = T::kRows * kPieces;
  constexpr int kTrips = (kTotal + kThreads - 1) / kThreads;
  const int thread = static_cast<int>(threadIdx.x);
#pragma unroll(kTrips <= 16 ? kTrips : 4)
  for (int trip = 0; trip < kTrips; ++trip) {
    if constexpr (kTotal % kThreads == 0 && kThreads % kPieces == 0) {  // the same piece of every kThreads/kPieces-th row
      visit(thread / kPieces + trip * (kThreads / kPieces), thread % kPieces);
    } else {
      const int index = thread + trip * kThreads;
      if (kTotal % kThreads == 0 || index < kTotal) visit(index / kPieces, index % kPieces);
    }
  }
}

// Starts the copy of a tile. row_source(row) is the address of the row's first element, or null for a row of zeros.
// kCopyBytes divides the addresses of all rows and the bytes of head_dim elements: 16, 8 or 4 go by cp.async, in the
// caller's current group; 2 (16-bit elements at odd places or strides) by loads and stores that end before the return.
// dim_stride is 1 unless kCopyBytes is the size of one element. `readable`: any address that may be read.
template <class T, int kCopyBytes, int kThreads, class RowSource>
__device__ __forceinline__ void copy_tile(unsigned char* tile, int head_dim, i64 dim_stride,
                                          const typename T::Element* readable, RowSource row_source) {
  using Element = typename T::Element;
  constexpr int kPerPiece = kCopyBytes / static_cast<int>(sizeof(Element));
  for_each_own_piece<T, kCopyBytes, kThreads>([&](int row, int piece) {
    const Element* source = row_source(row);
    const bool inside = source != nullptr && piece * kPerPiece < head_dim;
    if (inside) source += kPerPiece == 1 ? piece * dim_stride : piece * kPerPiece;
    unsigned char* target = tile + row * T::kPitch + piece * kCopyBytes;
    if constexpr (kCopyBytes >= 4) {
      ptx::cp_async<kCopyBytes>(target, inside ? source : readable, inside ? kCopyBytes : 0);
    } else {
      *reinterpret_cast<u16*>(target) = inside ? source->bits : u16{0};
    }
  });
}

}  // namespace cki::attention
