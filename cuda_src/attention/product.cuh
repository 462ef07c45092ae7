// The two products of attention on the tensor core: scores = Q K^T and output += P V, by mma.sync with fp32 sums.
//
// A step covers 32 bytes of the contracted axis: 16 elements of a 16-bit type (m16n8k16) or 8 of fp32 (m16n8k8 tf32). In
// both an 8x8 block that ldmatrix moves is eight rows of 16 bytes and a lane's register is the word (lane / 4, lane % 4) of
// it, so queries and keys load alike in all types.
//
// Weights go from the accumulators of the first product to the left operand of the second without leaving their lane. For 16
// bits the layouts agree. For fp32 a lane holds keys 2t and 2t+1 of a tile of eight (t = lane % 4) where the operand wants t
// and t+4; since the order of summation is free, operand index t is taken to mean key 2t and t+4 to mean key 2t+1, and the
// rows of V are read in that order.
//
// fp32 is split for 3xTF32 (split_tf32.cuh); an infinite fp32 operand gives NaN.
#pragma once

#include "attention/tile.cuh"
#include "common/convert_element.cuh"
#include "common/split_tf32.cuh"
#include "common/types.cuh"
#include "ptx/ldmatrix.cuh"
#include "ptx/mma.cuh"

namespace cki::attention {

// One operand fragment of kWords registers (4 left, 2 right), ready for multiplication.
template <class Element, int kWords>
struct Fragment {
  u32 words[kWords];
  __device__ __forceinline__ void set(int i, u32 word) { words[i] = word; }
};

template <int kWords>
struct Fragment<float, kWords> {
  u32 high[kWords], low[kWords];
  __device__ __forceinline__ void set(int i, u32 word) { split_tf32(word, high[i], low[i]); }
};

template <class Element>
using Left = Fragment<Element, 4>;
template <class Element>
using Right = Fragment<Element, 2>;

__device__ __forceinline__ void multiply_add(float (&sum)[4], const Left<f16>& a, const Right<f16>& b) {
  ptx::mma_m16n8k16_f16(sum, a.words, b.words, sum);
}
__device__ __forceinline__ void multiply_add(float (&sum)[4], const Left<bf16>& a, const Right<bf16>& b) {
  ptx::mma_m16n8k16_bf16(sum, a.words, b.words, sum);
}
__device__ __forceinline__ void multiply_add(float (&sum)[4], const Left<float>& a, const Right<float>& b) {
  ptx::mma_m16n8k8_tf32(sum, a.low, b.high, sum);
  ptx::mma_m16n8k8_tf32(sum, a.high, b.low, sum);
  ptx::mma_m16n8k8_tf32(sum, a.high, b.high, sum);
}

// The same for sums over many keys: fp32 products are summed by themselves and added in fp32, for the tensor core cuts sums
// off instead of rounding them, which over thousands of keys adds up.
template <class Element>
__device__ __forceinline__ void add_product(float (&sum)[4], const Left<Element>& a, const Right<Element>& b) {
  if constexpr (sizeof(Element) == 4) {
    float product[4] = {0.0f, 0.0f, 0.0f, 0.0f};
    multiply_add(product, a, b);
#pragma unroll
    for (int e = 0; e < 4; ++e) sum[e] = __fadd_rn(sum[e], product[e]);
  } else {
    multiply_add(sum, a, b);
  }
}

// scores[m][n] = rows [16 m, +16) of the warp's queries times keys [8 n, +8), over the whole head dimension.
// `queries` points at the warp's first row.
template <class QueryTile, class KeyTile, int kRowTiles, int kKeyTiles>
__device__ __forceinline__ void multiply_keys(float (&scores)[kRowTiles][kKeyTiles][4], const unsigned char* queries,
                                              const unsigned char* keys) {
  using Element = typename KeyTile::Element;
  const int lane = static_cast<int>(threadIdx.x) % 32;
  // ldmatrix blocks 0..3 of the left operand: rows 0-7 and 8-15 of the first 16 bytes, then of the second.
  const unsigned char* query_row = queries + lane % 16 * QueryTile::kPitch + lane / 16 * 16;
  // Of the right operand: keys 0-7, first and second 16 bytes; keys 8-15 likewise.
  const unsigned char* key_row = keys + (lane % 8 + lane / 16 * 8) * KeyTile::kPitch + lane / 8 % 2 * 16;
#pragma unroll
  for (int m = 0; m < kRowTiles; ++m) {
#pragma unroll
    for (int n = 0; n < kKeyTiles; ++n) {
#pragma unroll
      for (int e = 0; e < 4; ++e) scores[m][n][e] = 0.0f;
    }
  }
  // Four steps at a time: with all of them unrolled, the compiler loads so far ahead that it spills.
#pragma unroll 4
  for (int step = 0; step < KeyTile::kRowBytes / 32; ++step) {
    Left<Element> a[kRowTiles];
#pragma unroll
    for (int m = 0; m < kRowTiles; ++m) {
      u32 words[4];
      ptx::ldmatrix_x4(words, query_row + m * 16 * QueryTile::kPitch + step * 32);
#pragma unroll
      for (int i = 0; i < 4; ++i) a[m].set(i, words[i]);
    }
#pragma unroll
    for (int n = 0; n < kKeyTiles; n += 2) {
      u32 words[4];
      ptx::ldmatrix_x4(words, key_row + n * 8 * KeyTile::kPitch + step * 32);
      Right<Element> b[2];
#pragma unroll
      for (int i = 0; i < 4; ++i) b[i / 2].set(i % 2, words[i]);
#pragma unroll
      for (int m = 0; m < kRowTiles; ++m) {
        multiply_add(scores[m][n], a[m], b[0]);
        multiply_add(scores[m][n + 1], a[m], b[1]);
      }
    }
  }
}

// The left operand of step `step` from weights in accumulator layout.
template <class Element, int kKeyTiles>
__device__ __forceinline__ Left<Element> left_from_weights(const float (&weights)[kKeyTiles][4], int step) {
  Left<Element> a;
  if constexpr (sizeof(Element) == 2) {
    const float(&first)[4] = weights[2 * step];
    const float(&second)[4] = weights[2 * step + 1];
    a.set(0, pack_pair<Element>(first[0], first[1]));
    a.set(1, pack_pair<Element>(first[2], first[3]));
    a.set(2, pack_pair<Element>(second[0], second[1]));
    a.set(3, pack_pair<Element>(second[2], second[3]));
  } else {
    const float(&tile)[4] = weights[step];
    a.set(0, __float_as_uint(tile[0]));
    a.set(1, __float_as_uint(tile[2]));
    a.set(2, __float_as_uint(tile[1]));
    a.set(3, __float_as_uint(tile[3]));
  }
  return a;
}

// The words of the right operands of step `step` for value columns [8 n, +16): two fragments of two words.
template <class ValueTile>
__device__ __forceinline__ void load_values(u32 (&words)[4], const unsigned char* values, int step, int n) {
  const int lane = static_cast<int>(threadIdx.x) % 32;
  if constexpr (sizeof(typename ValueTile::Element) == 2) {
    const unsigned char* row = values + lane % 16 * ValueTile::kPitch + lane / 16 * 16;
    ptx::ldmatrix_x4_trans(words, row + step * 16 * ValueTile::kPitch + n * 16);
  } else {  // ldmatrix.trans exchanges 16-bit units and would tear fp32 apart
    const unsigned char* row = values + (step * 8 + lane % 4 * 2) * ValueTile::kPitch + (n * 8 + lane / 4) * 4;
#pragma unroll
    for (int i = 0; i < 4; ++i) words[i] = *reinterpret_cast<const u32*>(row + i % 2 * ValueTile::kPitch + i / 2 * 32);
  }
}

// output[m][n] += step `step` of weights[m] times value columns [8 n, +8); a[m]: that step's weights.
template <class ValueTile, int kRowTiles, int kColumnTiles>
__device__ __forceinline__ void multiply_values_of_step(float (&output)[kRowTiles][kColumnTiles][4],
                                                        const Left<typename ValueTile::Element> (&a)[kRowTiles],
                                                        const unsigned char* values, int step) {
#pragma unroll
  for (int n = 0; n < kColumnTiles; n += 2) {
    u32 words[4];
    load_values<ValueTile>(words, values, step, n);
    Right<typename ValueTile::Element> b[2];
#pragma unroll
    for (int i = 0; i < 4; ++i) b[i / 2].set(i % 2, words[i]);
#pragma unroll
    for (int m = 0; m < kRowTiles; ++m) {
      add_product(output[m][n], a[m], b[0]);
      add_product(output[m][n + 1], a[m], b[1]);
    }
  }
}

// output[m][n] += weights[m] times value columns [8 n, +8). fp32 weights are used up.
template <class ValueTile, int kRowTiles, int kKeyTiles, int kColumnTiles>
__device__ __forceinline__ void multiply_values(float (&output)[kRowTiles][kColumnTiles][4],
                                                float (&weights)[kRowTiles][kKeyTiles][4],
                                                const unsigned char* values) {
  using Element = typename ValueTile::Element;
  constexpr int kSteps = ValueTile::kRows * static_cast<int>(sizeof(Element)) / 32;
  Left<Element> a[kRowTiles];
  if constexpr (sizeof(Element) == 2) {
#pragma unroll
    for (int step = 0; step < kSteps; ++step) {
#pragma unroll
      for (int m = 0; m < kRowTiles; ++m) a[m] = left_from_weights<Element>(weights[m], step);
      multiply_values_of_step<ValueTile>(output, a, values, step);
    }
  } else {
    // Step by step, its weights moving to the front: unrolled, the compiler has products of many steps under way at
    // once and spills.
#pragma unroll 1
    for (int step = 0; step < kSteps; ++step) {
#pragma unroll
      for (int m = 0; m < kRowTiles; ++m) {
        a[m] = left_from_weights<Element>(weights[m], 0);
#pragma unroll
        for (int n = 1; n < kKeyTiles; ++n) {
#pragma unroll
          for (int e = 0; e < 4; ++e) weights[m][n - 1][e] = weights[m][n][e];
        }
      }
      multiply_values_of_step<ValueTile>(output, a, values, step);
    }
  }
}

}  // namespace cki::attention
