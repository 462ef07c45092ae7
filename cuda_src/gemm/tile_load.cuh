// Copies of matrix tiles from global to shared memory, as 16-byte chunks whose order in a row is permuted.
//
// A tile is stored as rows along the contiguous axis of the matrix. Unpermuted, a column of chunks would lie in four banks
// and every fragment load would be serialised; XORing the chunk index with row bits spreads it over all of them:
//   kRows8  chunk ^ (row % 8)         eight rows of one chunk column: what ldmatrix reads
//   kRows4  chunk ^ 2 * (row % 4)     four rows of two neighbouring chunk columns: what the single-word reads of an
//                                     fp32 tile stored along N touch (fragments.cuh)
// What lies outside the matrix is filled with zeros, so that the products need no bounds and padding cannot leak in.
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

// Element offset of a row: rows are numbered over (outer, inner), so that a matrix whose rows are two axes of a tensor
// that do not merge (a slice of the sequence axis) needs no copy. kSplit = false: one stride reaches every row.
template <bool kSplit>
struct RowOffset {
  i64 outer_stride;
  i64 stride;
  int inner_rows;

  __device__ __forceinline__ i64 operator()(int row) const {
    if constexpr (kSplit) return (row / inner_rows) * outer_stride + (row % inner_rows) * stride;
    return row * stride;
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
__device__ __forceinline__ void copy_tile(unsigned char* tile, const Element* matrix, Offset row_offset, i64 column_stride,
                                          int first_row, int rows, int first_column, int columns) {
  constexpr int kPerChunk = 16 / static_cast<int>(sizeof(Element));
  static_assert(kRows * kChunks % kThreads == 0, "every thread copies the same number of chunks");
#pragma unroll
  for (int i = 0; i < kRows * kChunks / kThreads; ++i) {
    const int index = static_cast<int>(threadIdx.x) + i * kThreads;
    const int row = index / kChunks;
    const int chunk = index % kChunks;
    const int column = first_column + chunk * kPerChunk;
    int valid = first_row + row < rows ? columns - column : 0;  // elements of the chunk inside the matrix
    valid = max(0, min(valid, kPerChunk));
    // With nothing to read the address must still be a good one: the matrix's first element.
    const Element* source =
        valid > 0 ? matrix + row_offset(first_row + row) + static_cast<i64>(column) * column_stride : matrix;
    unsigned char* target = tile + chunk_offset<kSwizzle, kChunks>(row, chunk);
    if constexpr (kCopyBytes >= 4) {
      constexpr int kPerPiece = kCopyBytes / static_cast<int>(sizeof(Element));
#pragma unroll
      for (int piece = 0; piece < 16 / kCopyBytes; ++piece) {
        const int inside = max(0, min(valid - piece * kPerPiece, kPerPiece));
        const Element* from = inside > 0 ? source + piece * kPerPiece * column_stride : matrix;
        ptx::cp_async<kCopyBytes>(target + piece * kCopyBytes, from, inside * static_cast<int>(sizeof(Element)));
      }
    } else {
      *reinterpret_cast<uint4*>(target) = gather_chunk(source, column_stride, valid);
    }
  }
}

}  // namespace cki::gemm
