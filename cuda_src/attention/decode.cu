// Attention of a few new tokens of each sequence over its cached keys and values, at the speed of memory.
//
//   out[b, i, h] = sum_j w_ij v_j,   w = softmax_j(logit(q[b, i, h] . k_j)) over the keys that query i sees
//
// q, out [batch, queries, heads, dim], lse [batch, heads, queries] fp32 natural, may be null; queries <= 16, the last
// of them at the last key. Query head h reads KV head h / group. Keys and values, by strides, their last axis dense:
//   kPaging 0  blocks [blocks, block_size, kv_heads, dim], block_table [batch, columns], seq_lens [batch]
//   kPaging 1  dense [batch, capacity, kv_heads, dim], seq_lens [batch]
//   kPaging 2  ragged [tokens, kv_heads, dim], cu_seqlens_k [batch + 1]
// of f16, bf16, f32, or e4m3 with fp32 scales by which codes are multiplied: of tokens [blocks, block_size, kv_heads],
// or of heads.
// Bytes moved: keys and values once, when all rows of a KV head (queries * group) fit in one block of kRows rows.
//
// Units, tiles and their division among blocks: decode_schedule.cuh. Within a block each warp takes every kWarps-th
// tile of 16 keys, has a ring of kStages tiles of its own (cp.async) and never waits for the other warps while it
// reads. The ring runs on across units: while a unit is being finished, the tiles of the next are under way, so memory
// never idles. Where a warp's next tiles lie is found for 32 of them at a time (decode_copy.cuh).
//
// Products: decode_tile.cuh. The softmax's reference of a row moves only when a score exceeds it by more than 8 powers
// of two: until then weights up to 256 are as precise as weights up to 1, and nothing accumulated so far must be
// touched.
//
// At the end of a unit the states of the warps are combined (decode_combine.cuh), a row a warp, by some warps in turn while
// the others read on; at the block's end by all. A block that had all of the unit writes the result. Else the unit's parts (fp32)
// are merged
//   - by a launch of decode_merge.cu, which begins while this one runs (kProgrammatic, sm_90), from device memory;
//   - by the block that arrives last (kMergeHere), likewise; counters are zero before and after every launch;
//   - by the blocks of a cluster, which are all groups that can share a unit (kClusterBlocks of them, sm_90), through
//     each other's shared memory (decode_cluster.cuh).
//
// kOverlaps (sm_90): this launch may begin while the one before it ends, of which it waits for all, and the next one beside it.
// kKeysEarly: until then it reads what that one does not write: lengths, tables, and tiles without a new key fill the rings.
//
// kOutCodes (1, 2): rows of 128 columns become e4m3 codes, of so many parts, with a scale each (decode_result.cuh).
//
// Slots past a sequence's end are not read; table entries past it or before the window may be anything. A table entry
// outside the cache stands for keys and values of zero. Keys that some but not all rows see are hidden by
// replacing scores.
#include "attention/decode_cluster.cuh"
#include "attention/decode_combine.cuh"
#include "attention/decode_copy.cuh"
#include "attention/decode_result.cuh"
#include "attention/decode_rows.cuh"
#include "attention/decode_schedule.cuh"
#include "attention/decode_tile.cuh"
#include "ptx/cluster.cuh"
#include "ptx/grid_dependency.cuh"
#include "ptx/math.cuh"
#include "ptx/mbarrier.cuh"
#include "ptx/memory.cuh"

using namespace cki;
using namespace cki::attention;

constexpr int kThreads = 32 * kWarps;
constexpr int kCombiners = kRows < kWarps ? kRows : kWarps;  // warps that combine a unit while the others read on
constexpr bool kCluster = kClusterBlocks > 0;
constexpr bool kHeadScales = sizeof(CacheElement) == 1 && !kTokenScales;

// What the logits go through; the names are the prelude's.
struct Features {
  static constexpr bool kSoftcap = ::kSoftcap;
  static constexpr bool kAlibi = ::kAlibi;
  static constexpr bool kScaleFirst = ::kScaleFirst;
  static constexpr bool kLimitLeft = ::kLimitLeft;
};
using Keys = CacheTile<CacheElement, kPaddedDim>;
using Values = CacheTile<CacheElement, kPaddedValueDim>;
using Stage = StageLayout<Keys, Values, kTokenScales>;
using Rows = DecodeRows<Stage, kRowTiles, Features>;
using State = StateLayout<kRows, kPaddedValueDim>;
using Inbox = ClusterInbox<State, kRows, kCluster ? kClusterBlocks : 1, (kOutCodes > 0)>;
using Lengths = KeyLengths<LengthIndex, kPaging == 2, kLimitLeft>;
using Source =
    KeySource<Stage, TableIndex, kPaging, kWholeTiles, kSameStrides, kBlockShift, kCopyBytes, kPrefetch, kHeadDim,
              kValueDim>;
using Result = DecodeResult<Element, kValueDim, kGroup, kDenseOut, kOutCodes>;

// The unit that a block works at.
struct Unit {
  int length = 0;  // tiles of it in this block; before the first unit none
  int tiles = 0;   // all
  int sequence = 0, index = 0;
  int kv_head = 0;
  int first_row = 0, rows = 0;  // of the KV head's rows
  int keys = 0;                 // of the sequence
  int parts = 1, own = 0;       // how many blocks have a part of it, and which is this one's
  int inverse = 0;              // kCluster: of the parts
  float* part = nullptr;        // where the part goes in device memory

  Unit() = default;
  template <class Division>
  __device__ __forceinline__ Unit(const Division& schedule, const Cursor& walk, int together, int beside,
                                  int total_rows) {
    tiles = schedule.tiles(walk.sequence);
    length = Division::kOne ? walk.remaining : min(tiles - walk.tile, walk.remaining);
    sequence = schedule.base + walk.sequence;
    index = walk.pass * together + beside;
    kv_head = index / kRowBlocks;
    first_row = (index - kv_head * kRowBlocks) * kRows;
    rows = min(kRows, total_rows - first_row);
    keys = schedule.keys(walk.sequence);
  }
};

template <bool kIs>
struct Is {
  static constexpr bool kValue = kIs;
};

// Shared memory: rings, a state a warp, in a cluster the parts of what the block ends, then the schedule.
constexpr int kRingBytes = kWarps * kStages * Stage::kBytes;
constexpr int kInboxFloats = kCluster ? Inbox::kFloats : 0;

extern "C" __global__ void __launch_bounds__(kThreads, kMinBlocks)
    paged_attention(const Element* __restrict__ q, const CacheElement* __restrict__ k,
                    const CacheElement* __restrict__ v, Element* out, float* lse,
                    const TableIndex* __restrict__ block_table, const LengthIndex* __restrict__ lengths,
                    const float* __restrict__ k_scale, const float* __restrict__ v_scale,
                    const float* __restrict__ sinks,
                    const float* __restrict__ alibi_slopes, float* partials, u32* counters,  //
                    i64 q_batch, i64 q_query, i64 q_head, i64 q_dim,                         //
                    i64 out_batch, i64 out_query, i64 out_head, i64 out_dim,                 //
                    i64 k_block, i64 k_token, i64 k_head, i64 v_block, i64 v_token, i64 v_head,
                    i64 table_batch, i64 table_column, i64 lengths_stride, i64 sinks_stride, i64 slopes_stride,
                    i64 num_blocks, int block_size, int table_lines, int capacity,
                    int batch, int queries, int kv_heads, int left, int passes, int least_positions, int dealing_slack,
                    float scale, float exponent_scale, float softcap, float softcap_rate) {
  extern __shared__ __align__(128) unsigned char smem[];
  __shared__ int arrived_last;
  __shared__ u64 stored, combined;  // the states of a unit: all are there; they may be written again
  __shared__ u64 arrived[2];
  __shared__ SharedUnit shared_units[2];  // in a cluster: the block's first, unless it is the first at it; its last
  float* states = reinterpret_cast<float*>(smem + kRingBytes);
  const int thread = static_cast<int>(threadIdx.x);
  const int lane = static_cast<int>(threadIdx.x % 32);
  const int warp = __shfl_sync(kFullWarp, static_cast<int>(threadIdx.x / 32), 0);  // uniform, and the compiler knows
  unsigned char* ring = smem + warp * kStages * Stage::kBytes;
  const auto wait_for_launch_before = [] {
    if constexpr (kOverlaps) ptx::griddepcontrol_wait();  // before the next launch begins, which may read lengths at once
    if constexpr (kProgrammatic || kOverlaps) ptx::griddepcontrol_launch_dependents();
  };
  if constexpr (!kKeysEarly) wait_for_launch_before();

  const int total_rows = queries * kGroup;
  const int units = kv_heads * kRowBlocks;  // of a sequence
  const int together = static_cast<int>(gridDim.x), beside = static_cast<int>(blockIdx.x);
  int rank = 0;  // in the cluster: of the groups of blocks that may share a unit
  if constexpr (kCluster) rank = static_cast<int>(ptx::cluster_cta_rank());
  const Source source{k, v, k_scale, v_scale, block_table, k_block, k_token, k_head, v_block, v_token, v_head,
                      table_batch, table_column, num_blocks, block_size, kv_heads};
  const Lengths key_lengths{lengths, lengths_stride, capacity, queries, left};
  const Result result{out, lse, sinks, out_batch, out_query, out_head, out_dim, sinks_stride, queries,
                      kv_heads * kGroup};
  const LogitRules rules{scale, softcap, softcap_rate, 0, 0};
  const Inbox inbox{states + kWarps * State::kFloats, arrived};
  int* tables = reinterpret_cast<int*>(inbox.entries + kInboxFloats);

  // Queries of a unit, and the lines of its result, come to L2, and their pages are found, before they are needed. Two warps.
  const auto fetch_rows = [&](int sequence, int unit_index) {
    const auto fetch = [&](const auto* first, i64 batch_stride, i64 query_stride, i64 head_stride, int dim, int by) {
      constexpr int kLineElements = 128 / static_cast<int>(sizeof(Element));
      const int lines = (dim + kLineElements - 1) / kLineElements;  // of a row
      const int row = lane / lines + unit_index % kRowBlocks * kRows;
      const int head = row % kGroup + unit_index / kRowBlocks * kGroup;
      if (warp == by && lane / lines < kRows && row < total_rows)
        ptx::prefetch_global_l2(first + sequence * batch_stride + row / kGroup * query_stride + head * head_stride +
                                lane % lines * kLineElements);
    };
    if constexpr (kQueryPairs) fetch(q, q_batch, q_query, q_head, kHeadDim, kWarps - 1);
    if constexpr (kDenseOut && kOutCodes == 0) fetch(out, out_batch, out_query, out_head, kValueDim, kWarps / 2);
  };

  // All that a block does, once it is known which order it follows. ahead: the table's entry of the tile that the lane
  // looks for first; kLine asks for it here.
  const auto work = [&](auto schedule, int own_group, TableIndex ahead) {
    using Division = decltype(schedule);
    const int share = schedule.share(own_group);
    if (share == 0) {
      if constexpr (kCluster) ptx::cluster_wait();
      return;
    }
    Cursor walk = Cursor::begin(schedule, own_group, share);
    const auto first_key_at = [&](int keys, int tile) {
      return (key_lengths.first_tile(keys) + schedule.template tile_at<kWarps>(tile, own_group)) * kTileKeys;
    };
    const auto entry_of = [&](const Cursor& at) {
      if (at.remaining <= 0) return TableIndex{};
      const int keys = schedule.keys(at.sequence);
      return source.tile_entry(schedule.base + at.sequence, first_key_at(keys, at.tile), keys);
    };
    const auto place_of = [&](const Cursor& at, TableIndex of_tile) {
      if (at.remaining <= 0) return TilePlace{-1, 0, 0, 0, 0, 0, 0};
      const int keys = schedule.keys(at.sequence), sequence = schedule.base + at.sequence;
      return source.find(of_tile, sequence, (at.pass * together + beside) / kRowBlocks, first_key_at(keys, at.tile),
                         key_lengths.first_key(keys), keys, kPaging == 2 ? key_lengths.offset(sequence) : 0);
    };

    const typename Source::KeyTargets key_targets;
    const typename Source::ValueTargets value_targets;
    // The warp's tiles to fetch, kStages ahead of the products. `found` holds 32 of them, one a lane; the table's entries of
    // the next 32 are asked for half way.
    Cursor search = walk;
    search.advance(schedule, warp + lane * kWarps);
    TilePlace found;
    TableIndex entry{};  // Source::kLookUpKeys: of the next tile
    u32 settled = 0;  // kKeysEarly: which of the first 32 have no new key
    int fetched = 0;
    const int to_fetch = (walk.remaining - warp + kWarps - 1) / kWarps;
    const auto fetch_tile = [&](int stage, auto filling) {
      if (fetched < to_fetch) {
        const int holder = fetched % 32;
        if (holder == 16) search.advance(schedule, 32 * kWarps);
        if (holder == 16 || (fetched == 0 && Division::kOrder != Order::kDealt)) ahead = entry_of(search);
        if (holder == 0) {
          found = place_of(search, ahead);
          if constexpr (Source::kLookUpKeys) entry = source.look_up(Source::of_lane(found, 0));
          if constexpr (kKeysEarly && filling.kValue) {
            const int keys = search.remaining > 0 ? schedule.keys(search.sequence) : 0;
            settled = __ballot_sync(kFullWarp, first_key_at(keys, search.tile) + kTileKeys <= keys - queries);
          }
        }
        if constexpr (kKeysEarly && filling.kValue) {
          if ((settled >> holder & 1) == 0) wait_for_launch_before();
        }
        TilePlace place = Source::of_lane(found, holder);
        if constexpr (Source::kLookUpKeys) {
          place = source.of_key(place, entry);
          if (holder < 31) entry = source.look_up(Source::of_lane(found, holder + 1));
        }
        source.copy(ring + stage * Stage::kBytes, place, key_targets, value_targets);
        ++fetched;
      }
      ptx::cp_async_commit_group();
    };

    const float slack = Rows::kSlack * ptx::rcp_approx(exponent_scale);

    Unit unit;
    Rows state;
    const auto begin_unit = [&] {
      unit = Unit(schedule, walk, together, beside, total_rows);
      if (kSplit && unit.length != unit.tiles) {  // found here, where keys are awaited, and not when all wait for the end
        const int unit_begin = schedule.unit_begin(walk.sequence, walk.pass);
        unit.own = own_group - schedule.first_group(unit_begin);
        unit.parts = schedule.sharing_groups(unit_begin, unit.tiles);
        if constexpr (kCluster) {
          unit.inverse = Inbox::inverse_of(unit.parts);
          if (thread == 0) {
            const SharedUnit shared{unit.parts, unit.own, unit.sequence, unit.kv_head, unit.first_row, unit.rows};
            shared_units[Inbox::side(unit.own)] = shared;
            inbox.expect(shared);
          }
        } else {
          const i64 place = schedule.place(unit_begin, unit.own);
          unit.part = partials + (place * together + beside) * State::kFloats;
        }
      }
      const auto query_of = [&](int row) { return (unit.first_row + min(row, unit.rows - 1)) / kGroup; };
      const auto head_of = [&](int row) {
        return unit.kv_head * kGroup + (unit.first_row + min(row, unit.rows - 1)) % kGroup;
      };
      state.template begin<kQueryPairs>(
          [&](int row) {
            return row < unit.rows ? q + unit.sequence * q_batch + query_of(row) * q_query + head_of(row) * q_head
                                   : nullptr;
          },
          q_dim, kHeadDim, kHeadScales ? k_scale[unit.kv_head] : 1.0f,
          [&](int row) { return unit.keys - queries + query_of(row); },
          [&](int row) { return kAlibi ? alibi_slopes[head_of(row) * slopes_stride] : 0.0f; });
      if (!Division::kOne && walk.remaining > unit.length) {
        const bool same_sequence = walk.pass + 1 < passes;
        fetch_rows(unit.sequence + (same_sequence ? 0 : 1), same_sequence ? unit.index + together : beside);
      }
    };

    // The unit's end: the states of the warps make the whole of what this block had. done: units before it.
    const auto finish_unit = [&](int done) {
      const float value_factor = kHeadScales ? v_scale[unit.kv_head] : 1.0f;
      if (done > 0) ptx::mbarrier_wait_parity(&combined, (done - 1) % 2);
      state.template store<State>(states + warp * State::kFloats, unit.rows, exponent_scale, value_factor);
      ptx::mbarrier_arrive(&stored);
      const bool whole = !kSplit || unit.parts == 1;
      const bool last = walk.remaining == unit.length;
      const bool by_all = last || (kMergeHere && !whole);
      // Some warps combine a row each while the others read on, in turn; at the end all do.
      const int turn = (warp + kWarps - done * kCombiners % kWarps) % kWarps;
      if (!by_all && turn >= kCombiners) return;
      int row = by_all ? warp : turn;
      const auto find_place = [&] { return result.locate(unit.sequence, unit.kv_head, unit.first_row + row); };
      const auto find_addresses = [&] {
        if constexpr (kCluster) return inbox.addresses(row, rank - unit.own, unit.parts, unit.inverse, unit.own);
        return typename Inbox::Addresses{};
      };
      typename Result::RowPlace place{};
      typename Inbox::Addresses addresses{};
      if (row < unit.rows) {
        if (whole) {
          place = find_place();
        } else {
          addresses = find_addresses();
        }
      }
      if (by_all) {
        __syncthreads();
      } else {
        ptx::mbarrier_wait_parity(&stored, done % 2);
      }
#pragma unroll 1
      while (row < unit.rows) {
        CombinedRow<State> total;
        total.template add<FromShared, kWarps>(0, 1, kWarps, [&](int i) {
          return states + i * State::kFloats + row * State::kPitch;
        });
        if (whole) {
          result.write(place, total);
        } else if constexpr (kCluster) {
          inbox.send(total, addresses);
        } else {
          total.store(unit.part + row * State::kPitch);
        }
        row += by_all ? kWarps : kCombiners;
        if (row >= unit.rows) break;
        if (whole) {
          place = find_place();
        } else {
          addresses = find_addresses();
        }
      }

      if constexpr (kSplit && kMergeHere) {
        if (!whole) {
          __threadfence();
          __syncthreads();
          if (thread == 0) {
            u32* counter = counters + static_cast<i64>(unit.sequence) * units + unit.index;
            arrived_last = ptx::atom_add_acq_rel_gpu(counter, 1) == static_cast<u32>(unit.parts - 1);
            if (arrived_last) *counter = 0;
            __threadfence();
          }
          __syncthreads();
          if (arrived_last) {
            combine_parts<State, FromOtherBlocks, kWarps>(
                unit.parts, 0, 1, unit.rows, states,
                PartsInMemory<State>(partials, schedule, schedule.unit_begin(walk.sequence, walk.pass), together, beside),
                [&](int row, const CombinedRow<State>& total) {
                  result.write(result.locate(unit.sequence, unit.kv_head, unit.first_row + row), total);
                });
          }
        }
      }
      if constexpr (kCluster) {
        if (last) {
#pragma unroll
          for (int i = 0; i < 2; ++i) {
            const SharedUnit shared = shared_units[i];
            if (shared.parts == 0) continue;
            inbox.template end<kWarps>(
                shared,
                [&](int row) { return result.locate(shared.sequence, shared.kv_head, shared.first_row + row); },
                [&](const auto& at, int column, float4 values, float reference, float sum) {
                  result.write_part(at, column, values, reference, sum);
                });
          }
        }
      }
      if (last) return;
      if (by_all) __syncthreads();
      if (!by_all || warp < kCombiners) ptx::mbarrier_arrive(&combined);
    };

    // The ring is filled before anything else is prepared.
#pragma unroll 1
    for (int stage = 0; stage < kStages; ++stage) fetch_tile(stage, Is<true>{});
    if constexpr (kKeysEarly) {
      wait_for_launch_before();
      q = kept_in_order(q);
    }

    int position = warp;  // from the unit's begin to this warp's next tile
    int stage = 0;
#pragma unroll 1
    for (int done = 0;; ++done) {
      if (Division::kOne) __syncthreads();
      begin_unit();
      if constexpr (kCluster) {  // all blocks run, and their barriers are ready: this one may write to their memory
        if (done == 0) ptx::cluster_wait();
      }
      // Keys that every row sees: from the last query's window to the first query's own place.
      const int common_begin = kLimitLeft ? unit.keys - 1 - left : 0;
      const int common_end = unit.keys - queries + 1;
#pragma unroll 1
      for (; position < unit.length; position += kWarps) {
        ptx::cp_async_wait_group<kStages - 1>();
        __syncwarp();
        const int key = first_key_at(unit.keys, walk.tile + position);
        const bool all_seen = key >= common_begin && key + kTileKeys <= common_end;
        state.attend(ring + stage * Stage::kBytes, key, all_seen, left, rules, exponent_scale, slack);
        __syncwarp();
        fetch_tile(stage, Is<false>{});
        stage = stage + 1 == kStages ? 0 : stage + 1;
      }
      position -= unit.length;
      finish_unit(done);
      walk.advance(schedule, unit.length);
      if (walk.remaining <= 0) break;
    }
  };

  const auto begin_barriers = [&] {  // visible to all before the first unit is begun
    if (thread == 0) {
      ptx::mbarrier_init(&stored, kThreads);
      ptx::mbarrier_init(&combined, 32 * kCombiners);
      if constexpr (kCluster) {
        inbox.begin();
        shared_units[0].parts = shared_units[1].parts = 0;
      }
    }
    if constexpr (kCluster) ptx::cluster_arrive_relaxed();
  };
  if constexpr (!kSplit) {
    const int sequence = static_cast<int>(blockIdx.y + blockIdx.z * gridDim.y);
    if (sequence >= batch) return;
    fetch_rows(sequence, beside);
    Schedule<Order::kAlone> schedule{tables, tables + 1, sequence, 1, passes, 1};
    schedule.measure_one(key_lengths, key_lengths.keys(sequence));
    begin_barriers();
    work(schedule, 0, TableIndex{});
    return;
  }
  // kDealt: the grid's third axis are the sequences, each with groups of its own.
  const int group = static_cast<int>(blockIdx.y), groups = static_cast<int>(gridDim.y);
  const int sequence = static_cast<int>(blockIdx.z);
  if constexpr (kDealt) {
    const int keys = key_lengths.keys(sequence);
    Schedule<Order::kDealt> schedule{tables, tables + 1, sequence, 1, passes, groups};
    schedule.cut(least_positions);
    const int tile = schedule.template tile_at<kWarps>(warp + lane * kWarps, group);
    const TableIndex ahead = source.tile_entry(sequence, tile * kTileKeys, capacity);
    fetch_rows(sequence, beside);
    begin_barriers();
    if (!kByLengths || dealing_pays(key_lengths, batch, dealing_slack)) {
      schedule.measure_one(key_lengths, keys);
      work(schedule, group, ahead);
      return;
    }
  }
  if constexpr (!kDealt || kByLengths) {
    const int all_groups = kDealt ? groups * static_cast<int>(gridDim.z) : groups;
    const int own_group = kDealt ? sequence * groups + group : group;
    if (warp == kWarps - 1) {  // small tables come to L2 while the lengths are awaited
      const int line = (own_group * together + beside) * 32 + lane;
      if (kPaging == 0 && line < batch * table_lines)
        ptx::prefetch_global_l2(block_table + (line / table_lines) * table_batch +
                                line % table_lines * (128 / static_cast<int>(sizeof(TableIndex))));
    }
    if constexpr (!kDealt) {
      fetch_rows(own_group * batch / all_groups, beside);
      begin_barriers();
    }
    Schedule<Order::kLine> schedule{tables, tables + batch, 0, batch, passes, all_groups};
    schedule.template measure<kThreads>(key_lengths);
    schedule.cut(least_positions);
    work(schedule, own_group, TableIndex{});
  }
}
