// fp32 numbers as sums of three bf16 numbers, and the two products of attention on such sums.
//
// x = high + middle + low to 2^-24 of x, each piece the rounding of what those before it leave, over all of fp32's range,
// which bf16 shares. Of the nine products of pieces the six largest are taken, the smallest first, so that the tensor core,
// which cuts sums off, does so mostly on small ones; what is left out is 2^-26. This takes as many cycles as 3xTF32, three
// products of half the rate, but bf16 operands may lie MN-major, as values do, and take 6 bytes an element, not 8.
//
// A tile of pieces lies in slabs of kSpan bytes a row, [slab][piece][row][kSpan], swizzled; a slab is one TMA box.
#pragma once

#include "common/types.cuh"
#include "common/wgmma_descriptor.cuh"
#include "ptx/mbarrier.cuh"
#include "ptx/tma.cuh"
#include "ptx/wgmma.cuh"

namespace cki::attention {

constexpr int kPieces = 3;
constexpr int kPieceProducts = 6;
// Which pieces a product multiplies, 0 being high: left times right.
constexpr int left_piece(int product) { return product == 0 ? 2 : product == 2 || product == 3 ? 1 : 0; }
constexpr int right_piece(int product) { return product == 1 ? 2 : product == 2 || product == 4 ? 1 : 0; }

template <int kRowCount, int kDim, int kSpanBytes>
struct PieceTile {
  static constexpr int kSpan = kSpanBytes;
  static constexpr int kSlabColumns = kSpan / 2;
  static constexpr int kSlabs = (kDim + kSlabColumns - 1) / kSlabColumns;
  static constexpr int kPieceBytes = kRowCount * kSpan;
  static constexpr int kSlabBytes = kPieces * kPieceBytes;
  static constexpr int kBytes = kSlabs * kSlabBytes;
};

// One thread: starts the copy of a tile whose first row is `row` of (head, batch), which completes on `full`. The map's third
// axis is the pieces of all heads.
template <class Tile>
__device__ __forceinline__ void load_pieces(unsigned char* tile, const TensorMap* map, u64* full, int row, int head,
                                            int batch) {
  ptx::mbarrier_arrive_expect_tx(full, Tile::kBytes);
#pragma unroll
  for (int slab = 0; slab < Tile::kSlabs; ++slab) {
    ptx::tma_load_4d(tile + slab * Tile::kSlabBytes, map, full, slab * Tile::kSlabColumns, row, kPieces * head, batch);
  }
}

// Starts scores = Q K^T over kHeadDim columns, a multiple of 16.
template <class Queries, class Keys, int kHeadDim, int kCount>
__device__ __forceinline__ void multiply_key_pieces(float (&scores)[kCount], u64 queries, u64 keys) {
  constexpr int kSlabSteps = Keys::kSlabColumns / 16;
#pragma unroll
  for (int product = 0; product < kPieceProducts; ++product) {
#pragma unroll
    for (int step = 0; step < kHeadDim / 16; ++step) {
      const int slab = step / kSlabSteps, within = step % kSlabSteps * 32;
      const u32 query = slab * Queries::kSlabBytes + left_piece(product) * Queries::kPieceBytes + within;
      const u32 key = slab * Keys::kSlabBytes + right_piece(product) * Keys::kPieceBytes + within;
      ptx::wgmma<2 * kCount, bf16>(scores, wgmma_descriptor_advance(queries, query), wgmma_descriptor_advance(keys, key),
                                   product + step != 0);
    }
  }
}

// Starts sums = P V over the keys of a tile, 16 a step.
template <class Values, int kValueDim, int kSteps, int kCount>
__device__ __forceinline__ void multiply_value_pieces(float (&sums)[kCount], const u32 (&weights)[kPieces][kSteps][4],
                                                      u64 values) {
#pragma unroll
  for (int product = 0; product < kPieceProducts; ++product) {
#pragma unroll
    for (int step = 0; step < kSteps; ++step) {
      const u32 value = right_piece(product) * Values::kPieceBytes + step * 16 * Values::kSpan;
      ptx::wgmma<kValueDim, bf16, Major::mn>(sums, weights[left_piece(product)][step],
                                             wgmma_descriptor_advance(values, value), product + step != 0);
    }
  }
}

// Weights in accumulators to the left operand of multiply_value_pieces. Cut off, not rounded: three pieces of 8 bits are
// exact too, and cutting is a byte permutation.
template <int kSteps, int kCount>
__device__ __forceinline__ void split_weights(u32 (&pieces)[kPieces][kSteps][4], const float (&weights)[kCount]) {
  const auto left_over = [](float x) { return x - __uint_as_float(__float_as_uint(x) & 0xffff0000u); };
#pragma unroll
  for (int i = 0; i < kCount / 2; ++i) {
    float first = weights[2 * i], second = weights[2 * i + 1];
#pragma unroll
    for (int piece = 0; piece < kPieces; ++piece) {
      pieces[piece][i / 4][i % 4] = __byte_perm(__float_as_uint(first), __float_as_uint(second), 0x7632);
      first = left_over(first);
      second = left_over(second);
    }
  }
}

}  // namespace cki::attention
