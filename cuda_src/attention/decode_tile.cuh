// One tile of 16 keys in the hands of one warp: the two products of decoding, with operands exchanged.
//
// Decoding has few query rows and many keys, so keys are the 16 rows of an mma.sync tile and queries its 8 columns:
// four query heads of a KV head fill half of the tensor core's tile, where the usual order would fill a quarter.
//
//   scores^T [16 keys, 8 rows]    += keys [16, dim] queries^T [dim, 8 rows]
//   output^T [16 columns, 8 rows] += values^T [16 columns, 16 keys] weights^T [16 keys, 8 rows]
//
// A lane (g = lane / 4, t = lane % 4) holds of each result the rows 2t and 2t + 1 for two keys, g and g + 8, or for
// two columns of the output (value_column). Weights are the accumulators of the first product; movmatrix makes them
// the right operand of the second.
//
// f16 and bf16 as they are; f32 by 3xTF32 (product.cuh). e4m3 becomes f16, exactly, on the way from shared memory:
// ldmatrix moves bytes as if they were 16-bit elements, so a lane gets the bytes 4t .. 4t + 3 of a chunk of 16. As the
// order of a sum is free, these stand for the elements 2t, 2t + 1, 2t + 8, 2t + 9 that the instruction means, and
// queries are loaded in the same order. Transposed, a lane gets the bytes 2g and 2g + 1 of two keys, which stand for
// the columns g and g + 8.
#pragma once

#include "attention/product.cuh"
#include "common/reduce.cuh"
#include "common/types.cuh"
#include "ptx/convert.cuh"
#include "ptx/ldmatrix.cuh"
#include "ptx/movmatrix.cuh"

namespace cki::attention {

constexpr int kTileKeys = 16;
constexpr int kTileRows = 8;

// The same value, of which the compiler does not know how it was computed: it cannot compute it again.
__device__ __forceinline__ int kept_in_register(int value) {
  return __shfl_sync(kFullWarp, value, static_cast<int>(threadIdx.x % 32));
}

// The same pointer, through which nothing can be loaded before this place, whatever is known of its memory.
template <class T>
__device__ __forceinline__ const T* kept_in_order(const T* pointer) {
  const u64 address = reinterpret_cast<u64>(pointer);
  return reinterpret_cast<const T*>(__shfl_sync(kFullWarp, address, static_cast<int>(threadIdx.x % 32)));
}

// 16 rows of keys or values in shared memory, in chunks of 16 bytes; the tile begins at a multiple of 128.
//
// Rows of 64 or 128 bytes, or a multiple, follow one another, and a row's chunks change places by an exclusive or with a
// number of the row, so that the eight rows of an ldmatrix phase lie in eight different groups of banks, and the four
// rows of fp32 values that a warp reads word by word 8 banks apart. 128 bytes of memory stay 128 aligned bytes here: a
// copy that falls on two such lines is carried out, and asks L2, in two parts. Other rows are padded by a chunk.
template <class ElementType, int kDim>
struct CacheTile {
  using Element = ElementType;
  static constexpr int kRowBytes = kDim * static_cast<int>(sizeof(Element));
  static constexpr bool kSwizzled = kRowBytes % 64 == 0;
  static constexpr int kPitch = kRowBytes + (kSwizzled ? 0 : 16);
  static constexpr int kBytes = kTileKeys * kPitch;
  static_assert(kRowBytes % 16 == 0, "whole chunks");

  // What a row's chunk numbers are changed by. swizzle(a + b) = swizzle(a) ^ swizzle(b) for a and b without common bits.
  static __device__ __forceinline__ constexpr int swizzle(int row) {
    if constexpr (!kSwizzled) return 0;
    if constexpr (kRowBytes % 128 == 0) return row % 4 * 2 + row / 4 % 2;
    return row / 2 % 4;
  }
  // The byte at which chunk `first + second` of a row begins, where second, as lanes choose it, has only bits that first,
  // known when compiling, has not.
  static __device__ __forceinline__ int offset(int row, int first, int second) {
    return row * kPitch + (first ^ (second ^ swizzle(row))) * 16;
  }

  // Those bytes for the chunks `2 pair + second` of a row, second 0 or 1, for all pairs. They are kept where there are
  // registers: found again for every tile, they were a fifth of its instructions.
  struct PairsOfRow {
    static constexpr int kWays = !kSwizzled ? 1 : kRowBytes % 128 == 0 ? 4 : 2;
    static constexpr bool kKept = kDim <= 128 || sizeof(Element) < 4;
    int of[kWays];

    __device__ __forceinline__ PairsOfRow(int row, int second) {
#pragma unroll
      for (int way = 0; way < kWays; ++way) {
        const int bytes = offset(row, way * 2, second);
        of[way] = kKept ? kept_in_register(bytes) : bytes;
      }
    }
    __device__ __forceinline__ int offset_of(int pair) const {
      return of[pair % kWays] + pair / kWays * kWays * 32;
    }
  };
};

// The type in which a cache's elements are multiplied.
template <class CacheElement>
struct ComputeType {
  using Type = CacheElement;
};
template <>
struct ComputeType<e4m3> {
  using Type = f16;
};

// The contracted elements that belong to word `i` of step `step` in lane t: the first of two, or for f32 the only one.
// Lane 0's, and how far apart the lanes' are.
template <class CacheElement>
__device__ __forceinline__ constexpr int query_element(int step, int i) {
  if constexpr (sizeof(CacheElement) == 4) return step * 8 + i * 4;
  if constexpr (sizeof(CacheElement) == 2) return step * 16 + i * 8;
  return step * 16 + i * 2;
}
template <class CacheElement>
constexpr int kQueryLaneStep = sizeof(CacheElement) == 4 ? 1 : sizeof(CacheElement) == 2 ? 2 : 4;

// The column of the output that accumulators 0, 1 (half 0) or 2, 3 (half 1) of tile m belong to.
template <class CacheElement>
__device__ __forceinline__ int value_column(int m, int half) {
  const int g = static_cast<int>(threadIdx.x % 32) / 4;
  return m * 16 + (sizeof(CacheElement) == 1 ? g * 2 + half : g + half * 8);
}

template <class Compute>
__device__ __forceinline__ Right<Compute> right_operand(const u32 (&words)[2]) {
  Right<Compute> b;
  b.set(0, words[0]);
  b.set(1, words[1]);
  return b;
}

// What ldmatrix reads for a lane: of keys, and of 8- or 16-bit values (transposed).
template <class KeyTile>
__device__ __forceinline__ typename KeyTile::PairsOfRow key_pairs() {
  const int lane = static_cast<int>(threadIdx.x % 32);
  return {lane % 16, lane / 16};
}
template <class ValueTile>
__device__ __forceinline__ typename ValueTile::PairsOfRow value_pairs() {
  const int lane = static_cast<int>(threadIdx.x % 32);
  if constexpr (sizeof(typename ValueTile::Element) == 1) return {lane % 16, lane / 16};
  return {lane % 8 + lane / 16 * 8, lane / 8 % 2};
}

// scores = keys times queries over the whole head dimension.
template <class KeyTile, int kRowTiles, int kSteps>
__device__ __forceinline__ void multiply_queries(float (&scores)[kRowTiles][4],
                                                 const u32 (&queries)[kRowTiles][kSteps][2],
                                                 const unsigned char* keys, const typename KeyTile::PairsOfRow& pairs) {
  using Compute = typename ComputeType<typename KeyTile::Element>::Type;
  // Two chains of additions instead of one, because a warp has little else to do while it waits for one.
  float sums[2][kRowTiles][4] = {};
#pragma unroll
  for (int chunk = 0; chunk < KeyTile::kRowBytes / 32; ++chunk) {
    u32 words[4];
    ptx::ldmatrix_x4(words, keys + pairs.offset_of(chunk));
    if constexpr (sizeof(typename KeyTile::Element) == 1) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        Left<Compute> a;
#pragma unroll
        for (int i = 0; i < 4; ++i)
          a.set(i, ptx::e4m3x2_to_f16x2(static_cast<u16>(words[half * 2 + i % 2] >> (i / 2 * 16))));
#pragma unroll
        for (int n = 0; n < kRowTiles; ++n)
          multiply_add(sums[half][n], a, right_operand<Compute>(queries[n][chunk * 2 + half]));
      }
    } else {
      Left<Compute> a;
#pragma unroll
      for (int i = 0; i < 4; ++i) a.set(i, words[i]);
#pragma unroll
      for (int n = 0; n < kRowTiles; ++n)
        multiply_add(sums[chunk % 2][n], a, right_operand<Compute>(queries[n][chunk]));
    }
  }
#pragma unroll
  for (int n = 0; n < kRowTiles; ++n) {
#pragma unroll
    for (int e = 0; e < 4; ++e) scores[n][e] = sums[0][n][e] + sums[1][n][e];
  }
}

// The right operand of keys [8 step, +8) (f32) or of all 16 keys (step 0) from weights in accumulator layout.
template <class Compute>
__device__ __forceinline__ Right<Compute> right_from_weights(const float (&weights)[4], int step) {
  Right<Compute> b;
  if constexpr (sizeof(Compute) == 2) {
    b.set(0, ptx::movmatrix_trans(pack_pair<Compute>(weights[0], weights[1])));
    b.set(1, ptx::movmatrix_trans(pack_pair<Compute>(weights[2], weights[3])));
  } else {  // word i of lane (g, t) is key t + 4 i, row g; its owner is lane (key, g / 2)
    const int lane = static_cast<int>(threadIdx.x % 32);
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const int owner = (lane % 4 + i * 4) * 4 + lane / 8;
      const float even = __shfl_sync(kFullWarp, weights[step * 2], owner);
      const float odd = __shfl_sync(kFullWarp, weights[step * 2 + 1], owner);
      b.set(i, __float_as_uint(lane / 4 % 2 ? odd : even));
    }
  }
  return b;
}

// output += values times weights.
template <class ValueTile, int kRowTiles, int kColumnTiles>
__device__ __forceinline__ void multiply_weights(float (&output)[kRowTiles][kColumnTiles][4],
                                                 const float (&weights)[kRowTiles][4], const unsigned char* values,
                                                 const typename ValueTile::PairsOfRow& pairs) {
  using Element = typename ValueTile::Element;
  using Compute = typename ComputeType<Element>::Type;
#pragma unroll
  for (int step = 0; step < (sizeof(Compute) == 4 ? 2 : 1); ++step) {
    Right<Compute> b[kRowTiles];
#pragma unroll
    for (int n = 0; n < kRowTiles; ++n) b[n] = right_from_weights<Compute>(weights[n], step);
    const auto add = [&](int m, const Left<Compute>& a) {
#pragma unroll
      for (int n = 0; n < kRowTiles; ++n) add_product(output[n][m], a, b[n]);
    };
    if constexpr (sizeof(Element) == 4) {
      const int lane = static_cast<int>(threadIdx.x % 32);
#pragma unroll
      for (int m = 0; m < kColumnTiles; ++m) {
        Left<Compute> a;
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          const int row = step * 8 + i / 2 * 4 + lane % 4;
          const unsigned char* chunk = values + ValueTile::offset(row, m * 4 + i % 2 * 2, lane / 16);
          a.set(i, *reinterpret_cast<const u32*>(chunk + lane / 4 % 4 * 4));
        }
        add(m, a);
      }
    } else if constexpr (sizeof(Element) == 2) {
#pragma unroll
      for (int m = 0; m < kColumnTiles; ++m) {
        Left<Compute> a;
        u32 words[4];
        ptx::ldmatrix_x4_trans(words, values + pairs.offset_of(m));
#pragma unroll
        for (int i = 0; i < 4; ++i) a.set(i, words[i]);
        add(m, a);
      }
    } else {
#pragma unroll
      for (int m = 0; m < kColumnTiles; m += 2) {
        u32 words[4];
        ptx::ldmatrix_x4_trans(words, values + pairs.offset_of(m / 2));
#pragma unroll
        for (int tile = 0; tile < 2; ++tile) {
          Left<Compute> a;
#pragma unroll
          for (int i = 0; i < 4; ++i) {  // bytes 0 and 2, or 1 and 3: one column, two keys
            const u32 word = words[tile * 2 + i / 2];
            a.set(i, ptx::e4m3x2_to_f16x2(static_cast<u16>(__byte_perm(word, 0, i % 2 ? 0x4431 : 0x4420))));
          }
          add(m + tile, a);
        }
      }
    }
  }
}

}  // namespace cki::attention
