// What follows from the constants that attention.cu is compiled with (its prelude): sizes, tiles, the layout of shared
// memory, and what a consumer keeps.
//
// Packed sequences: row blocks begin at their sequence's first token, and so do tiles of keys. A tile that reaches past the
// sequence's end holds the next one's rows, hidden keys like any other. A cache's blocks come as TMA boxes, those past the
// end as zeros; its unused slots may hold anything, so the producer zeroes their values before it hands them over.
//
// Few queries (kPackedHeads > 1): all or some query heads of a KV head are rows of one tile, so keys are read once for them.
// kSplitKeys: `splits` parts of split_keys keys each are batches of their own, [batch, part], whose results are fp32 and are
// merged by the launch after this one (kv/merge_states.cu).
// kDescaled: Element f16 holds codes of e4m3, whose descales go into the scale and the end.
#pragma once

#include "attention/hopper/checked_softmax.cuh"
#include "attention/hopper/consumer.cuh"
#include "attention/hopper/key_range.cuh"
#include "attention/hopper/packed_work.cuh"
#include "attention/hopper/scheduler.cuh"
#include "attention/hopper/shared_tiles.cuh"
#include "attention/hopper/softmax.cuh"
#include "attention/logits.cuh"
#include "attention/paged_tile.cuh"
#include "common/key_band.cuh"
#include "common/online_softmax.cuh"
#include "common/types.cuh"
#include "ptx/wgmma.cuh"

namespace cki::attention {

constexpr int kGroupRows = 64;  // of one consumer warpgroup: the M of wgmma
// Packed heads: query heads of one KV head that share a tile, so that few queries fill its rows. A row is then one head of a
// query, all heads of a query one after the other: row / kPackedHeads is the query, row % kPackedHeads the head.
constexpr int kGroupQueries = kGroupRows / kPackedHeads;  // of a consumer warpgroup; rows may be left over
constexpr int kBlockQueries = kGroupQueries * kConsumers;
constexpr int kUsedRows = kGroupQueries * kPackedHeads;
constexpr int kThreads = 128 * (kConsumers + 1);
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
// Whether every tile is tested key by key: beside a bias, a mask or the like the tests cost little, and loops of their own
// for whole tiles cost registers.
constexpr bool kTestAll = kHasLimits && (kScaleFirst || kMask);

constexpr int kWeightSteps = kBlockKeys / 16;  // products of a tile of values
// Where a warpgroup sees no more than the first half of its last tile of keys, it computes no more: half of the causal
// warpgroups on the diagonal, and half of all sequences of any length.
constexpr int kNarrowSteps = (kWeightSteps + 1) / 2, kNarrowKeys = 16 * kNarrowSteps;
constexpr bool kHasNarrow = kWeightSteps > 1;

static_assert(4 <= kBeforeValues && kAhead <= kBeforeValues && kBeforeValues <= kBlockKeys / 2, "weights in three parts");
static_assert(!kVarlen || !(kBias || kMask), "bias and mask have no packed form");
static_assert(!kSplitKeys || !(kVarlen || kDropout), "parts of keys are of dense tensors, and their keys count from 0");
static_assert(kVarlen || !kPaged, "paged keys belong to packed queries");

// Whether logits are products of queries and keys and nothing else.
constexpr bool kIsPlain = !(kSoftcap || kAlibi || kBias || kMask || kScaleFirst || kDropout);
// The softmax of all tiles of keys but a row block's first. kBandTest: some rows do not see all of the tile. The same rule for
// all tiles, since it depends on a row's neighbours whether they are tested.
template <bool kBandTest, bool kIsChecked = kIsPlain>
struct SoftmaxOf {
  using Type = LazySoftmax<kBandTest || kBias || kMask, kScaleFirst, kAhead, kBlockKeys / 2>;
};
template <bool kBandTest>
struct SoftmaxOf<kBandTest, true> {
  using Type = CheckedSoftmax<kBandTest, kBlockKeys / 2>;
};

using Band = KeyBand<kLimitLeft, kLimitRight>;
using Range = KeyRange<kBlockKeys>;
using QueryTile = SlabTile<kGroupRows, kHeadDim, kKeySpan>;
using KeyTile = SlabTile<kBlockKeys, kHeadDim, kKeySpan>;
using ValueTile = SlabTile<kBlockKeys, kValueDim, kValueSpan>;
using Layout = SharedLayout<kConsumers, QueryTile, KeyTile, ValueTile, kStages,
                            static_cast<int>(kVarlen ? sizeof(SequenceTile) : sizeof(WorkTile))>;
// Of keys and values in a cache.
using Boxes = TileBoxes<TableIndex, kBlockKeys / kBoxKeys, kBoxKeys, kWholeBlocks, kUnitColumns>;
using DenseWork = WorkSource<static_cast<Schedule>(kSchedule), kLimitRight>;
using Sequences = SequenceList<kBlockQueries, kPaged, QueryOffset, KeyOffset>;
using PackedWork = PackedWorkSource<static_cast<Schedule>(kSchedule), kLimitRight, Sequences>;

// What a consumer's thread keeps of its two rows from tile to tile.
struct Rows {
  float output[kValueDim / 2];
  u32 weights[kWeightSteps][4];  // of the tile whose values are to be added next
  bool is_narrow = false;        // whether only the first kNarrowSteps of them are to be
  SoftmaxRow softmax[2];
  QueryRow<BiasElement> query[2];

  // Ends the product that adds to the output.
  __device__ __forceinline__ void wait_for_output() {
    ptx::wgmma_wait_group<0>();
    ptx::wgmma_fence_registers(output);
  }
  __device__ __forceinline__ void rescale(const float (&correction)[2]) {
    wait_for_output();
    scale_rows(output, correction);
  }
  __device__ __forceinline__ void clear() {
#pragma unroll
    for (int i = 0; i < kValueDim / 2; ++i) output[i] = 0.0f;
  }
};

// Where a tile's queries and keys are. Dense tensors: a sequence is a batch, or with kSplitKeys a part of a batch's keys, and
// all are alike. Packed sequences are a batch of one, in which each begins somewhere.
struct Placement {
  int dense_shift;
  int left;
  int right;
  int splits;
  int split_keys;

  __device__ __forceinline__ int batch(const SequenceTile& tile) const {
    return kVarlen ? 0 : kSplitKeys ? tile.sequence / splits : tile.sequence;
  }
  __device__ __forceinline__ int part(const SequenceTile& tile) const { return kSplitKeys ? tile.sequence % splits : 0; }
  __device__ __forceinline__ int first_key(const SequenceTile& tile) const {
    return kSplitKeys ? part(tile) * split_keys : tile.first_key;
  }
  __device__ __forceinline__ int first_head(const SequenceTile& tile) const { return tile.head * kPackedHeads; }
  // What the rows see of the tile's own keys.
  __device__ __forceinline__ Band band(const SequenceTile& tile) const {
    if constexpr (kSplitKeys) {
      return {min(tile.keys - first_key(tile), split_keys), dense_shift - first_key(tile), left, right};
    } else {
      return {tile.keys, kVarlen ? (kBottomRight ? tile.keys - tile.queries : 0) : dense_shift, left, right};
    }
  }
};

using Part = ConsumerPart<Band, kBlockKeys, kGroupQueries, kConsumers>;

}  // namespace cki::attention
