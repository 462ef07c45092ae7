// Copies of matrix tiles from global to shared memory, as 16-byte chunks whose order in a row is permuted.
//
// A tile is stored as rows along the contiguous axis of the matrix. Unpermuted, a column of chunks would lie in four banks
// and every fragment load would be serialised; XORing the chunk index with row bits spreads it over all of them:
//   kRows8  chunk ^ (row % 8)         eight rows of one chunk column: what ldmatrix reads
//   kRows4  chunk ^ 2 * (row % 4)     four rows of two neighbouring chunk columns: what the single-word reads of an
//                                     fp32 tile stored along N touch (fragments.cuh)
// What lies outside the matrix is filled with zeros, so that the products need no bounds and padding cannot leak in.
// kThreads threads copy a tile: the block's, or each 32 of them one of their own.
#pragma once

#include "common/types.cuh"
#include "ptx/cp_async.cuh"

namespace cki::gemm {

enum class Swizzle { kRows8, kRows4 };

// Byte offset of a chunk in a tile of kChunks chunks a row.
template <Swizzle kSwizzle, int kChunks>
__device__ __forceinline__ int chunk_offset(int row, int chunk) {
  static_assert(kChunks % 8 == 0, "the permutation moves chunks within groups of eight");
  const int mixed = kSwizzle == Swizzle::kRows8 ? chunk ^ (row & 7) : chunk ^ ((row & 3) << 1);
  return (row * kChunks + mixed) * 16;
}

// Element offset of a row. kAxes = 1: one stride reaches every row. kAxes = 3: rows are numbered over three axes of a
// tensor, outermost first, so that axes which do not merge into one (a slice of the sequence axis) need no copy.
template <int kAxes>
struct RowOffset {
  static_assert(kAxes == 1 || kAxes == 3);
  i64 strides[3];
  int extent1, extent2;

  __device__ __forceinline__ i64 operator()(int row) const {
    if constexpr (kAxes == 1) return row * strides[2];
    const int middle = row / extent2;
    return (middle / extent1) * strides[0] + (middle % extent1) * strides[1] + (row % extent2) * strides[2];
  }
  // offset(row + kStep) for offset(row) = `offset`: an addition where that is enough.
  template <int kStep>
  __device__ __forceinline__ i64 advance(i64 offset, int row) const {
    if constexpr (kAxes == 1) return offset + kStep * strides[2];
    return (*this)(row + kStep);
  }
};

// Eight 16-bit elements gathered one by one: the way for addresses that are not even a multiple of 4 bytes.
template <class Element>
__device__ __forceinline__ uint4 gather_chunk(const Element* source, i64 column_stride, int valid) {
  static_assert(sizeof(Element) == 2);
  u32 words[4] = {};
#pragma unroll
  for (int i = 0; i < 8; ++i) {
    if (i < valid) words[i / 2] |= static_cast<u32>(source[i * column_stride].bits) << (16 * (i % 2));
  }
  return make_uint4(words[0], words[1], words[2], words[3]);
}

// Starts the copy of rows [first_row, +kRows) and columns [first_column, +kChunks * 16 bytes) of a rows x columns matrix.
// kCopyBytes: what divides the address of each piece of the contiguous axis: 16, 8 or 4 bytes go by cp.async, belonging to
// the caller's current group; 2 (a 16-bit matrix, oddly placed or strided) by loads and stores that end before the return.
// column_stride is 1 unless kCopyBytes is the size of one element.
template <int kRows, int kChunks, int kCopyBytes, Swizzle kSwizzle, int kThreads, class Element, class Offset>
__device__ __forceinline__ void copy_tile(unsigned char* tile, const Element* matrix, const Offset& row_offset,
                                          i64 column_stride, int first_row, int rows, int first_column, int columns) {
  constexpr int kSize = static_cast<int>(sizeof(Element));
  constexpr int kPerChunk = 16 / kSize;
  // A thread copies the same chunk of every kRowStep-th row: its column, the validity of it and the permutation are
  // computed once, and one pointer walks down the rows. (Anything else costs a register for each row.)
  constexpr int kRowStep = kThreads / kChunks;
  static_assert(kThreads % kChunks == 0 && kRows % kRowStep == 0, "every thread copies the same number of chunks");
  // The rows of a whole block's thread share the permutation; those of one warp's may not.
  constexpr bool kShared = kRowStep % (kSwizzle == Swizzle::kRows8 ? 8 : 4) == 0;
  const int thread = static_cast<int>(threadIdx.x) % kThreads;
  const int chunk = thread % kChunks;
  const int row = thread / kChunks;
  const int column = first_column + chunk * kPerChunk;
  const int valid_columns = max(0, min(columns - column, kPerChunk));
  const Element* chunk_column = matrix + static_cast<i64>(column) * column_stride;
  unsigned char* target = tile + chunk_offset<kSwizzle, kChunks>(row, chunk);
  i64 offset = row_offset(first_row + row);
  // Unrolled, narrow copies would hold an address for each piece, and gathered chunks eight registers for each row.
  constexpr int kUnroll = kCopyBytes == 16 ? kRows / kRowStep : 1;
#pragma unroll kUnroll
  for (int i = 0; i < kRows / kRowStep; ++i) {
    const int valid = first_row + row + i * kRowStep < rows ? valid_columns : 0;  // elements inside the matrix
    const Element* source = chunk_column + offset;
    if constexpr (kCopyBytes >= 4) {
      constexpr int kPerPiece = kCopyBytes / kSize;
#pragma unroll
      for (int piece = 0; piece < 16 / kCopyBytes; ++piece) {
        const int inside = max(0, min(valid - piece * kPerPiece, kPerPiece));
        // With nothing to read the address must still be a good one: the matrix's first element.
        const Element* from = inside > 0 ? source + piece * kPerPiece * column_stride : matrix;
        ptx::cp_async<kCopyBytes>(target + piece * kCopyBytes, from, inside * kSize);
      }
    } else {
      *reinterpret_cast<uint4*>(target) = gather_chunk(source, column_stride, valid);
    }
    if constexpr (kShared) {
      target += kRowStep * kChunks * 16;
    } else {
      target = tile + chunk_offset<kSwizzle, kChunks>(row + (i + 1) * kRowStep, chunk);
    }
    offset = row_offset.template advance<kRowStep>(offset, first_row + row + i * kRowStep);
  }
}

}  // namespace cki::gemm
