// What follows from the constants that attention.cu is compiled with (its prelude): sizes, tiles, the layout of shared
// memory, and what a consumer keeps.
#pragma once

#include "attention/hopper/key_range.cuh"
#include "attention/hopper/packed_work.cuh"
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
// Of the producer's warpgroup: one copies, in a cache two, and one hands tiles over.
constexpr int kCopyWarps = kPaged ? 2 : 1;

// What the logits go through besides the scale; the names are the prelude's.
struct Features {
  static constexpr bool kSoftcap = ::kSoftcap;
  static constexpr bool kAlibi = ::kAlibi;
  static constexpr bool kBias = ::kBias;
  static constexpr bool kMask = ::kMask;
  static constexpr bool kScaleFirst = ::kScaleFirst;
  static constexpr bool kLimitLeft = ::kLimitLeft;
  static constexpr int kBiasKeyStride = ::kBiasKeyStride, kMaskKeyStride = ::kMaskKeyStride;
  static constexpr bool kBiasPair = ::kBiasPair, kMaskPair = ::kMaskPair;
};
// Whether a key that exists may be hidden from a row; the next sequence's keys are.
constexpr bool kHides = kVarlen || kLimitLeft || kLimitRight || kBias || kMask || kDropout;
// Whether the rows of a warpgroup may see different keys in another tile than the one that holds the last key.
constexpr bool kHasLimits = kLimitLeft || kLimitRight;
// Order of a step's softmax. Wide outputs take many instructions to rescale: row by row, the first row's run beside the
// second row's exponentials. With a bias, a mask or the like that order spills.
constexpr bool kRowByRow = kValueDim > 128 && !kScaleFirst && !kMask;
// Whether references of the softmax follow scores lazily (softmax.cuh). Weights that are to be dropped are drawn meanwhile, for
// which the registers of weights ahead are needed.
constexpr bool kIsLazy = kLazy && !kDropout;
// Whether a step finds its keys waited for, by the step before.
constexpr bool kWaitsEarly = kIsLazy && kEarlyWait;

// Whether every tile is tested key by key: beside a bias, a mask or the like the tests cost little, and loops of their own
// for whole tiles cost registers.
constexpr bool kTestAll = kHasLimits && (kScaleFirst || kMask);

constexpr int kWeightSteps = kBlockKeys / 16;  // products of a tile of values
// Whether a warpgroup's last tile of keys may be half a tile, which halves its products and its softmax. Causal: half of the
// warpgroups see half of the tile on the diagonal.
constexpr bool kHalves = kHalfTiles && !kVarlen && kWeightSteps % 2 == 0;

// Whether a tile's first scores are computed beside the last product and the stores of the tile before.
constexpr bool kOverlapTiles = kOverlap && !kVarlen;

static_assert(!kVarlen || !(kBias || kMask), "bias and mask have no packed form");
static_assert(kVarlen || !kPaged, "paged keys belong to packed queries");

// A compile-time choice as an argument of a lambda.
template <auto kChoice>
struct Constant {
  static constexpr auto kValue = kChoice;
};

using Band = KeyBand<kLimitLeft, kLimitRight>;
using Range = KeyRange<kBlockKeys>;
using QueryTile = SlabTile<kGroupRows, kHeadDim, kKeySpan>;
using KeyTile = SlabTile<kBlockKeys, kHeadDim, kKeySpan>;
using ValueTile = SlabTile<kBlockKeys, kValueDim, kValueSpan>;
using Layout = SharedLayout<kConsumers, QueryTile, KeyTile, ValueTile, kStages,
                            static_cast<int>(kVarlen ? sizeof(SequenceTile) : sizeof(WorkTile))>;
using DenseWork = WorkSource<static_cast<Schedule>(kSchedule), kLimitRight>;
using Sequences = SequenceList<kBlockRows, kPaged, QueryOffset, KeyOffset>;
using PackedWork = PackedWorkSource<static_cast<Schedule>(kSchedule), kLimitRight, Sequences>;

// What a consumer's thread keeps of its two rows from tile to tile.
struct Rows {
  float output[kValueDim / 2];
  u32 weights[kWeightSteps][4];  // of the tile whose values are to be added next
  bool is_half = false;          // whether only half of them are to be
  SoftmaxRow softmax[2];
  QueryRow<BiasElement> query[2];

  __device__ __forceinline__ void clear() {
#pragma unroll
    for (int i = 0; i < kValueDim / 2; ++i) output[i] = 0.0f;
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
  // Whether its rows see no more than half of the tile of keys.
  __device__ __forceinline__ bool ends_with_half(int tile) const { return own.end - tile * kBlockKeys <= kBlockKeys / 2; }
  // Whether the block's first tile of keys, counted from the end, is the consumer's too.
  __device__ __forceinline__ bool begins_with_block() const { return !own.is_empty() && own.end_tile == block.end_tile; }
  // Whether the block's last tile of keys is the consumer's too.
  __device__ __forceinline__ bool ends_with_block() const {
    return !own.is_empty() && own.begin_tile == block.begin_tile;
  }
};

}  // namespace cki::attention
