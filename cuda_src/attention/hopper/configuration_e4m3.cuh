// What follows from the constants that attention_e4m3.cu is compiled with (its prelude): sizes, tiles, the layout of shared
// memory, and what a consumer keeps.
//
// Tiles count pairs of elements: two of e4m3 are 16 bits, which is what shared_tiles.cuh, products.cuh and the tensor maps
// take them for.
#pragma once

#include "attention/hopper/consumer.cuh"
#include "attention/hopper/key_range.cuh"
#include "attention/hopper/scheduler.cuh"
#include "attention/hopper/shared_tiles.cuh"
#include "attention/logits.cuh"
#include "common/key_band.cuh"
#include "common/online_softmax.cuh"
#include "common/types.cuh"

namespace cki::attention {

constexpr int kGroupRows = 64;  // of one consumer warpgroup: the M of wgmma
constexpr int kBlockRows = kGroupRows * kConsumers;
constexpr int kThreads = 128 * (kConsumers + 1);

// What the logits go through besides the scale; the names are the prelude's.
struct Features {
  static constexpr bool kSoftcap = ::kSoftcap;
  static constexpr bool kAlibi = ::kAlibi;
  static constexpr bool kBias = false;
  static constexpr bool kMask = false;
  static constexpr bool kScaleFirst = ::kScaleFirst;
  static constexpr bool kLimitLeft = ::kLimitLeft;
  static constexpr int kBiasKeyStride = 0, kMaskKeyStride = 0;
  static constexpr bool kBiasPair = false, kMaskPair = false;
};
// Whether rows may see different keys, in another tile than the one that holds the last key too.
constexpr bool kHasLimits = kLimitLeft || kLimitRight;
// Whether every tile is tested key by key, as in configuration.cuh.
constexpr bool kTestAll = kHasLimits && kScaleFirst;

using Band = KeyBand<kLimitLeft, kLimitRight>;
using Range = KeyRange<kBlockKeys>;
using QueryTile = SlabTile<kGroupRows, kHeadDim / 2, kKeySpan>;
using KeyTile = SlabTile<kBlockKeys, kHeadDim / 2, kKeySpan>;
// Columns of ones beside the values: their sums are those of the weights, as they were rounded.
constexpr int kSumColumns = 8;

// Transposed values: a row a column of V, of pairs of keys.
struct ValueTile {
  static constexpr int kRows = kValueDim + kSumColumns;
  static constexpr int kSpan = 128;
  static constexpr int kSlabColumns = kSpan / 2;
  static constexpr int kSlabs = (kBlockKeys + kSpan - 1) / kSpan;
  static constexpr int kSlabBytes = kRows * kSpan;
  static constexpr int kBytes = kSlabs * kSlabBytes;
  static constexpr int kCopiedBytes = kSlabs * kValueDim * kSpan;
};
using Layout =
    SharedLayout<kConsumers, QueryTile, KeyTile, ValueTile, kStages, static_cast<int>(sizeof(WorkTile))>;
using Work = WorkSource<static_cast<Schedule>(kSchedule), kLimitRight>;

// How many tiles of keys share a sum. Eagerly one: the correction of what was there before is the same instruction as the
// addition. Lazily there is seldom a correction, and an addition for 512 keys.
constexpr int kPromotedTiles = kLazy ? 4 : 1;

// What a consumer's thread keeps of its two rows from tile to tile.
//
// The tensor core adds e4m3 products with 14 bits or so, which are too few for the sum over all keys. So the products of
// kPromotedTiles tiles have a sum of their own, `part`, which is added to the output in fp32.
//
// The weights' sums come from the tensor core too: the normaliser is of the weights that the values were multiplied by, so
// that a weight that dominates its row is right however it was rounded, and no thread adds them.
struct Rows {
  static constexpr int kSums = ValueTile::kRows / 2;
  float output[kSums];
  float part[kSums];
  bool is_fresh;                    // nothing is in `part` that the next product is to be added to
  float correction[2];              // eagerly: of the output, due with the next part
  u32 weights[kBlockKeys / 32][4];  // of the tile whose values are to be added next
  SoftmaxRow softmax[2];
  QueryRow<float> query[2];

  __device__ __forceinline__ void clear() {
#pragma unroll
    for (int i = 0; i < kSums; ++i) output[i] = 0.0f;
    correction[0] = correction[1] = 1.0f;
    is_fresh = true;
  }

  // Whether the next product is added to what is there.
  __device__ __forceinline__ bool accumulates() const { return kPromotedTiles > 1 && !is_fresh; }

  // After the product of a tile of keys, and before the next one: its sums enter the output, if they are due.
  __device__ __forceinline__ void take_product(int tile) {
    if constexpr (kPromotedTiles == 1) {
#pragma unroll
      for (int i = 0; i < kSums; ++i) output[i] = fmaf(output[i], correction[i / 2 % 2], part[i]);
    } else {
      is_fresh = tile % kPromotedTiles == 0;
      if (is_fresh) add_part();
    }
  }

  // After the last product.
  __device__ __forceinline__ void take_last_product() {
    if constexpr (kPromotedTiles > 1) {
      add_part();
    } else {
      take_product(0);
    }
  }

  // The reference of the rows moved: everything up to and with the product before goes by `moved`. Eagerly that waits for
  // the next sums; lazily it is rare, and done at once.
  __device__ __forceinline__ void correct(const float (&moved)[2]) {
    if constexpr (!kLazy) {
      correction[0] = moved[0];
      correction[1] = moved[1];
    } else {
#pragma unroll
      for (int i = 0; i < kSums; ++i) {
        output[i] *= moved[i / 2 % 2];
        part[i] *= moved[i / 2 % 2];
      }
    }
  }

  // Without the columns of ones.
  __device__ __forceinline__ auto& values() { return reinterpret_cast<float(&)[kValueDim / 2]>(output); }

  // Of row r, all of it, in each lane: what the values are to be divided by.
  __device__ __forceinline__ float sum_of_rounded(int r) const { return output[kValueDim / 2 + 2 * r]; }

 private:
  __device__ __forceinline__ void add_part() {
#pragma unroll
    for (int i = 0; i < kSums; ++i) output[i] += part[i];
  }
};

using Part = ConsumerPart<Band, kBlockKeys, kGroupRows, kConsumers>;

}  // namespace cki::attention
