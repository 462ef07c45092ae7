// What 128 threads make of a stage of fp32 elements in shared memory: its high and its low parts, for 3xTF32 (linear_fp32.cu).
//
// Rows of 128 bytes, 32 elements, swizzled by 128 bytes.
#pragma once

#include "common/swizzle.cuh"
#include "common/types.cuh"
#include "ptx/barrier.cuh"

namespace cki::gemm {

constexpr int kSplitters = 128;
constexpr int kSplittersBarrier = 1;  // of their own

// As split_tf32 (common/split_tf32.cuh), in 4 instructions instead of 10: on their way past the tensor core's sums every
// one costs. high is rounded as an integer, which takes some NaN to zero, but then low is one; low, of 12 bits and a sign, is
// cut off to 11, a loss of 2^-23 of the element.
__device__ __forceinline__ void split(u32 word, u32& high, u32& low) {
  constexpr u32 kKept = 0xffffe000u;
  high = (word + 0x1000u) & kKept;
  low = __float_as_uint(__uint_as_float(word) - __uint_as_float(high)) & kKept;
}

// Part by part of four neighbours.
__device__ __forceinline__ void split_four(const u32 (&words)[4], uint4& high, uint4& low) {
  split(words[0], high.x, low.x);
  split(words[1], high.y, low.y);
  split(words[2], high.z, low.z);
  split(words[3], high.w, low.w);
}

// `elements` become their high parts; the low ones go to the same places of `low`.
template <int kBytes>
__device__ __forceinline__ void split_along_k(unsigned char* elements, unsigned char* low) {
  const int thread = static_cast<int>(threadIdx.x) % kSplitters;
  constexpr int kStep = kSplitters * 16, kAll = kBytes / kStep;
  uint4 four[kAll];
#pragma unroll
  for (int i = 0; i < kAll; ++i) four[i] = *reinterpret_cast<const uint4*>(elements + thread * 16 + i * kStep);
#pragma unroll
  for (int i = 0; i < kAll; ++i) {
    const u32 words[4] = {four[i].x, four[i].y, four[i].z, four[i].w};
    uint4 high_part, low_part;
    split_four(words, high_part, low_part);
    *reinterpret_cast<uint4*>(elements + thread * 16 + i * kStep) = high_part;
    *reinterpret_cast<uint4*>(low + thread * 16 + i * kStep) = low_part;
  }
}

// `low` holds 32 rows of K of 128 columns, in slabs of 32 columns. Both parts are stored K-major: 128 rows of columns.
//
// A thread takes two blocks of 4 x 4. Eight neighbouring threads, whose 16 bytes are one access, take eight places along K and
// four along the columns, each twice: so both what they read and what they write lies in different banks.
__device__ __forceinline__ void split_along_n(unsigned char* high, unsigned char* low) {
  constexpr int kSpan = 128, kSlabBytes = 32 * kSpan;
  const int thread = static_cast<int>(threadIdx.x) % kSplitters;
  const int k_place = thread % 8;
  u32 words[2][4][4];  // of a block: rows of K
  const auto column_place = [&](int block) {
    const int at = thread / 8 + block * 16;
    return (at & ~3) | ((at + k_place / 2) & 3);
  };
#pragma unroll
  for (int block = 0; block < 2; ++block) {
    const int place = column_place(block);
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const u32 at = static_cast<u32>((k_place * 4 + i) * kSpan + place % 8 * 16);
      const uint4 four = *reinterpret_cast<const uint4*>(low + place / 8 * kSlabBytes + swizzle<kSpan>(at));
      words[block][i][0] = four.x, words[block][i][1] = four.y, words[block][i][2] = four.z, words[block][i][3] = four.w;
    }
  }
  ptx::bar_sync(kSplittersBarrier, kSplitters);  // all have taken theirs: low parts may go there
#pragma unroll
  for (int block = 0; block < 2; ++block) {
    const int place = column_place(block);
#pragma unroll
    for (int column = 0; column < 4; ++column) {
      const u32 along_k[4] = {words[block][0][column], words[block][1][column], words[block][2][column],
                              words[block][3][column]};
      uint4 high_part, low_part;
      split_four(along_k, high_part, low_part);
      const u32 at = swizzle<kSpan>(static_cast<u32>((place * 4 + column) * kSpan + k_place * 16));
      *reinterpret_cast<uint4*>(high + at) = high_part;
      *reinterpret_cast<uint4*>(low + at) = low_part;
    }
  }
}

}  // namespace cki::gemm
