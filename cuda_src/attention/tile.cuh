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

#include "common/convert_element.cuh"
#include "common/types.cuh"
#include "common/vec.cuh"
#include "ptx/cp_async.cuh"

namespace cki::attention {

// The unsigned integer of 1, 2, 4 or 8 bytes.
template <int kBytes>
struct UnsignedOf;
template <>
struct UnsignedOf<1> {
  using Type = u8;
};
template <>
struct UnsignedOf<2> {
  using Type = u16;
};
template <>
struct UnsignedOf<4> {
  using Type = u32;
};
template <>
struct UnsignedOf<8> {
  using Type = u64;
};
template <int kBytes>
using Unsigned = typename UnsignedOf<kBytes>::Type;

template <class ElementType, int kRowCount, int kDim>
struct Tile {
  using Element = ElementType;
  static constexpr int kRows = kRowCount;
  static constexpr int kRowBytes = kDim * static_cast<int>(sizeof(Element));
  static constexpr int kPitch = kRowBytes + 16;  // bytes
  static constexpr int kBytes = kRows * kPitch;
  static_assert(kDim % 16 == 0, "whole mma steps");
};

// How the threads of a block share the pieces of kCopyBytes of a tile: in row-major order, one each in turn.
template <class T, int kCopyBytes, int kThreads>
struct PieceShare {
  static constexpr int kPieces = T::kRowBytes / kCopyBytes;  // of a row
  static constexpr int kTotal = T::kRows * kPieces;
  static constexpr int kTrips = (kTotal + kThreads - 1) / kThreads;
  // Every thread has the same piece of every kRowStep-th row.
  static constexpr bool kRegular = kTotal % kThreads == 0 && kThreads % kPieces == 0;
  static constexpr int kRowStep = kRegular ? kThreads / kPieces : 0;

  // Calls visit(row, piece) for the pieces of this thread. Irregular trips stay a loop: unrolled, the compiler keeps their
  // rows and addresses in registers from tile to tile.
  template <class Visit>
  static __device__ __forceinline__ void for_each_own(Visit visit) {
    const int thread = static_cast<int>(threadIdx.x);
#pragma unroll(!kRegular ? 1 : kTrips <= 16 ? kTrips : 4)
    for (int trip = 0; trip < kTrips; ++trip) {
      if constexpr (kRegular) {
        visit(thread / kPieces + trip * kRowStep, thread % kPieces);
      } else {
        const int index = thread + trip * kThreads;
        if (kTotal % kThreads == 0 || index < kTotal) visit(index / kPieces, index % kPieces);
      }
    }
  }
};

// Copies one piece to `target`, or zeros where not `inside`. 16, 8 and 4 bytes go by cp.async, in the caller's current
// group; 2 (16-bit elements at odd places or strides) by a load and a store that end before the return. So does e4m3, half
// as many bytes, which becomes f16 on the way.
// `readable`: any address that may be read.
template <int kCopyBytes, class Source>
__device__ __forceinline__ void copy_piece(unsigned char* target, const Source* source, bool inside,
                                           const Source* readable) {
  if constexpr (sizeof(Source) == 1) {
    using Codes = Unsigned<kCopyBytes / 2>;
    const Codes codes = inside ? *reinterpret_cast<const Codes*>(source) : Codes{0};
    if constexpr (kCopyBytes == 2) {
      *reinterpret_cast<u16*>(target) = static_cast<u16>(e4m3x2_as_f16x2(codes));
    } else {
      u32 words[kCopyBytes / 4];
#pragma unroll
      for (int i = 0; i < kCopyBytes / 4; ++i) words[i] = e4m3x2_as_f16x2(static_cast<u16>(codes >> 16 * i));
      store_words(target, words);
    }
  } else if constexpr (kCopyBytes >= 4) {
    ptx::cp_async<kCopyBytes>(target, inside ? source : readable, inside ? kCopyBytes : 0);
  } else {
    *reinterpret_cast<u16*>(target) = inside ? source->bits : u16{0};
  }
}

// Starts the copy of a tile: `rows` rows from `first_row`, row_stride elements apart, then rows of zeros.
// kCopyBytes divides the addresses of all rows and the bytes of head_dim elements. dim_stride is 1 unless kCopyBytes is the
// size of one element.
template <class T, int kCopyBytes, int kThreads, class Source>
__device__ __forceinline__ void copy_tile(unsigned char* tile, const Source* first_row, i64 row_stride, int rows,
                                          int head_dim, i64 dim_stride, const Source* readable) {
  using Element = typename T::Element;
  using Share = PieceShare<T, kCopyBytes, kThreads>;
  constexpr int kPerPiece = kCopyBytes / static_cast<int>(sizeof(Element));
  const i64 piece_stride = kPerPiece == 1 ? dim_stride : kPerPiece;
  if constexpr (Share::kRegular) {  // one address that moves on, instead of kTrips addresses in registers
    const int thread = static_cast<int>(threadIdx.x);
    const int piece = thread % Share::kPieces;
    const Source* source = first_row + thread / Share::kPieces * row_stride + piece * piece_stride;
    Share::for_each_own([&](int row, int) {
      copy_piece<kCopyBytes>(tile + row * T::kPitch + piece * kCopyBytes, source,
                             row < rows && piece * kPerPiece < head_dim, readable);
      source += Share::kRowStep * row_stride;
    });
  } else {
    Share::for_each_own([&](int row, int piece) {
      copy_piece<kCopyBytes>(tile + row * T::kPitch + piece * kCopyBytes,
                             first_row + row * row_stride + piece * piece_stride,
                             row < rows && piece * kPerPiece < head_dim, readable);
    });
  }
}

// The same for rows in any places: row_address(row) is that of the row's first element.
template <class T, int kCopyBytes, int kThreads, class RowAddress, class Source>
__device__ __forceinline__ void copy_scattered_tile(unsigned char* tile, RowAddress row_address, int rows, int head_dim,
                                                    i64 dim_stride, const Source* readable) {
  using Element = typename T::Element;
  constexpr int kPerPiece = kCopyBytes / static_cast<int>(sizeof(Element));
  PieceShare<T, kCopyBytes, kThreads>::for_each_own([&](int row, int piece) {
    const bool inside = row < rows && piece * kPerPiece < head_dim;
    const Source* source = readable;
    if (inside) source = row_address(row) + piece * (kPerPiece == 1 ? dim_stride : kPerPiece);
    copy_piece<kCopyBytes>(tile + row * T::kPitch + piece * kCopyBytes, source, inside, readable);
  });
}

}  // namespace cki::attention
