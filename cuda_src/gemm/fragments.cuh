// Fragments of a warp's product: shared memory -> registers -> tensor core.
//
// A step covers 32 bytes of K: 16 elements of a 16-bit type (mma m16n8k16) or 8 of fp32 (mma m16n8k8 tf32). In both an
// 8x8 block that ldmatrix moves is 8 rows of 16 bytes, and a lane's 32-bit register is the word (lane / 4, lane % 4) of it:
// two neighbouring 16-bit elements or one fp32, which is what the mma of the type wants. So one set of loads serves all
// types, except for an fp32 tile stored along N: ldmatrix.trans exchanges 16-bit units and would tear the words apart,
// so there each word is read on its own.
//
// fp32 by tensor cores: 3xTF32 (split_tf32.cuh). Infinities are another matter: nonfinite.cuh.
#pragma once

#include "common/convert_element.cuh"
#include "common/split_tf32.cuh"
#include "common/types.cuh"
#include "gemm/tile_load.cuh"
#include "ptx/ldmatrix.cuh"
#include "ptx/mma.cuh"

namespace cki::gemm {

constexpr int kTileRowBytes = 128;  // K bytes of one stage: four steps
constexpr int kStepsPerStage = 4;

// How the weight's tile lies in shared memory: rows along K ([N, K], "out_in") or along N ([K, N], "in_out").
template <class Element, int kBlockN, bool kAlongN>
struct WeightTile {
  static constexpr int kStageK = kTileRowBytes / static_cast<int>(sizeof(Element));
  static constexpr int kRows = kAlongN ? kStageK : kBlockN;
  static constexpr int kChunks = kAlongN ? kBlockN * static_cast<int>(sizeof(Element)) / 16 : kTileRowBytes / 16;
  static constexpr Swizzle kSwizzle = kAlongN && sizeof(Element) == 4 ? Swizzle::kRows4 : Swizzle::kRows8;
};

// a[i]: rows [row + 16 i, +16) of the x tile, K step `step`.
template <int kTiles>
__device__ __forceinline__ void load_x(u32 (&a)[kTiles][4], const unsigned char* tile, int row, int step) {
  const int lane = static_cast<int>(threadIdx.x) % 32;
#pragma unroll
  for (int i = 0; i < kTiles; ++i) {
    const int offset = chunk_offset<Swizzle::kRows8, 8>(row + i * 16 + lane % 16, step * 2 + lane / 16);
    ptx::ldmatrix_x4(a[i], tile + offset);
  }
}

// b[j]: columns [column + 8 j, +8) of the product for j = 0, 1; K step `step`.
template <class Element, int kBlockN, bool kAlongN>
__device__ __forceinline__ void load_weight(u32 (&b)[2][2], const unsigned char* tile, int column, int step) {
  using Tile = WeightTile<Element, kBlockN, kAlongN>;
  const int lane = static_cast<int>(threadIdx.x) % 32;
  if constexpr (kAlongN && sizeof(Element) == 4) {
#pragma unroll
    for (int j = 0; j < 2; ++j) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const int k = step * 8 + half * 4 + lane % 4;
        const int n = column + j * 8 + lane / 4;
        const int offset = chunk_offset<Tile::kSwizzle, Tile::kChunks>(k, n / 4) + n % 4 * 4;
        b[j][half] = *reinterpret_cast<const u32*>(tile + offset);
      }
    }
  } else {
    u32 words[4];
    if constexpr (kAlongN) {
      const int offset = chunk_offset<Tile::kSwizzle, Tile::kChunks>(step * 16 + lane % 16, column / 8 + lane / 16);
      ptx::ldmatrix_x4_trans(words, tile + offset);
    } else {
      const int n = column + lane / 16 * 8 + lane % 8;
      ptx::ldmatrix_x4(words, tile + chunk_offset<Tile::kSwizzle, Tile::kChunks>(n, step * 2 + lane / 8 % 2));
    }
    b[0][0] = words[0];
    b[0][1] = words[1];
    b[1][0] = words[2];
    b[1][1] = words[3];
  }
}

__device__ __forceinline__ void multiply(float (&sum)[4], const u32 (&a)[4], const u32 (&b)[2], ElementTag<f16>) {
  ptx::mma_m16n8k16_f16(sum, a, b, sum);
}
__device__ __forceinline__ void multiply(float (&sum)[4], const u32 (&a)[4], const u32 (&b)[2], ElementTag<bf16>) {
  ptx::mma_m16n8k16_bf16(sum, a, b, sum);
}

// sum[i][first + j] += a[i] b[j] for j = 0, 1: one K step of 16-bit elements.
template <class Element, int kTilesM, int kTilesN>
__device__ __forceinline__ void add_products(float (&sum)[kTilesM][kTilesN][4], int first, const u32 (&a)[kTilesM][4],
                                             const u32 (&b)[2][2], ElementTag<Element> type) {
#pragma unroll
  for (int i = 0; i < kTilesM; ++i) {
    multiply(sum[i][first], a[i], b[0], type);
    multiply(sum[i][first + 1], a[i], b[1], type);
  }
}

template <int N>
__device__ __forceinline__ void split_words(const u32 (&x)[N], u32 (&high)[N], u32 (&low)[N]) {
#pragma unroll
  for (int i = 0; i < N; ++i) split_tf32(x[i], high[i], low[i]);
}

// The same for fp32: three products, the smallest first.
template <int kTilesM, int kTilesN>
__device__ __forceinline__ void add_products(float (&sum)[kTilesM][kTilesN][4], int first, const u32 (&a)[kTilesM][4],
                                             const u32 (&b)[2][2], ElementTag<float>) {
  u32 a_high[kTilesM][4], a_low[kTilesM][4], b_high[2][2], b_low[2][2];
#pragma unroll
  for (int j = 0; j < 2; ++j) split_words(b[j], b_high[j], b_low[j]);
#pragma unroll
  for (int i = 0; i < kTilesM; ++i) split_words(a[i], a_high[i], a_low[i]);
  // All tiles within each of the three: products that add to the same sum stand apart.
#pragma unroll
  for (int i = 0; i < 2 * kTilesM; ++i) {
    float(&tile)[4] = sum[i / 2][first + i % 2];
    ptx::mma_m16n8k8_tf32(tile, a_low[i / 2], b_high[i % 2], tile);
  }
#pragma unroll
  for (int i = 0; i < 2 * kTilesM; ++i) {
    float(&tile)[4] = sum[i / 2][first + i % 2];
    ptx::mma_m16n8k8_tf32(tile, a_high[i / 2], b_low[i % 2], tile);
  }
#pragma unroll
  for (int i = 0; i < 2 * kTilesM; ++i) {
    float(&tile)[4] = sum[i / 2][first + i % 2];
    ptx::mma_m16n8k8_tf32(tile, a_high[i / 2], b_high[i % 2], tile);
  }
}

}  // namespace cki::gemm
