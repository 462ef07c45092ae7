// Attention of fp32 tensors on Hopper (sm_90a), by wgmma on three pieces of bf16 an element (fp32_pieces.cuh).
//
//   q_map, k_map, v_map: pieces, [batch, tokens, heads, 3, dim] (split_fp32.cu); all else as in attention.cu
// The same function, prelude and arguments as attention.cu for dense tensors and packed sequences; no caches, no packed
// heads, no parts of keys.
//
// Roles as there. A product takes six times that of bf16, so products are what takes the time: a consumer's step is scores,
// softmax, values, one after the other, and the other consumer's products run beside its softmax. Keys and values share one
// ring, of which a stage is 48 KB at 64 keys and 128 columns.
//
// Tensor cores cut sums off instead of rounding them. So a tile's product of values is summed apart and added in fp32, by the
// instruction that applies the correction of the online softmax, which therefore costs nothing.
// Registers a thread: kBlockKeys / 2 scores, which become 3 kBlockKeys / 4 words of weights; kValueDim / 2 sums, as many outputs.
#include "attention/hopper/configuration.cuh"
#include "attention/hopper/drop_weights.cuh"
#include "attention/hopper/epilogue.cuh"
#include "attention/hopper/finish_logits.cuh"
#include "attention/hopper/fp32_pieces.cuh"
#include "attention/hopper/repair.cuh"
#include "attention/hopper/shared_tiles.cuh"
#include "attention/hopper/softmax.cuh"
#include "attention/logits.cuh"
#include "common/online_softmax.cuh"
#include "common/stage_ring.cuh"
#include "common/types.cuh"
#include "common/warpgroup_turns.cuh"
#include "common/wgmma_descriptor.cuh"
#include "ptx/elect.cuh"
#include "ptx/grid_dependency.cuh"
#include "ptx/mbarrier.cuh"
#include "ptx/setmaxnreg.cuh"
#include "ptx/tma.cuh"
#include "ptx/wgmma.cuh"

using namespace cki;
using namespace cki::attention;

static_assert(kPackedHeads == 1 && !kSplitKeys && !kPaged && !kDescaled, "dense tensors and packed sequences");

using QueryPieces = PieceTile<kGroupRows, kHeadDim, kKeySpan>;
using KeyPieces = PieceTile<kBlockKeys, kHeadDim, kKeySpan>;
using ValuePieces = PieceTile<kBlockKeys, kValueDim, kValueSpan>;
struct Stage {
  static constexpr int kBytes = KeyPieces::kBytes > ValuePieces::kBytes ? KeyPieces::kBytes : ValuePieces::kBytes;
};
struct NoTile {
  static constexpr int kBytes = 0;
};
using Shared = SharedLayout<kConsumers, QueryPieces, Stage, NoTile, kStages, sizeof(SequenceTile)>;
static_assert(Stage::kBytes % 1024 == 0 && QueryPieces::kBytes % 1024 == 0, "whole swizzle patterns");

extern "C" __global__ void __launch_bounds__(kThreads, kMinBlocks) attention_fp32(
    const __grid_constant__ TensorMap q_map, const __grid_constant__ TensorMap k_map,
    const __grid_constant__ TensorMap v_map, u32* counter,                                   //
    const float* __restrict__ q, const float* __restrict__ k, const float* __restrict__ v, float* out, float* lse,
    const BiasElement* __restrict__ bias, const u8* __restrict__ mask, const float* __restrict__ sinks,
    const float* __restrict__ alibi_slopes, i64 q_batch, i64 q_sequence, i64 q_head, i64 q_dim, i64 k_batch,
    i64 k_sequence, i64 k_head, i64 k_dim, i64 v_batch, i64 v_sequence, i64 v_head, i64 v_dim, i64 out_batch,
    i64 out_sequence, i64 out_head, i64 out_dim, i64 bias_batch, i64 bias_head, i64 bias_query, i64 bias_key,
    i64 mask_batch, i64 mask_head, i64 mask_query, i64 mask_key, i64 sinks_stride, i64 slopes_stride,  //
    int query_length, int key_length, int heads, int group, int head_dim, int value_dim, int dense_shift, int left,
    int right, float scale, float exponent_scale, float softcap, float softcap_rate,  //
    const QueryOffset* __restrict__ cu_seqlens_q, const KeyOffset* __restrict__ key_offsets, const TableIndex*,
    i64 q_offset_stride, i64 key_offset_stride, i64, i64, int sequences, int, int,  // caches
    const u64* __restrict__ dropout_seed, const u64* __restrict__ dropout_offset, u32 dropout_threshold,
    float dropout_factor,  //
    int row_blocks, int batch_heads, int section_heads, int last_section, int tiles,  //
    int, int, int splits, int split_keys, const float*, const float*, const float*, i64, i64, i64, i64, i64, i64) {
  extern __shared__ __align__(1024) unsigned char smem[];
  // The shuffle tells the compiler that the number, and the branches on it, are uniform in the warp.
  const int warpgroup = __shfl_sync(kFullWarp, static_cast<int>(threadIdx.x) / 128, 0);
  StageRing<kConsumers> query_ring(smem + Shared::kQueryRing);
  StageRing<kStages> ring(smem + Shared::kKeyRing);  // keys and values in turn
  const Sequences packed{
      {cu_seqlens_q, q_offset_stride, sequences, query_length, 1}, key_offsets, key_offset_stride, key_length};
  const WorkOrder order{row_blocks, heads, batch_heads, section_heads, last_section, tiles};
  auto work = [&] {
    if constexpr (kVarlen) {
      return PackedWork(packed, order, counter, smem + Shared::kWorkRing, smem + Shared::kWorkNumbers,
                        smem + Shared::kWishRing);
    } else {
      return DenseWork(order, query_length, key_length, counter, smem + Shared::kWorkRing, smem + Shared::kWorkNumbers,
                       smem + Shared::kWishRing);
    }
  }();
  const Placement placed{dense_shift, left, right, splits, split_keys};

  if (threadIdx.x == 0) {
    ptx::prefetch_tensormap(&q_map);
    ptx::prefetch_tensormap(&k_map);
    ptx::prefetch_tensormap(&v_map);
    query_ring.initialise(4);
    ring.initialise(4 * kConsumers);
    work.initialise(128 * kConsumers + 1);
    ptx::fence_mbarrier_init();
  }
  __syncthreads();
  ptx::griddepcontrol_wait();

  if (warpgroup == 0) {
    if constexpr (kProducerRegisters > 0) ptx::setmaxnreg_dec<kProducerRegisters>();
    // One thread waits and copies, another warp hands tiles over.
    const int warp = __shfl_sync(kFullWarp, static_cast<int>(threadIdx.x) / 32, 0);
    if (warp == 1) work.hand_over([](const SequenceTile&) {});
    if (warp >= 1 || !ptx::elect_one()) return;
    for (work.template begin<true>(); work.has_work(); work.template next<true>()) {
      const SequenceTile tile = work.tile;
      const Range range = Part(tile, placed.band(tile), 0).block;
      if (range.is_empty()) {
        work.wish_for_next();
        continue;
      }
      const int last = range.end_tile - 1, wish_at = min(last, range.begin_tile + 2);
      const auto load = [&](auto type, const TensorMap* map, int j) {
        ring.wait_empty();
        load_pieces<decltype(type)>(smem + Shared::kKeys + ring.stage * Stage::kBytes, map, ring.full + ring.stage,
                                    placed.first_key(tile) + j * kBlockKeys, tile.head / group, placed.batch(tile));
        ring.advance();
      };
      for (int j = last; j >= range.begin_tile; --j) {
        load(KeyPieces{}, &k_map, j);
        if (j == last) {
#pragma unroll 1
          for (int i = 0; i < kConsumers; ++i) {
            query_ring.wait_empty();
            load_pieces<QueryPieces>(smem + Shared::kQueries + i * QueryPieces::kBytes, &q_map, query_ring.full + i,
                                     tile.first_query + tile.row_block * kBlockQueries + i * kGroupRows, tile.head,
                                     placed.batch(tile));
            query_ring.advance();
          }
        }
        if (j == wish_at) work.wish_for_next();
        load(ValuePieces{}, &v_map, j);
      }
    }
    return;
  }

  if constexpr (kConsumerRegisters > 0) ptx::setmaxnreg_inc<kConsumerRegisters>();
  const int consumer = warpgroup - 1, lane = static_cast<int>(threadIdx.x) % 32;
  query_ring.stage = consumer;
  const WarpgroupTurns<kConsumers, kPingPong> turns(consumer);
  const LogitRules rules{scale, softcap, softcap_rate, bias_key, mask_key};
  const float result_factor = kDropout ? dropout_factor : 1.0f;
  Dropout dropout{};
  if constexpr (kDropout) dropout = {*dropout_seed, static_cast<u32>(*dropout_offset), dropout_threshold};
  const u64 queries_at =
      wgmma_descriptor_k_major<kKeySpan>(smem + Shared::kQueries + consumer * QueryPieces::kBytes);
  const u64 keys_at = wgmma_descriptor_k_major<kKeySpan>(smem + Shared::kKeys);
  const u64 values_at = wgmma_descriptor_mn_major<kValueSpan>(smem + Shared::kKeys, ValuePieces::kSlabBytes);
  // What comes next in the ring, in the warpgroup's turn: start(offset of the stage) starts products.
  const auto multiply = [&](auto& sums, const auto& start) {
    ring.wait_full();
    turns.take();
    ptx::wgmma_fence();
    start(ring.stage * Stage::kBytes);
    ptx::wgmma_commit_group();
    turns.pass();
    ptx::wgmma_wait_group<0>();
    ptx::wgmma_fence_registers(sums);
    ring.release();
  };
  // So many tiles of which the block needs something, but this warpgroup nothing.
  const auto pass_over = [&](int count) {
#pragma unroll 1
    for (int i = 0; i < 2 * count; ++i) {  // keys and values
      ring.wait_full();
      __syncwarp();
      ring.release();
      turns.take();
      turns.pass();
    }
  };
  const auto query_of = [&](const SequenceTile& tile, int number) {
    QueryRow<BiasElement> row{};
    const int query = row.query = min(number, tile.queries - 1);
    if constexpr (kDropout) row.dropout_row = static_cast<u32>(tile.sequence) * static_cast<u32>(heads) + tile.head;
    if constexpr (kAlibi) row.slope = alibi_slopes[tile.head * slopes_stride];
    if constexpr (kBias) row.bias = bias + tile.sequence * bias_batch + tile.head * bias_head + query * bias_query;
    if constexpr (kMask) row.mask = mask + tile.sequence * mask_batch + tile.head * mask_head + query * mask_query;
    return row;
  };

  float scores[kBlockKeys / 2], sums[kValueDim / 2], output[kValueDim / 2];
  u32 weights[kPieces][kWeightSteps][4];
  for (work.begin(); work.has_work(); work.next()) {
    const SequenceTile tile = work.tile;
    const Part part(tile, placed.band(tile), consumer);
    const Band band = part.band;
    const Range block = part.block, own = part.own;
    u32 thread[1] = {threadIdx.x % 128};
    ptx::wgmma_fence_registers(thread);  // opaque: computed here, not kept in a register through the main loop
    // Of the pair row, row + 8.
    const int row = part.first_query(consumer) + static_cast<int>(thread[0] / 32 * 16 + thread[0] % 32 / 4);
    const QueryRow<BiasElement> queries[2] = {query_of(tile, row), query_of(tile, row + 8)};
    SoftmaxRow softmax[2];
#pragma unroll
    for (int i = 0; i < kValueDim / 2; ++i) output[i] = 0.0f;
    if (!block.is_empty()) query_ring.wait_full();
    const int own_end = own.is_empty() ? block.begin_tile : own.end_tile;
    pass_over(block.end_tile - own_end);
    for (int j = own_end - 1; j >= own.begin_tile; --j) {
      multiply(scores, [&](u32 stage) {
        multiply_key_pieces<QueryPieces, KeyPieces, kHeadDim>(scores, queries_at, wgmma_descriptor_advance(keys_at, stage));
      });
      if (j == own.begin_tile) query_ring.release_own();
      if (kScaleFirst || kMask || own.passes_common_end(j) || (kLimitLeft && j < own.first_after_common_begin())) {
        finish_scores<Features, true>(scores, queries, j * kBlockKeys, band, rules);
      }
      float correction[2];
      take_tile<kHides, true>(scores, softmax, correction, exponent_scale);
      DroppedWeights<kBlockKeys>(dropout, j, queries).apply(scores);
      split_weights(weights, scores);
      multiply(sums, [&](u32 stage) {
        multiply_value_pieces<ValuePieces, kValueDim>(sums, weights, wgmma_descriptor_advance(values_at, stage));
      });
#pragma unroll
      for (int i = 0; i < kValueDim / 2; ++i) output[i] = fmaf(output[i], correction[i / 2 % 2], sums[i]);
    }
    if (own.is_empty()) {
      if (!block.is_empty()) query_ring.release_own();
    } else {
      pass_over(own.begin_tile - block.begin_tile);
    }

    // The end of the tile.
    const int result_batch = kVarlen ? 0 : tile.sequence;
    const auto origin_of = [&](i64 batch_stride, i64 head_stride, int head) {
      return result_batch * batch_stride + head * head_stride;
    };
    const auto out_of = [&](int query) {
      return out + origin_of(out_batch, out_head, tile.head) + (tile.first_query + query) * out_sequence;
    };
    float factor[2], log_sum_exp[2];
    u32 to_repair[2] = {0, 0};  // lanes whose part of the row is not finite
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      softmax[r].finish(kScaleFirst ? 1.0f : scale);
      factor[r] = sinks != nullptr ? softmax[r].take_logit(sinks[tile.head * sinks_stride]) : 1.0f;
      factor[r] *= softmax[r].normalizer() * result_factor;
      log_sum_exp[r] = softmax[r].log_sum_exp();
      const bool exists = row + 8 * r < tile.queries;
      if (lse != nullptr && lane % 4 == 0 && exists) {
        lse[(static_cast<i64>(result_batch) * heads + tile.head) * query_length + tile.first_query + row + 8 * r] =
            log_sum_exp[r];
      }
      const bool is_bad = !is_finite_row(output, r) && fabsf(log_sum_exp[r]) < positive_infinity();
      to_repair[r] = __shfl_sync(kFullWarp, __ballot_sync(kFullWarp, is_bad && exists), 0);
      if (kHides && factor[r] == 0.0f) {  // saw no key: 0, whatever the tiles held
#pragma unroll
        for (int i = 0; i < kValueDim / 2; ++i) {
          if (i / 2 % 2 == r) output[i] = 0.0f;
        }
      }
    }
    scale_rows(output, factor);
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      store_row<float, false, kPairStore>(out_of(row + 8 * r), out_dim, output, r, value_dim, row + 8 * r < tile.queries);
    }
    // Also where no key is hidden: an infinite value times the pieces of a weight, of which some are 0, is NaN.
    for_each_bad_row(to_repair, [&](int r, int lane_of_row) {
      const QueryRow<BiasElement> one = query_of(tile, __shfl_sync(kFullWarp, row, lane_of_row) + 8 * r);
      const int kv_head = tile.head / group;
      const RowOperands<float, StridedRows<float>> at{
          q + origin_of(q_batch, q_head, tile.head) + (tile.first_query + one.query) * q_sequence,
          {k + origin_of(k_batch, k_head, kv_head) + tile.first_key * k_sequence, k_sequence},
          {v + origin_of(v_batch, v_head, kv_head) + tile.first_key * v_sequence, v_sequence},
          out_of(one.query),
          out_dim};
      compute_row<Features, kValueDim>(at, head_dim, value_dim, one, band, rules,
                                       sinks != nullptr ? sinks[tile.head * sinks_stride] : negative_infinity(),
                                       DroppedKeys{dropout, one.query, one.dropout_row, result_factor});
    });
  }
  turns.finish();
}
