// Attention of e4m3 queries, keys and values on Hopper (sm_90a), with fp32 descales of heads; the result is f16 or bf16.
//
//   q [batch, queries, heads, head_dim]   k [batch, keys, kv_heads, head_dim]   v [batch, keys, kv_heads, value_dim]
//   q_descale, k_descale, v_descale [batch, kv_heads] by strides: what the codes of a KV head and its queries stand for
//   out [batch, queries, heads, value_dim]   lse [batch, heads, queries] fp32, natural logarithm, row-major, may be null
//   logit = scale q_descale k_descale q.k, ...   out = v_descale softmax(logits) v
//
// Roles, rings, turns, schedules and the order of a step are those of attention.cu; dense tensors, no bias, no mask. What
// e4m3 changes (the scheme of FlashAttention-3's FP8 forward, arXiv 2407.08608, section 3.3):
//   V        comes keys side by side, written so by the launch before (transpose_e4m3_values.cu)
//   weights  are up to 256, not 1 (softmax_e4m3.cuh), and packed without a shuffle (products_e4m3.cuh)
//   sums     of P V are promoted to fp32 once a tile or a few (configuration_e4m3.cuh)
// A weight rounds to three bits, the sum of weights does not: the result's error is that of the rounding, averaged.
//
// Registers a thread: S kBlockKeys/2, P kBlockKeys/8, O kValueDim/2 and as many for the sums of the tiles in flight.
#include "attention/hopper/configuration_e4m3.cuh"
#include "attention/hopper/descales.cuh"
#include "attention/hopper/epilogue.cuh"
#include "attention/hopper/finish_logits.cuh"
#include "attention/hopper/products.cuh"
#include "attention/hopper/products_e4m3.cuh"
#include "attention/hopper/repair.cuh"
#include "attention/hopper/shared_tiles.cuh"
#include "attention/hopper/softmax.cuh"
#include "attention/hopper/softmax_e4m3.cuh"
#include "attention/logits.cuh"
#include "common/constant.cuh"
#include "common/online_softmax.cuh"
#include "common/stage_ring.cuh"
#include "common/types.cuh"
#include "common/warpgroup_turns.cuh"
#include "common/wgmma_descriptor.cuh"
#include "ptx/elect.cuh"
#include "ptx/fence.cuh"
#include "ptx/grid_dependency.cuh"
#include "ptx/mbarrier.cuh"
#include "ptx/setmaxnreg.cuh"
#include "ptx/tma.cuh"
#include "ptx/wgmma.cuh"

using namespace cki;
using namespace cki::attention;

// One thread: the tile of transposed values from key first_key on, all columns of one KV head.
__device__ __forceinline__ void load_transposed_values(unsigned char* tile, const TensorMap* map, u64* full, int first_key,
                                                       int kv_head, int batch) {
  ptx::mbarrier_arrive_expect_tx(full, ValueTile::kCopiedBytes);
#pragma unroll
  for (int slab = 0; slab < ValueTile::kSlabs; ++slab) {
    ptx::tma_load_4d(tile + slab * ValueTile::kSlabBytes, map, full, first_key / 2 + slab * ValueTile::kSlabColumns, 0,
                     kv_head, batch);
  }
}

// The columns of ones, which no copy touches. All threads, before the barrier that publishes them.
__device__ __forceinline__ void write_ones(unsigned char* values) {
  constexpr u32 kOnes = 0x38383838u;  // four times 1 in e4m3
  constexpr int kSlabPieces = kSumColumns * ValueTile::kSpan / 16;
  for (int piece = static_cast<int>(threadIdx.x); piece < kStages * ValueTile::kSlabs * kSlabPieces; piece += kThreads) {
    unsigned char* slab = values + piece / kSlabPieces * ValueTile::kSlabBytes + kValueDim * ValueTile::kSpan;
    *reinterpret_cast<uint4*>(slab + piece % kSlabPieces * 16) = make_uint4(kOnes, kOnes, kOnes, kOnes);
  }
  ptx::fence_proxy_async_shared();
}

// What a weight is multiplied by when a row is repaired.
struct DescaledKeys {
  static constexpr bool kMayDrop = false;
  float value_descale;
  __device__ __forceinline__ bool drops(int) const { return false; }
  __device__ __forceinline__ float factor() const { return value_descale; }
};

extern "C" __global__ void __launch_bounds__(kThreads, 1) attention_e4m3(
    const __grid_constant__ TensorMap q_map, const __grid_constant__ TensorMap k_map,
    const __grid_constant__ TensorMap v_map, u32* counter,                              //
    const e4m3* __restrict__ q, const e4m3* __restrict__ k, const e4m3* __restrict__ v, Result* out, float* lse,
    const float* __restrict__ sinks, const float* __restrict__ alibi_slopes, const float* __restrict__ q_descale,
    const float* __restrict__ k_descale, const float* __restrict__ v_descale,           //
    i64 q_batch, i64 q_sequence, i64 q_head, i64 k_batch, i64 k_sequence, i64 k_head,   //
    i64 v_batch, i64 v_sequence, i64 v_head,                                            //
    i64 out_batch, i64 out_sequence, i64 out_head, i64 out_dim,                         //
    i64 sinks_stride, i64 slopes_stride, i64 q_descale_batch, i64 q_descale_head, i64 k_descale_batch,
    i64 k_descale_head, i64 v_descale_batch, i64 v_descale_head,                        //
    int query_length, int key_length, int heads, int group, int head_dim, int value_dim, int shift, int left, int right,
    float scale, float softcap, float softcap_rate,                                     //
    int row_blocks, int batch_heads, int section_heads, int last_section, int tiles) {
  extern __shared__ __align__(1024) unsigned char smem[];
  // The shuffle tells the compiler that the number, and the branches on it, are uniform in the warp.
  const int warpgroup = __shfl_sync(kFullWarp, static_cast<int>(threadIdx.x) / 128, 0);

  StageRing<kConsumers> query_ring(smem + Layout::kQueryRing);  // a stage for each consumer
  StageRing<kStages> key_ring(smem + Layout::kKeyRing), value_ring(smem + Layout::kValueRing);
  const WorkOrder order{row_blocks, heads, batch_heads, section_heads, last_section, tiles};
  Work work(order, query_length, key_length, counter, smem + Layout::kWorkRing, smem + Layout::kWorkNumbers,
            smem + Layout::kWishRing);
  const Band band{key_length, shift, left, right};

  if (threadIdx.x == 0) {
    ptx::prefetch_tensormap(&q_map);
    ptx::prefetch_tensormap(&k_map);
    ptx::prefetch_tensormap(&v_map);
    query_ring.initialise(4);
    key_ring.initialise(4 * kConsumers);
    value_ring.initialise(4 * kConsumers);
    work.initialise(128 * kConsumers + 1);
    ptx::fence_mbarrier_init();
  }
  write_ones(smem + Layout::kValues);
  __syncthreads();
  ptx::griddepcontrol_wait();

  if (warpgroup == 0) {
    if constexpr (kProducerRegisters > 0) ptx::setmaxnreg_dec<kProducerRegisters>();
    const int warp = __shfl_sync(kFullWarp, static_cast<int>(threadIdx.x) / 32, 0);
    if (warp == 1) work.hand_over([](const SequenceTile&) {});
    if (warp >= 1 || !ptx::elect_one()) return;
    const auto load_keys = [&](const SequenceTile& tile, int j) {
      key_ring.wait_empty();
      load_tile<KeyTile>(smem + Layout::kKeys + key_ring.stage * KeyTile::kBytes, &k_map,
                         key_ring.full + key_ring.stage, j * kBlockKeys, tile.head / group, tile.sequence);
      key_ring.advance();
    };
    const auto load_values = [&](const SequenceTile& tile, int j) {
      value_ring.wait_empty();
      load_transposed_values(smem + Layout::kValues + value_ring.stage * ValueTile::kBytes, &v_map,
                             value_ring.full + value_ring.stage, j * kBlockKeys, tile.head / group, tile.sequence);
      value_ring.advance();
    };
    for (work.begin<true>(); work.has_work(); work.next<true>()) {
      const SequenceTile tile = work.tile;
      const Range range = Part(tile, band, 0).block;
      if (range.is_empty()) {
        work.wish_for_next();
        continue;
      }
      const int last = range.end_tile - 1, wish_at = min(last, range.begin_tile + 2);  // late: attention.cu says why
      load_keys(tile, last);
#pragma unroll 1
      for (int i = 0; i < kConsumers; ++i) {
        query_ring.wait_empty();
        load_tile<QueryTile>(smem + Layout::kQueries + i * QueryTile::kBytes, &q_map, query_ring.full + i,
                             tile.row_block * kBlockRows + i * kGroupRows, tile.head, tile.sequence);
        query_ring.advance();
      }
      for (int j = last; j >= range.begin_tile; --j) {
        if (j > range.begin_tile) load_keys(tile, j - 1);
        if (j == wish_at) work.wish_for_next();
        load_values(tile, j);
      }
    }
    return;
  }

  if constexpr (kConsumerRegisters > 0) ptx::setmaxnreg_inc<kConsumerRegisters>();
  const int consumer = warpgroup - 1;
  query_ring.stage = consumer;
  const int lane = static_cast<int>(threadIdx.x) % 32;
  const WarpgroupTurns<kConsumers, kPingPong> turns(consumer);
  const u64 queries_at = wgmma_descriptor_k_major<kKeySpan>(smem + Layout::kQueries + consumer * QueryTile::kBytes);
  const u64 keys_at = wgmma_descriptor_k_major<kKeySpan>(smem + Layout::kKeys);
  const u64 values_at = wgmma_descriptor_k_major<ValueTile::kSpan>(smem + Layout::kValues);
  const auto start_keys = [&](float(&scores)[kBlockKeys / 2]) {
    multiply_keys<e4m3, QueryTile, KeyTile, kHeadDim / 2>(
        scores, queries_at, wgmma_descriptor_advance(keys_at, key_ring.stage * KeyTile::kBytes));
    ptx::wgmma_commit_group();
  };
  const auto start_values = [&](Rows& rows) {
    multiply_e4m3_values<ValueTile>(rows.part, rows.weights,
                                    wgmma_descriptor_advance(values_at, value_ring.stage * ValueTile::kBytes),
                                    rows.accumulates());
    ptx::wgmma_commit_group();
  };
  const auto wait_values = [&](Rows& rows) {
    ptx::wgmma_wait_group<0>();
    ptx::wgmma_fence_registers(rows.part);
  };
  const auto pass_over = [&] { skip_tile(key_ring, value_ring, turns); };
  // What turns codes into logits, of a tile's head.
  struct Scaling {
    LogitRules rules;
    float exponent;
    float values;
  };
  const auto scaling_of = [&](const SequenceTile& tile) {
    constexpr float kLog2e = 1.44269504088896340736f;
    const int kv_head = tile.head / group;
    const Descales descales{q_descale,       k_descale,      v_descale,       q_descale_batch, q_descale_head,
                            k_descale_batch, k_descale_head, v_descale_batch, v_descale_head};
    const float logits = descales.of_logits(tile.sequence, kv_head);
    return Scaling{{scale * logits, softcap, softcap_rate * logits, 0, 0},
                   kScaleFirst ? kLog2e : positive(scale * logits) * kLog2e,
                   descales.of_values(tile.sequence, kv_head)};
  };
  // S of the first tile and its softmax, with nothing to overlap them.
  const auto first_step = [&](float(&scores)[kBlockKeys / 2], Rows& rows, const Scaling& scaling, auto band_test,
                              int tile) {
    key_ring.wait_full();
    turns.take();
    ptx::wgmma_fence();
    start_keys(scores);
    turns.pass();
    ptx::wgmma_wait_group<0>();
    ptx::wgmma_fence_registers(scores);
    key_ring.release();
    float moved[2];
    finish_scores<Features, decltype(band_test)::kValue>(scores, rows.query, tile * kBlockKeys, band, scaling.rules);
    take_tile<decltype(band_test)::kValue, kScaleFirst, E4m3Weights>(scores, rows.softmax, moved, scaling.exponent);
    pack_e4m3_weights(rows.weights, scores);
  };
  // S of `tile` and its softmax, beside the values of the tile before (attention.cu: where the wait for these stands).
  const auto step = [&](float(&scores)[kBlockKeys / 2], Rows& rows, const Scaling& scaling, auto band_test, int tile,
                        bool is_last) {
    key_ring.wait_full();
    turns.take();
    ptx::wgmma_fence();
    start_keys(scores);
    value_ring.wait_full();
    ptx::wgmma_fence();
    start_values(rows);
    turns.pass();
    ptx::wgmma_wait_group<1>();
    ptx::wgmma_fence_registers(scores);
    key_ring.release();
    finish_scores<Features, decltype(band_test)::kValue>(scores, rows.query, tile * kBlockKeys, band, scaling.rules);
    const auto finish_values = [&] {
      wait_values(rows);
      value_ring.release();
      rows.take_product(tile + 1);
    };
    // After the last scores the queries of the next tile may come.
    if constexpr (kLazy) {
      LazySoftmax<decltype(band_test)::kValue, kScaleFirst, 0, kBlockKeys / 2, E4m3Weights> softmax(
          scores, rows.softmax, scaling.exponent);
      softmax.begin([&](const float(&factor)[2]) {
        wait_values(rows);
        rows.correct(factor);
      });
      softmax.template take<0, kBlockKeys / 4>();
      if (is_last) query_ring.release_own();  // the branch
      finish_values();
      softmax.template take<kBlockKeys / 4, kBlockKeys / 2>();
      softmax.finish();
      pack_e4m3_weights(rows.weights, scores);
    } else {
      float moved[2];
      if (is_last) query_ring.release_own();
      take_tile<decltype(band_test)::kValue, kScaleFirst, E4m3Weights>(scores, rows.softmax, moved, scaling.exponent);
      finish_values();
      pack_e4m3_weights(rows.weights, scores);
      rows.correct(moved);
    }
  };

  work.begin();
  Part part(work.tile, band, consumer);
  float scores[kBlockKeys / 2];
  while (work.has_work()) {
    const SequenceTile tile = part.tile;
    const Range block = part.block, own = part.own;
    const Scaling scaling = scaling_of(tile);
    u32 thread[1] = {threadIdx.x % 128};
    ptx::wgmma_fence_registers(thread);  // opaque: computed here, not kept in a register through the main loop
    // Of the pair row, row + 8.
    const int row = part.first_query(consumer) + static_cast<int>(thread[0] / 32 * 16 + thread[0] % 32 / 4);
    const auto query_of = [&](int query) {
      QueryRow<float> found{};
      found.query = query;
      if constexpr (kAlibi) found.slope = alibi_slopes[tile.head * slopes_stride];
      return found;
    };

    Rows rows;
#pragma unroll
    for (int r = 0; r < 2; ++r) rows.query[r] = query_of(min(row + 8 * r, tile.queries - 1));
    rows.clear();
    int j = block.end_tile - 1;
    if (!block.is_empty()) {
      query_ring.wait_full();
      const int own_end = own.is_empty() ? block.begin_tile : own.end_tile;
      for (; j >= own_end; --j) pass_over();
    }
    if (!own.is_empty()) {
      if (kHasLimits || own.passes_common_end(j)) {
        first_step(scores, rows, scaling, Constant<true>{}, j);
      } else {
        first_step(scores, rows, scaling, Constant<false>{}, j);
      }
      if (j == own.begin_tile) query_ring.release_own();
      --j;
      // A loop for each kind of tile, as in attention.cu.
      const auto walk = [&](int begin, auto band_test, auto goes_on) {
        for (; j >= begin && goes_on(); --j) step(scores, rows, scaling, band_test, j, j == own.begin_tile);
      };
      const auto always = [] { return true; };
      if constexpr (kTestAll) {
        walk(own.begin_tile, Constant<true>{}, always);
      } else {
        if constexpr (kLimitRight) walk(own.begin_tile, Constant<true>{}, [&] { return own.passes_common_end(j); });
        walk(kLimitLeft ? max(own.begin_tile, own.first_after_common_begin()) : own.begin_tile, Constant<false>{}, always);
        if constexpr (kLimitLeft) walk(own.begin_tile, Constant<true>{}, always);
      }
    }

    // The end of the tile.
    const auto origin_of = [&](i64 batch_stride, i64 head_stride) {
      return tile.sequence * batch_stride + tile.head * head_stride;
    };
    const i64 out_offset = origin_of(out_batch, out_head);
    float factor[2], log_sum_exp[2];
    u32 to_repair[2] = {0, 0};  // lanes whose part of the row is not finite
    const auto finish_softmax = [&] {
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        const auto finish = [&](SoftmaxRow& softmax) {
          softmax.sum *= kWeightUnit;  // exact
          softmax.finish(kScaleFirst ? 1.0f : scaling.rules.scale);
          return sinks != nullptr ? softmax.take_logit(sinks[tile.head * sinks_stride]) : 1.0f;
        };
        SoftmaxRow rounded = rows.softmax[r];
        rounded.sum = 0.25f * rows.sum_of_rounded(r);  // a quarter a lane
        factor[r] = finish(rounded) * rounded.normalizer() * (scaling.values * kWeightUnit);
        SoftmaxRow& softmax = kLse ? rows.softmax[r] : rounded;
        if constexpr (kLse) finish(softmax);
        log_sum_exp[r] = softmax.log_sum_exp();
        if (kLse && lane % 4 == 0 && row + 8 * r < tile.queries) {
          lse[(static_cast<i64>(tile.sequence) * heads + tile.head) * query_length + row + 8 * r] = log_sum_exp[r];
        }
      }
    };
    const auto look_ahead = [&] {
      work.next();
      part = Part(work.tile, band, consumer);
    };
    if (!own.is_empty()) {
      value_ring.wait_full();
      ptx::wgmma_fence();
      start_values(rows);
      wait_values(rows);
      value_ring.release();
      rows.take_last_product();
    }
    finish_softmax();
    for (; j >= block.begin_tile; --j) pass_over();
    if (own.is_empty() && !block.is_empty()) query_ring.release_own();
    look_ahead();

#pragma unroll
    for (int r = 0; r < 2; ++r) {
      if constexpr (kHasLimits) {
        const bool is_bad = !is_finite_row(rows.values(), r) && fabsf(log_sum_exp[r]) < positive_infinity();
        to_repair[r] = __shfl_sync(kFullWarp, __ballot_sync(kFullWarp, is_bad && row + 8 * r < tile.queries), 0);
        if (factor[r] == 0.0f) {  // saw no key: 0, whatever the tiles held
#pragma unroll
          for (int i = 0; i < kValueDim / 2; ++i) {
            if (i / 2 % 2 == r) rows.output[i] = 0.0f;
          }
        }
      }
    }
    scale_rows(rows.values(), factor);
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      store_row<Result, kWideStore, kPairStore>(out + out_offset + (row + 8 * r) * out_sequence, out_dim, rows.values(), r,
                                                value_dim, row + 8 * r < tile.queries);
    }
    if constexpr (kHasLimits) {
      for_each_bad_row(to_repair, [&](int r, int lane_of_row) {
        const QueryRow<float> one = query_of(__shfl_sync(kFullWarp, row, lane_of_row) + 8 * r);
        const auto rows_of = [&](const e4m3* tensor, i64 batch_stride, i64 sequence_stride, i64 head_stride) {
          return StridedRows<e4m3>{tensor + tile.sequence * batch_stride + tile.head / group * head_stride,
                                   sequence_stride};
        };
        const RowOperands<e4m3, StridedRows<e4m3>, Result> at{
            q + origin_of(q_batch, q_head) + one.query * q_sequence, rows_of(k, k_batch, k_sequence, k_head),
            rows_of(v, v_batch, v_sequence, v_head), out + out_offset + one.query * out_sequence, out_dim};
        compute_row<Features, kValueDim>(at, head_dim, value_dim, one, band, scaling.rules,
                                         sinks != nullptr ? sinks[tile.head * sinks_stride] : negative_infinity(),
                                         DescaledKeys{scaling.values});
      });
    }
  }
  turns.finish();
}
