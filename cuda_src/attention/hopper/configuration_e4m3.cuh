// What follows from the constants that attention_e4m3.cu is compiled with (its prelude): sizes, tiles, the layout of shared
// memory, and what a consumer keeps.
//
// Tiles count pairs of elements: two of e4m3 are 16 bits, which is what shared_tiles.cuh, products.cuh and the tensor maps
// take them for.
#pragma once

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

// A compile-time choice as an argument of a lambda.
template <bool kChoice>
struct Constant {
  static constexpr bool kValue = kChoice;
};

using Band = KeyBand<kLimitLeft, kLimitRight>;
using Range = KeyRange<kBlockKeys>;
using QueryTile = SlabTile<kGroupRows, kHeadDim / 2, kKeySpan>;
using KeyTile = SlabTile<kBlockKeys, kHeadDim / 2, kKeySpan>;
using ValueTile = SlabTile<kValueDim, kBlockKeys / 2, 128>;
using Layout =
    SharedLayout<kConsumers, QueryTile, KeyTile, ValueTile, kStages, static_cast<int>(sizeof(WorkTile))>;
using Work = WorkSource<static_cast<Schedule>(kSchedule), kLimitRight>;

// What a consumer's thread keeps of its two rows from tile to tile.
//
// The tensor core adds e4m3 products with 14 bits or so, which are too few for the sum over all keys. With kPromote a tile's
// product is a sum of its own, `part`, added to the output in fp32; the correction of what was there before is the same
// instruction. Wide outputs leave no registers for that, and accumulate in the tensor core.
struct Rows {
  float output[kValueDim / 2];
  float part[kPromote ? kValueDim / 2 : 1];
  float correction[2];              // of the output, due with the next part
  u32 weights[kBlockKeys / 32][4];  // of the tile whose values are to be added next
  SoftmaxRow softmax[2];
  QueryRow<float> query[2];

  __device__ __forceinline__ void clear() {
#pragma unroll
    for (int i = 0; i < kValueDim / 2; ++i) output[i] = 0.0f;
    correction[0] = correction[1] = 1.0f;
  }

  // The accumulators of the product in flight.
  __device__ __forceinline__ auto& product() {
    if constexpr (kPromote) {
      return part;
    } else {
      return output;
    }
  }

  // After the product, and before the next one: its sums enter the output.
  __device__ __forceinline__ void take_product() {
    if constexpr (kPromote) {
#pragma unroll
      for (int i = 0; i < kValueDim / 2; ++i) output[i] = fmaf(output[i], correction[i / 2 % 2], part[i]);
    }
  }

  // The reference of the rows moved: everything up to and with the product before goes by `moved`.
  __device__ __forceinline__ void correct(const float (&moved)[2]) {
    if constexpr (kPromote) {
      correction[0] = moved[0];
      correction[1] = moved[1];
    } else {
#pragma unroll
      for (int i = 0; i < kValueDim / 2; ++i) output[i] *= moved[i / 2 % 2];
    }
  }
};

// What a consumer works on: a tile, and the keys that its block and its own rows see.
struct Part {
  SequenceTile tile;
  Band band;
  Range block;
  Range own;

  __device__ __forceinline__ Part(const SequenceTile& tile, const Band& band, int consumer)
      : tile(tile),
        band(band),
        block(band, tile.row_block * kBlockRows, min((tile.row_block + 1) * kBlockRows, tile.queries)),
        own(band, first_row(consumer), min(first_row(consumer) + kGroupRows, tile.queries)) {}

  __device__ __forceinline__ int first_row(int consumer) const {
    return tile.row_block * kBlockRows + consumer * kGroupRows;
  }
  // Whether the block's last tile of keys is the consumer's too.
  __device__ __forceinline__ bool ends_with_block() const {
    return !own.is_empty() && own.begin_tile == block.begin_tile;
  }
};

}  // namespace cki::attention
