// Attention on Hopper (sm_90a): softmax(scale Q K^T + ...) V by wgmma, operands brought by TMA.
//
//   q [batch, queries, heads, head_dim]    k [batch, keys, kv_heads, head_dim]    v [batch, keys, kv_heads, value_dim]
//   out [batch, queries, heads, value_dim] lse [batch, heads, queries] fp32, natural logarithm, row-major, may be null
// f16 or bf16. The same function as attention/attention.cu: rules for logits, group, kVarlen and kPaged.
//
// Roles (FlashAttention-3: Shah et al., arXiv 2407.08608). Warpgroup 0 is the producer: one thread keeps TMA copies of Q, K
// and V in flight through rings of stages, and the other registers go to the consumers (setmaxnreg). Each consumer
// warpgroup owns 64 query rows; all share the tiles of K and V, which are walked from the last key to the first.
//
// A consumer's step on tile j starts S = Q K_j^T and O += P V_{j+1} together, computes the softmax of S while the second
// product runs, and packs the new weights P when it has ended: the tensor core works during the exponentials. With
// kPingPong the warpgroups take turns at starting products (named barriers), so that one's softmax runs beside
// another's products.
// Registers a thread: S kBlockKeys/2, P kBlockKeys/4, O kValueDim/2. configuration.cuh says what the kinds of keys are.
#include "attention/hopper/configuration.cuh"
#include "attention/hopper/descales.cuh"
#include "attention/hopper/drop_weights.cuh"
#include "attention/hopper/epilogue.cuh"
#include "attention/hopper/finish_logits.cuh"
#include "attention/hopper/products.cuh"
#include "attention/hopper/repair.cuh"
#include "attention/hopper/scores_again.cuh"
#include "attention/hopper/shared_tiles.cuh"
#include "attention/hopper/softmax.cuh"
#include "attention/logits.cuh"
#include "attention/paged_tile.cuh"
#include "common/constant.cuh"
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

extern "C" __global__ void __launch_bounds__(kThreads, kMinBlocks) attention_hopper(
    const __grid_constant__ TensorMap q_map, const __grid_constant__ TensorMap k_map,
    const __grid_constant__ TensorMap v_map, u32* counter,                                   //
    const Element* __restrict__ q, const Element* __restrict__ k, const Element* __restrict__ v, Result* out,
    float* lse, const BiasElement* __restrict__ bias, const u8* __restrict__ mask, const float* __restrict__ sinks,
    const float* __restrict__ alibi_slopes, i64 q_batch, i64 q_sequence, i64 q_head, i64 q_dim, i64 k_batch,
    i64 k_sequence, i64 k_head, i64 k_dim, i64 v_batch, i64 v_sequence, i64 v_head, i64 v_dim, i64 out_batch,
    i64 out_sequence, i64 out_head, i64 out_dim, i64 bias_batch, i64 bias_head, i64 bias_query, i64 bias_key,
    i64 mask_batch, i64 mask_head, i64 mask_query, i64 mask_key, i64 sinks_stride, i64 slopes_stride,  //
    int query_length, int key_length, int heads, int group, int head_dim, int value_dim, int dense_shift, int left,
    int right, float scale, float exponent_scale, float softcap, float softcap_rate,  //
    const QueryOffset* __restrict__ cu_seqlens_q, const KeyOffset* __restrict__ key_offsets,
    const TableIndex* __restrict__ block_table, i64 q_offset_stride, i64 key_offset_stride, i64 table_batch,
    i64 table_column, int sequences, int blocks, int block_size, const u64* __restrict__ dropout_seed,
    const u64* __restrict__ dropout_offset, u32 dropout_threshold, float dropout_factor,  //
    int row_blocks, int batch_heads, int section_heads, int last_section, int tiles,  //
    int last_key_batch, int last_value_batch, int splits, int split_keys,  //
    const float* q_descale, const float* k_descale, const float* v_descale, i64 q_descale_batch, i64 q_descale_head,
    i64 k_descale_batch, i64 k_descale_head, i64 v_descale_batch, i64 v_descale_head) {
  extern __shared__ __align__(1024) unsigned char smem[];
  // The shuffle tells the compiler that the number, and the branches on it, are uniform in the warp.
  const int warpgroup = __shfl_sync(kFullWarp, static_cast<int>(threadIdx.x) / 128, 0);

  StageRing<kConsumers> query_ring(smem + Layout::kQueryRing);  // a stage for each consumer
  StageRing<kStages> key_ring(smem + Layout::kKeyRing), value_ring(smem + Layout::kValueRing);
  u64* const tails = reinterpret_cast<u64*>(smem + Layout::kTails);
  const Sequences packed{
      {cu_seqlens_q, q_offset_stride, sequences, query_length, 1}, key_offsets, key_offset_stride, key_length};
  const WorkOrder order{row_blocks, heads / kPackedHeads, batch_heads, section_heads, last_section, tiles};
  auto work = [&] {
    if constexpr (kVarlen) {
      return PackedWork(packed, order, counter, smem + Layout::kWorkRing, smem + Layout::kWorkNumbers,
                        smem + Layout::kWishRing);
    } else {
      return DenseWork(order, query_length, key_length, counter, smem + Layout::kWorkRing, smem + Layout::kWorkNumbers,
                       smem + Layout::kWishRing);
    }
  }();
  const Placement placed{dense_shift, left, right, splits, split_keys};
  const auto table_row_of = [&](const SequenceTile& tile) {
    return BlockRow<TableIndex>{block_table + tile.sequence * table_batch, table_column, blocks, block_size};
  };

  if (threadIdx.x == 0) {
    ptx::prefetch_tensormap(&q_map);
    ptx::prefetch_tensormap(&k_map);
    ptx::prefetch_tensormap(&v_map);
    query_ring.initialise(4);
    key_ring.initialise(4 * kConsumers);
    value_ring.initialise(4 * kConsumers);
    work.initialise(128 * kConsumers + kCopyWarps);
    if constexpr (kPaged) {
      for (int stage = 0; stage < kStages; ++stage) ptx::mbarrier_init(tails + stage, 1);
    }
    ptx::fence_mbarrier_init();
  }
  if constexpr (kUsedRows < kGroupRows) {  // rows of no query: nobody writes them, and what they give is not stored
    if (threadIdx.x / 32 < kConsumers) {
      clear_rows<QueryTile>(smem + Layout::kQueries + threadIdx.x / 32 * QueryTile::kBytes, kUsedRows, kGroupRows);
    }
  }
  __syncthreads();
  ptx::griddepcontrol_wait();

  if (warpgroup == 0) {
    if constexpr (kProducerRegisters > 0) ptx::setmaxnreg_dec<kProducerRegisters>();
    // One thread waits and copies, another warp hands tiles over; kCopyWarps 2: a thread of another warp brings the values.
    // Beside a warp whose lanes find a cache's boxes together, consumers took 6 % more cycles a step.
    const int warp = __shfl_sync(kFullWarp, static_cast<int>(threadIdx.x) / 32, 0);
    const auto range_of = [&](const SequenceTile& tile) { return Part(tile, placed.band(tile), 0).block; };
    // The tile that ends in a block with unused slots, or none.
    const auto cleared_tile_of = [&](const SequenceTile& tile) {
      return kPaged && tile.keys % block_size != 0 ? tile.keys / kBlockKeys : -1;
    };
    if (warp == kCopyWarps) {
      // Of a cache it also zeroes the values of unused slots when they have come, and hands these over to the consumers.
      u32 phases = 0;  // of tails
      work.hand_over([&](const SequenceTile& tile) {
        if constexpr (kPaged) {
          const Range range = range_of(tile);
          if (range.is_empty()) return;
          if (range.end_tile - 1 == cleared_tile_of(tile)) {
            const int stage = value_ring.stage, first = tile.keys % kBlockKeys;
            ptx::mbarrier_wait_parity(tails + stage, phases >> stage & 1);
            phases ^= 1u << stage;
            clear_rows<ValueTile>(smem + Layout::kValues + stage * ValueTile::kBytes, first,
                                  min(kBlockKeys, first + block_size - tile.keys % block_size));
            if (threadIdx.x % 32 == 0) ptx::mbarrier_arrive(value_ring.full + stage);
          }
          value_ring.stage = (value_ring.stage + range.end_tile - range.begin_tile) % kStages;
        }
      });
    }
    if (warp >= kCopyWarps || !ptx::elect_one()) return;
    // Of a cache: looked up when the tile before is on its way, which hides the latency.
    const auto find_boxes = [&](const SequenceTile& tile, const Range& range, int j) {
      Boxes boxes{};
      if constexpr (kPaged) {
        if (j >= range.begin_tile) boxes.find(table_row_of(tile), j * kBlockKeys, tile.keys);
      }
      return boxes;
    };
    // Waits for room in a ring, then copies a tile of keys or values there. Whatever a copy needs is ready before that wait:
    // consumers may be waiting for the copy. last_batch: 0 where all batches share their keys or values (stride 0), which
    // the tensor map holds once.
    const auto load_rows = [&](auto type, const auto& ring, int places, const TensorMap* map, u64* full, int kv_head,
                               const SequenceTile& tile, int j, const Boxes& boxes, int last_batch) {
      using Type = decltype(type);
      unsigned char* const place = smem + places + ring.stage * Type::kBytes;
      ring.wait_empty();
      if constexpr (kPaged) {
        load_paged_tile<Type, kBoxKeys>(place, map, full, boxes, kv_head, block_size);
      } else {
        load_tile<Type>(place, map, full, placed.first_key(tile) + j * kBlockKeys, kv_head,
                        min(placed.batch(tile), last_batch));
      }
    };
    const auto load_keys = [&](const SequenceTile& tile, int kv_head, int j, const Boxes& boxes) {
      load_rows(KeyTile{}, key_ring, Layout::kKeys, &k_map, key_ring.full + key_ring.stage, kv_head, tile, j, boxes,
                last_key_batch);
      key_ring.advance();
    };
    const auto load_values = [&](const SequenceTile& tile, int kv_head, int j, const Boxes& boxes, int cleared_tile) {
      u64* const full = kPaged && j == cleared_tile ? tails : value_ring.full;
      load_rows(ValueTile{}, value_ring, Layout::kValues, &v_map, full + value_ring.stage, kv_head, tile, j, boxes,
                last_value_batch);
      value_ring.advance();
    };
    const auto kv_head_of = [&](const SequenceTile& tile) { return placed.first_head(tile) / group; };
    if (kCopyWarps == 2 && warp == 1) {
      for (work.template begin<true>(); work.has_work(); work.template next<true>()) {
        const SequenceTile tile = work.tile;
        const Range range = range_of(tile);
        const int kv_head = kv_head_of(tile), cleared_tile = cleared_tile_of(tile);
        Boxes boxes = find_boxes(tile, range, range.end_tile - 1);
        for (int j = range.end_tile - 1; j >= range.begin_tile; --j) {
          load_values(tile, kv_head, j, boxes, cleared_tile);
          boxes = find_boxes(tile, range, j - 1);
        }
      }
      return;
    }
    for (work.template begin<true>(); work.has_work(); work.template next<true>()) {
      const SequenceTile tile = work.tile;
      const Range range = range_of(tile);
      if (range.is_empty()) {
        work.wish_for_next();
        continue;
      }
      // The next tile is drawn while the last copies of this one wait for room: late, because a number drawn at the start of
      // a long tile would be the longest of those left, in the hands of the block that comes to it last.
      const int last = range.end_tile - 1, wish_at = min(last, range.begin_tile + 2);
      const int kv_head = kv_head_of(tile), cleared_tile = cleared_tile_of(tile);
      Boxes value_boxes = find_boxes(tile, range, last);
      load_keys(tile, kv_head, last, value_boxes);
      Boxes boxes = find_boxes(tile, range, last - 1);
#pragma unroll 1
      for (int i = 0; i < kConsumers; ++i) {
        query_ring.wait_empty();
        load_queries<QueryTile, kPackedHeads>(
            smem + Layout::kQueries + i * QueryTile::kBytes, &q_map, query_ring.full + i,
            tile.first_query + tile.row_block * kBlockQueries + i * kGroupQueries, placed.first_head(tile),
            placed.batch(tile));
        query_ring.advance();
      }
      for (int j = last; j >= range.begin_tile; --j) {
        if (j > range.begin_tile) load_keys(tile, kv_head, j - 1, boxes);
        if (j == wish_at) work.wish_for_next();
        if constexpr (kCopyWarps == 1) load_values(tile, kv_head, j, value_boxes, cleared_tile);
        value_boxes = boxes;
        boxes = find_boxes(tile, range, j - 2);
      }
    }
    return;
  }

  if constexpr (kConsumerRegisters > 0) ptx::setmaxnreg_inc<kConsumerRegisters>();
  const int consumer = warpgroup - 1;
  query_ring.stage = consumer;
  const int lane = static_cast<int>(threadIdx.x) % 32;
  const WarpgroupTurns<kConsumers, kPingPong> turns(consumer);
  LogitRules rules{scale, softcap, softcap_rate, bias_key, mask_key};
  float exponent_factor = exponent_scale, result_factor = kDropout ? dropout_factor : 1.0f;
  const auto take_descales = [&](const SequenceTile& tile) {
    const Descales descales{q_descale,       k_descale,      v_descale,       q_descale_batch, q_descale_head,
                            k_descale_batch, k_descale_head, v_descale_batch, v_descale_head};
    const int batch = kVarlen ? tile.sequence : placed.batch(tile), kv_head = placed.first_head(tile) / group;
    if (kVarlen && (batch < 0 || batch >= sequences)) return;  // rows of no sequence
    const float logits = descales.of_logits(batch, kv_head);
    rules = {scale * logits, softcap, softcap_rate * logits, bias_key, mask_key};
    if constexpr (!kScaleFirst) exponent_factor = positive(exponent_scale * logits);
    result_factor = (kDropout ? dropout_factor : 1.0f) * descales.of_values(batch, kv_head);
  };
  Dropout dropout{};
  if constexpr (kDropout) dropout = {*dropout_seed, static_cast<u32>(*dropout_offset), dropout_threshold};
  const u64 queries_at = wgmma_descriptor_k_major<kKeySpan>(smem + Layout::kQueries + consumer * QueryTile::kBytes);
  const u64 keys_at = wgmma_descriptor_k_major<kKeySpan>(smem + Layout::kKeys);
  const u64 values_at = wgmma_descriptor_mn_major<kValueSpan>(smem + Layout::kValues, ValueTile::kSlabBytes);
  const auto start_keys = [&](auto& scores) {
    multiply_keys<Element, QueryTile, KeyTile, kHeadDim>(
        scores, queries_at, wgmma_descriptor_advance(keys_at, key_ring.stage * KeyTile::kBytes));
    ptx::wgmma_commit_group();
  };
  const auto start_values = [&](Rows& rows) {
    const u64 values = wgmma_descriptor_advance(values_at, value_ring.stage * ValueTile::kBytes);
    const auto start = [&](auto steps) {
      ptx::wgmma_fence();
      multiply_values<Element, ValueTile, kValueDim, decltype(steps)::kValue>(rows.output, rows.weights, values);
      ptx::wgmma_commit_group();  // fence and end in each branch: else ptxas puts more of both
    };
    if (kHasNarrow && rows.is_narrow) {
      start(Constant<kNarrowSteps>{});
    } else {
      start(Constant<kWeightSteps>{});
    }
  };
  const auto pass_over = [&] { skip_tile(key_ring, value_ring, turns); };
  // S of the first tile, with nothing to overlap it.
  const auto first_scores = [&](auto& scores) {
    key_ring.wait_full();
    turns.take();
    ptx::wgmma_fence();
    start_keys(scores);
    turns.pass();
    ptx::wgmma_wait_group<0>();
    ptx::wgmma_fence_registers(scores);
    key_ring.release();
  };
  const auto first_softmax = [&](auto& scores, Rows& rows, const Band& band, auto band_test, int tile) {
    float correction[2];
    finish_scores<Features, decltype(band_test)::kValue>(scores, rows.query, tile * kBlockKeys, band, rules);
    take_tile<decltype(band_test)::kValue || kBias || kMask, kScaleFirst>(scores, rows.softmax, correction,
                                                                          exponent_factor);
    DroppedWeights<kBlockKeys>(dropout, tile, rows.query).apply(scores);
    pack_weights<Element, static_cast<int>(sizeof(scores)) / 32>(rows.weights, [&](int i) { return scores[i]; });
  };
  // S of `tile` and its softmax, beside the values of the tile before. Where the wait for these stands decides the speed: in
  // front of the softmax they would no longer run beside it, behind it the packing of weights would stand alone, while the
  // special function unit idles. ptxas places it by its basic blocks: the branch among the exponentials keeps it there.
  const auto step = [&](float(&scores)[kBlockKeys / 2], Rows& rows, const Band& band, auto band_test, int tile,
                        bool is_last) {
    constexpr bool kBandTest = decltype(band_test)::kValue;
    using Softmax = typename SoftmaxOf<kBandTest>::Type;
    key_ring.wait_full();
    turns.take();
    ptx::wgmma_fence();
    start_keys(scores);
    value_ring.wait_full();
    start_values(rows);
    rows.is_narrow = false;
    turns.pass();
    const DroppedWeights<kBlockKeys> dropped(dropout, tile, rows.query);
    ptx::wgmma_wait_group<1>();
    ptx::wgmma_fence_registers(scores);
    if constexpr (!Softmax::kReadsKeysAgain) key_ring.release();
    finish_scores<Features, kBandTest>(scores, rows.query, tile * kBlockKeys, band, rules);
    Softmax softmax(scores, rows.softmax, exponent_factor);
    const auto rescale = [&](const float(&correction)[2]) { rows.rescale(correction); };
    const auto scores_again = [&](auto& again, const bool(&wanted)[2]) {
      const unsigned char *queries = smem + Layout::kQueries, *keys = smem + Layout::kKeys;
      multiply_keys_again<Element, QueryTile, KeyTile, kHeadDim>(
          again, wanted, queries + consumer * QueryTile::kBytes, keys + key_ring.stage * KeyTile::kBytes);
      finish_scores<Features, kBandTest>(again, rows.query, tile * kBlockKeys, band, rules, wanted);
    };
    const auto pack = [&] {
      pack_weights<Element, kWeightSteps>(rows.weights, [&](int i) { return dropped.kept(i, softmax.taken(i)); });
    };
    softmax.begin(rescale);
    softmax.template take<Softmax::kAhead, kBeforeValues>();
    if (is_last) softmax.template part<kBeforeValues>([&] { query_ring.release_own(); });
    rows.wait_for_output();
    value_ring.release();
    softmax.template take<kBeforeValues, kBlockKeys / 2>();
    pack();
    if constexpr (Softmax::kReadsKeysAgain) {
      if (softmax.settle(scores_again, rescale)) pack();
      key_ring.release();
      if (is_last) query_ring.release_own();
    }
    softmax.finish();
  };

  // Of a row, which is a query, or with packed heads one head of a query.
  const auto head_of = [&](const SequenceTile& tile, int row) { return placed.first_head(tile) + row % kPackedHeads; };
  const auto query_of = [&](const SequenceTile& tile, int number) {
    QueryRow<BiasElement> row{};
    const int head = head_of(tile, number), query = min(number / kPackedHeads, tile.queries - 1);
    row.query = query;
    if constexpr (kDropout) row.dropout_row = static_cast<u32>(tile.sequence) * static_cast<u32>(heads) + head;
    if constexpr (kAlibi) row.slope = alibi_slopes[head * slopes_stride];
    if constexpr (kBias) row.bias = bias + placed.batch(tile) * bias_batch + head * bias_head + query * bias_query;
    if constexpr (kMask) row.mask = mask + placed.batch(tile) * mask_batch + head * mask_head + query * mask_query;
    if constexpr (kBias && kSplitKeys) row.bias += placed.first_key(tile) * bias_key;
    if constexpr (kMask && kSplitKeys) row.mask += placed.first_key(tile) * mask_key;
    return row;
  };
  const auto part_of = [&](const SequenceTile& tile) { return Part(tile, placed.band(tile), consumer); };
  work.begin();
  Part part = part_of(work.tile);
  float scores[kBlockKeys / 2];
  float narrow_scores[kNarrowKeys / 2];  // apart: as a part of the others ptxas ends products one by one
  while (work.has_work()) {
    const SequenceTile tile = part.tile;
    if constexpr (kDescaled) take_descales(tile);
    const Band band = part.band;
    const Range block = part.block, own = part.own;
    u32 thread[1] = {threadIdx.x % 128};
    ptx::wgmma_fence_registers(thread);  // opaque: computed here, not kept in a register through the main loop
    // Of the pair row, row + 8.
    const int row = part.first_query(consumer) * kPackedHeads + static_cast<int>(thread[0] / 32 * 16 + thread[0] % 32 / 4);
    const int end_query = kUsedRows < kGroupRows ? part.first_query(consumer) + kGroupQueries : tile.queries;
    const int end_row = min(tile.queries, end_query) * kPackedHeads;

    Rows rows;
#pragma unroll
    for (int r = 0; r < 2; ++r) rows.query[r] = query_of(tile, row + 8 * r);
    rows.clear();
    int j = block.end_tile - 1;
    if (!block.is_empty()) {
      query_ring.wait_full();
      const int own_end = own.is_empty() ? block.begin_tile : own.end_tile;
      for (; j >= own_end; --j) pass_over();
    }
    if (!own.is_empty()) {
      rows.is_narrow = kHasNarrow && own.end - j * kBlockKeys <= kNarrowKeys;
      const auto begin = [&](auto& tile_scores, auto band_test) {
        first_scores(tile_scores);
        first_softmax(tile_scores, rows, band, band_test, j);
      };
      if (kHasNarrow && rows.is_narrow) {
        begin(narrow_scores, Constant<true>{});
      } else if (kHasLimits || own.passes_common_end(j)) {
        begin(scores, Constant<true>{});
      } else {
        begin(scores, Constant<false>{});
      }
      if (j == own.begin_tile) query_ring.release_own();
      --j;
      if constexpr (kTestAll) {
        for (; j >= own.begin_tile; --j) step(scores, rows, band, Constant<true>{}, j, j == own.begin_tile);
      } else {
        // A loop for each kind of tile: in one loop with a branch ptxas schedules neither kind as well.
        if constexpr (kLimitRight) {
          for (; j >= own.begin_tile && own.passes_common_end(j); --j)
            step(scores, rows, band, Constant<true>{}, j, j == own.begin_tile);
        }
        const int whole_begin = kLimitLeft ? max(own.begin_tile, own.first_after_common_begin()) : own.begin_tile;
        for (; j >= whole_begin; --j) step(scores, rows, band, Constant<false>{}, j, j == own.begin_tile);
        if constexpr (kLimitLeft) {
          for (; j >= own.begin_tile; --j) step(scores, rows, band, Constant<true>{}, j, j == own.begin_tile);
        }
      }
    }

    // The end of the tile.
    const auto origin_of = [&](int batch, i64 batch_stride, i64 sequence_stride, i64 head_stride) {
      return batch * batch_stride + tile.first_query * sequence_stride + placed.first_head(tile) * head_stride;
    };
    const int result_batch = kVarlen ? 0 : tile.sequence;
    const i64 out_offset = origin_of(result_batch, out_batch, out_sequence, out_head);
    const auto out_of = [&](int row) {
      return out + out_offset + row % kPackedHeads * out_head + row / kPackedHeads * out_sequence;
    };
    float factor[2], log_sum_exp[2];
    u32 to_repair[2] = {0, 0};  // lanes whose part of the row is not finite
    const auto finish_softmax = [&] {
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        SoftmaxRow& softmax = rows.softmax[r];
        softmax.finish(kScaleFirst ? 1.0f : rules.scale);
        const bool has_sink = sinks != nullptr && placed.part(tile) == 0;
        factor[r] = has_sink ? softmax.take_logit(sinks[head_of(tile, row + 8 * r) * sinks_stride]) : 1.0f;
        factor[r] *= softmax.normalizer();
        if constexpr (kDropout || kDescaled) factor[r] *= result_factor;
        log_sum_exp[r] = softmax.log_sum_exp();
        if (lse != nullptr && lane % 4 == 0 && row + 8 * r < end_row) {
          lse[(static_cast<i64>(result_batch) * heads + head_of(tile, row + 8 * r)) * query_length + tile.first_query +
              (row + 8 * r) / kPackedHeads] = log_sum_exp[r];
        }
      }
    };
    const auto store_output = [&] {
      if constexpr (kHides) {
#pragma unroll
        for (int r = 0; r < 2; ++r) {
          const bool is_bad = !is_finite_row(rows.output, r) && fabsf(log_sum_exp[r]) < positive_infinity();
          to_repair[r] = __shfl_sync(kFullWarp, __ballot_sync(kFullWarp, is_bad && row + 8 * r < end_row), 0);
          if (factor[r] == 0.0f) {  // saw no key: 0, whatever the tiles held
#pragma unroll
            for (int i = 0; i < kValueDim / 2; ++i) {
              if (i / 2 % 2 == r) rows.output[i] = 0.0f;
            }
          }
        }
      }
      scale_rows(rows.output, factor);
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        store_row<Result, kWideStore, kPairStore>(out_of(row + 8 * r), out_dim, rows.output, r, value_dim,
                                                   row + 8 * r < end_row);
      }
    };
    const auto look_ahead = [&] {
      work.next();
      part = part_of(work.tile);
    };
    if (!part.ends_with_block()) {
      if (!own.is_empty()) {
        value_ring.wait_full();
        start_values(rows);
        finish_softmax();
        rows.wait_for_output();
        value_ring.release();
      } else {
        finish_softmax();
      }
      for (; j >= block.begin_tile; --j) pass_over();
      if (own.is_empty() && !block.is_empty()) query_ring.release_own();
      look_ahead();
    } else {
      value_ring.wait_full();
      start_values(rows);
      look_ahead();  // beside the product, and so is the end of the softmax
      finish_softmax();
      rows.wait_for_output();
      value_ring.release();
    }
    store_output();
    if constexpr (kHides) {
      for_each_bad_row(to_repair, [&](int r, int lane_of_row) {
        const int number = __shfl_sync(kFullWarp, row, lane_of_row) + 8 * r;
        const QueryRow<BiasElement> one = query_of(tile, number);
        const auto rows_of = [&](const Element* tensor, i64 batch_stride, i64 sequence_stride, i64 head_stride) {
          tensor += placed.first_head(tile) / group * head_stride;
          if constexpr (kPaged) {
            return PagedRows<Element, TableIndex>{tensor, batch_stride, sequence_stride, table_row_of(tile)};
          } else {
            return StridedRows<Element>{tensor + placed.batch(tile) * batch_stride + placed.first_key(tile) * sequence_stride,
                                        sequence_stride};
          }
        };
        using KeyRows = decltype(rows_of(k, k_batch, k_sequence, k_head));
        const RowOperands<Element, KeyRows, Result> at{
            q + origin_of(placed.batch(tile), q_batch, q_sequence, q_head) + number % kPackedHeads * q_head +
                one.query * q_sequence,
            rows_of(k, k_batch, k_sequence, k_head), rows_of(v, v_batch, v_sequence, v_head), out_of(number), out_dim};
        const bool has_sink = sinks != nullptr && placed.part(tile) == 0;
        compute_row<Features, kValueDim>(at, head_dim, value_dim, one, band, rules,
                                         has_sink ? sinks[head_of(tile, number) * sinks_stride] : negative_infinity(),
                                         DroppedKeys{dropout, one.query, one.dropout_row, result_factor});
      });
    }
  }
  turns.finish();
}
