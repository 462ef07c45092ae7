// Attention on any GPU with mma.sync and cp.async (sm_80 and later): softmax(scale Q K^T + ...) V.
//
//   q [batch, queries, heads, head_dim]    k [batch, keys, kv_heads, head_dim]    v [batch, keys, kv_heads, value_dim]
//   out [batch, queries, heads, value_dim] lse [batch, heads, queries] fp32, natural logarithm, row-major, may be null
// kVarlen, sequences of any lengths one behind the other:
//   q [tokens, heads, head_dim]   k [tokens, kv_heads, head_dim]   v likewise   out like q   lse [heads, tokens]
//   cu_seqlens_q, key_offsets [batch + 1]: where each sequence's queries and keys begin and end (packed_sequences.cuh)
// kPaged, the same with keys in a cache of blocks, block_table [batch, columns] (paged_tile.cuh):
//   k [blocks, block_size, kv_heads, head_dim]   v likewise   key_offsets [batch]: the number of keys of each sequence
// kDescaled, Source e4m3: codes, converted to Element f16 as they are copied, which is exact; the KV head's descales go into
// the scale and the end. Else Source, Element and Result are one type.
// query_length, key_length: extent of the sequence axis of q and k; kPaged: the keys that a row of the table reaches.
// All tensors but lse by strides in elements. Query head h reads KV head h / group.
//
// One block takes kBlockRows query rows of one head and walks over the keys in tiles of kBlockKeys from left to right
// (FlashAttention-2): scores, online softmax and output stay in registers, so memory traffic is Q, K, V once a block and
// the output once; 2 * keys * (head_dim + value_dim) operations a row against kBlockRows rows a loaded key. Each warp
// owns 16 * kRowTiles rows; with two row tiles every fragment of K and V read from shared memory is used twice, which
// mma.sync needs: at 16 rows a warp, shared memory is the limit before the tensor core is.
//
// Tile j+1 of K and V travels (cp.async) while tile j is multiplied: two stages, one __syncthreads a tile, which says both
// "tile j has arrived for all" and "all are done with tile j-1, whose place tile j+1 takes".
//
// With few queries a head (decoding; kPackHeads), all query heads of a KV head become rows of one block, so K and V are read
// once for all of them. Row r is then query r / group of the group's head r % group.
//
// A row's result depends on nothing but its own inputs and kBlockKeys: tiles start at multiples of kBlockKeys whatever
// the window, and a tile in which a row sees nothing leaves it unchanged to the bit. So results do not depend on the batch.
#include "attention/dropout.cuh"
#include "attention/logits.cuh"
#include "attention/nonfinite.cuh"
#include "attention/packed_sequences.cuh"
#include "attention/paged_tile.cuh"
#include "attention/product.cuh"
#include "attention/tile.cuh"
#include "common/convert_element.cuh"
#include "common/key_band.cuh"
#include "common/online_softmax.cuh"
#include "common/types.cuh"
#include "common/vec.cuh"
#include "ptx/cp_async.cuh"

using namespace cki;
using namespace cki::attention;

constexpr int kThreads = 32 * kWarps;
constexpr int kWarpRows = 16 * kRowTiles;
constexpr int kBlockRows = kWarpRows * kWarps;
constexpr int kKeyTiles = kBlockKeys / 8;
constexpr int kColumnTiles = kValueDim / 8;

// What the logits go through besides the scale; the names are the prelude's.
struct Features {
  static constexpr bool kSoftcap = ::kSoftcap;
  static constexpr bool kAlibi = ::kAlibi;
  static constexpr bool kBias = ::kBias;
  static constexpr bool kMask = ::kMask;
  static constexpr bool kScaleFirst = ::kScaleFirst;
};
// Whether a key may be hidden from one query and visible to another, or hidden from all while it exists.
constexpr bool kHides = kLimitLeft || kLimitRight || kBias || kMask;
// Whether weights must be computed without the short form of common/online_softmax.cuh.
constexpr bool kExactWeights = kScaleFirst || sizeof(Element) == 4;
// Whether values that are not finite are taken out of tiles, and of all or only those in which a key is hidden. Dropout
// hides any key.
constexpr bool kDropsAlways = sizeof(Element) == 4 || kBias || kMask || kDropout;
constexpr bool kDrops = kHides || kDropsAlways;
// Whether every tile is tested for what its rows may see, though all may see all of most: the registers of wide rows of
// fp32, which have the smallest tiles of keys, hold no second form of the loop's body and the limits that choose between
// the two.
constexpr bool kTestsAlways = kBlockKeys == 16 && sizeof(Element) == 4 && kValueDim > 192;
static_assert(!kVarlen || !(kBias || kMask), "bias and mask have no packed form");
static_assert(kVarlen || !kPaged, "paged keys belong to packed queries");
static_assert(!kDescaled || kScaleFirst, "a descale may be negative or 0");

using Band = KeyBand<kLimitLeft, kLimitRight>;
using QueryTile = Tile<Element, kBlockRows, kHeadDim>;
using KeyTile = Tile<Element, kBlockKeys, kHeadDim>;
using ValueTile = Tile<Element, kBlockKeys, kValueDim>;
using Scores = float[kRowTiles][kKeyTiles][4];
using Output = float[kRowTiles][kColumnTiles][4];

// Dynamic shared memory: the query tile, two stages of a key tile and a value tile each, and for kPaged the places of
// the keys of two tiles; then a word with the first tile of which values that are not finite were dropped, for which wide
// rows of fp32 have no register.
constexpr int kStageBytes = KeyTile::kBytes + ValueTile::kBytes;
constexpr int kPlacesOffset = QueryTile::kBytes + 2 * kStageBytes;
constexpr int kFirstDroppedOffset = kPlacesOffset + (kPaged ? 2 * kBlockKeys * static_cast<int>(sizeof(KeyPlace)) : 0);

// A warp's rows on one tile of keys. kBandTest: the tile reaches beyond what some row may see. row_of(r) describes row r of
// this lane; it is asked anew for every tile, because keeping the answers would take registers.
template <bool kBandTest, class RowOf>
__device__ __forceinline__ void attend_tile(Output& output, SoftmaxRow (&softmax)[kRowTiles * 2],
                                            RowOf row_of, const Band& band, const LogitRules& rules, float exponent_scale,
                                            int first_key, const unsigned char* queries, const unsigned char* stage,
                                            const Dropout& dropout) {
  Scores scores;
  multiply_keys<QueryTile, KeyTile>(scores, queries, stage);
#pragma unroll
  for (int r = 0; r < kRowTiles * 2; ++r) {
    const int first = r % 2 * 2;
    apply_rules<Features, kBandTest>(scores[r / 2], first, first_key, row_of(r), band, rules);
    const float correction =
        softmax[r].take<kBandTest || kBias || kMask, kExactWeights>(scores[r / 2], first, exponent_scale);
#pragma unroll
    for (int n = 0; n < kColumnTiles; ++n) {
      output[r / 2][n][first] *= correction;
      output[r / 2][n][first + 1] *= correction;
    }
    if constexpr (kDropout) {
      const QueryRow<BiasElement> row = row_of(r);
      dropout.apply(scores[r / 2], first, first_key, row.query, row.dropout_row);
    }
  }
  multiply_values<ValueTile>(output, scores, stage + KeyTile::kBytes);
}

extern "C" __global__ void __launch_bounds__(kThreads, kMinBlocks)
    attention(const Source* __restrict__ q, const Source* __restrict__ k, const Source* __restrict__ v, Result* out,
              float* lse, const BiasElement* __restrict__ bias, const u8* __restrict__ mask,
              const float* __restrict__ sinks, const float* __restrict__ alibi_slopes,  //
              i64 q_batch, i64 q_sequence, i64 q_head, i64 q_dim,                       //
              i64 k_batch, i64 k_sequence, i64 k_head, i64 k_dim,                       //
              i64 v_batch, i64 v_sequence, i64 v_head, i64 v_dim,                       //
              i64 out_batch, i64 out_sequence, i64 out_head, i64 out_dim,               //
              i64 bias_batch, i64 bias_head, i64 bias_query, i64 bias_key,              //
              i64 mask_batch, i64 mask_head, i64 mask_query, i64 mask_key,              //
              i64 sinks_stride, i64 slopes_stride,                                      //
              int query_length, int key_length, int heads, int group, int head_dim, int value_dim,
              int dense_shift, int left, int right, float scale, float exponent_scale, float softcap,
              float softcap_rate,  //
              const QueryOffset* __restrict__ cu_seqlens_q, const KeyOffset* __restrict__ key_offsets,
              const TableIndex* __restrict__ block_table,                                             //
              i64 q_offset_stride, i64 key_offset_stride, i64 table_batch, i64 table_column,          //
              int sequences, int blocks, int block_size,  //
              const u64* __restrict__ dropout_seed, const u64* __restrict__ dropout_offset, u32 dropout_threshold,
              float dropout_factor,  //
              const float* __restrict__ q_descale, const float* __restrict__ k_descale,
              const float* __restrict__ v_descale, i64 q_descale_batch, i64 q_descale_head, i64 k_descale_batch,
              i64 k_descale_head, i64 v_descale_batch, i64 v_descale_head) {
  extern __shared__ __align__(1024) unsigned char smem[];
  // The shuffle tells the compiler that the warp's number, and all that follows from it, is uniform.
  const int warp = __shfl_sync(kFullWarp, static_cast<int>(threadIdx.x) / 32, 0);
  const int lane = static_cast<int>(threadIdx.x) % 32;

  // The grid is one-dimensional, because only x may exceed 65535: row blocks fastest, so that blocks which read the same K
  // and V run together. Causal row blocks grow with their number; the long ones start first.
  // Packed sequences: the slots of one head (packed_sequences.cuh), then the next head's; a slot may be left over.
  const int pack = kPackHeads ? group : 1;
  int batch, row_block, first_head;
  int queries = query_length, keys = key_length, shift = dense_shift;
  int first_token = 0;  // of the sequence, among the packed queries
  i64 k_origin, v_origin;
  if constexpr (kVarlen) {
    const QuerySegments<kBlockRows, QueryOffset> segments{cu_seqlens_q, q_offset_stride, sequences, query_length, pack};
    const int slots = segments.slots();
    first_head = static_cast<int>(blockIdx.x) / slots * pack;
    const int slot = static_cast<int>(blockIdx.x) % slots;
    const int segment = segments.find(slot);
    row_block = slot - segments.first_slot(segment);
    batch = segment - 1;
    first_token = segments.begin(segment);
    queries = segments.begin(segment + 1) - first_token;
    const int row_blocks = (queries * pack + kBlockRows - 1) / kBlockRows;
    if (row_block >= row_blocks) return;
    if constexpr (kLimitRight) row_block = row_blocks - 1 - row_block;
    int first_key = 0;
    keys = 0;
    if (batch >= 0 && batch < sequences) {
      if constexpr (kPaged) {
        keys = offset_within(key_offsets, batch * key_offset_stride, key_length);
      } else {
        first_key = offset_within(key_offsets, batch * key_offset_stride, key_length);
        keys = max(0, offset_within(key_offsets, (batch + 1) * key_offset_stride, key_length) - first_key);
      }
    }
    shift = kBottomRight ? keys - queries : 0;
    k_origin = first_key * k_sequence;
    v_origin = first_key * v_sequence;
  } else {
    const int row_blocks = (queries * pack + kBlockRows - 1) / kBlockRows;
    const int packed_heads = heads / pack;
    const int head_block = static_cast<int>(blockIdx.x) / row_blocks;
    row_block = static_cast<int>(blockIdx.x) - head_block * row_blocks;
    if constexpr (kLimitRight) row_block = row_blocks - 1 - row_block;
    batch = head_block / packed_heads;
    first_head = (head_block - batch * packed_heads) * pack;
    k_origin = batch * k_batch;
    v_origin = batch * v_batch;
  }
  const int total_rows = queries * pack;
  const int block_row = row_block * kBlockRows;
  const int warp_row = block_row + warp * kWarpRows;

  // Where the sequence's queries, outputs and LSE begin.
  const auto q_origin = [&] { return kVarlen ? first_token * q_sequence : batch * q_batch; };
  const auto out_origin = [&] { return kVarlen ? first_token * out_sequence : batch * out_batch; };
  const auto lse_index = [&](int head, int query) {
    return kVarlen ? static_cast<i64>(head) * query_length + first_token + query
                   : (static_cast<i64>(batch) * heads + head) * queries + query;
  };
  const int kv_head = first_head / group;
  const Source* q_base = q + q_origin();
  const Source* k_base = k + k_origin + kv_head * k_head;
  const Source* v_base = v + v_origin + kv_head * v_head;

  // Tiles of keys that some row of the block may see, and of those the keys that all rows see.
  const Band band{keys, shift, left, right};
  const int first_query = block_row / pack;
  const int last_query = (min(block_row + kBlockRows, total_rows) - 1) / pack;
  const int first_tile = band.begin(first_query) / kBlockKeys;
  const int end_tile = (band.end(last_query) + kBlockKeys - 1) / kBlockKeys;
  const int common_begin = band.begin(last_query);
  const int common_end = band.end(first_query);

  // The same for this warp, which skips tiles that only other warps see.
  const bool warp_has_rows = warp_row < total_rows;
  const int warp_first_query = min(warp_row, total_rows - 1) / pack;
  const int warp_last_query = (min(warp_row + kWarpRows, total_rows) - 1) / pack;
  const int warp_begin = band.begin(warp_first_query), warp_end = band.end(warp_last_query);
  const int warp_common_begin = band.begin(warp_last_query), warp_common_end = band.end(warp_first_query);

  // The query and the head of a row.
  const auto query_of = [&](int row) { return kPackHeads ? row / group : row; };
  const auto head_of = [&](int row) { return kPackHeads ? first_head + row % group : first_head; };
  const auto query_row = [&](int query, int head) {
    QueryRow<BiasElement> row;
    row.query = query;
    if constexpr (kAlibi) row.slope = alibi_slopes[head * slopes_stride];
    if constexpr (kBias) row.bias = bias + batch * bias_batch + head * bias_head + query * bias_query;
    if constexpr (kMask) row.mask = mask + batch * mask_batch + head * mask_head + query * mask_query;
    if constexpr (kDropout) row.dropout_row = static_cast<u32>(batch) * static_cast<u32>(heads) + static_cast<u32>(head);
    return row;
  };
  // This lane's rows: lane / 4 and lane / 4 + 8 of each row tile. Rows past the end take the last row's place unstored.
  const auto row_number = [&](int r) { return warp_row + r / 2 * 16 + r % 2 * 8 + lane / 4; };
  const auto row_of = [&](int r) {
    const int row = min(row_number(r), total_rows - 1);
    return query_row(query_of(row), head_of(row));
  };
  float logit_descale = 1.0f;
  const bool has_descale = !kVarlen || (batch >= 0 && batch < sequences);  // rows of no sequence have none
  if (kDescaled && has_descale) {
    logit_descale = q_descale[batch * q_descale_batch + kv_head * q_descale_head] *
                    k_descale[batch * k_descale_batch + kv_head * k_descale_head];
  }
  const LogitRules rules{scale * logit_descale, softcap, softcap_rate * logit_descale, bias_key, mask_key};
  Dropout dropout{};
  if constexpr (kDropout) dropout = {*dropout_seed, static_cast<u32>(*dropout_offset), dropout_threshold};

  // kPaged: where the keys of a tile lie, found a tile ahead. Two tiles' places, as one may still be read.
  OwnPlaces<kBlockKeys, kThreads> own_places;
  const BlockRow<TableIndex> block_row_of_table{block_table + batch * table_batch, table_column, blocks, block_size};
  const auto places_of = [&](int tile) {
    return reinterpret_cast<KeyPlace*>(smem + kPlacesOffset) + (tile - first_tile) % 2 * kBlockKeys;
  };
  const auto find_places = [&](int tile) {
    own_places.find(block_row_of_table, tile * kBlockKeys, band.begin(first_query), keys);
  };

  const auto copy_keys_and_values = [&](int tile) {
    unsigned char* stage = smem + QueryTile::kBytes + (tile - first_tile) % 2 * kStageBytes;
    if constexpr (kPaged) {
      const KeyPlace* places = places_of(tile);
      copy_paged_tile<KeyTile, kCopyBytes, kThreads>(stage, places, k_base, k_batch, k_sequence, head_dim, k_dim);
      copy_paged_tile<ValueTile, kCopyBytes, kThreads>(stage + KeyTile::kBytes, places, v_base, v_batch, v_sequence,
                                                       value_dim, v_dim);
    } else {
      const int first_key = tile * kBlockKeys;
      copy_tile<KeyTile, kCopyBytes, kThreads>(stage, k_base + first_key * k_sequence, k_sequence, keys - first_key,
                                               head_dim, k_dim, k_base);
      copy_tile<ValueTile, kCopyBytes, kThreads>(stage + KeyTile::kBytes, v_base + first_key * v_sequence, v_sequence,
                                                 keys - first_key, value_dim, v_dim, v_base);
    }
  };

  int* const first_dropped = reinterpret_cast<int*>(smem + kFirstDroppedOffset);
  if constexpr (kDrops) {
    if (threadIdx.x == 0) *first_dropped = end_tile;
    __syncthreads();
  }
  if (first_tile < end_tile) {
    copy_scattered_tile<QueryTile, kCopyBytes, kThreads>(
        smem,
        [&](int row) {
          row += block_row;
          return q_base + query_of(row) * q_sequence + head_of(row) * q_head;
        },
        total_rows - block_row, head_dim, q_dim, q_base);
    if constexpr (kPaged) {
      find_places(first_tile);
      own_places.publish(places_of(first_tile));
      find_places(first_tile + 1);
      __syncthreads();
    }
    copy_keys_and_values(first_tile);
    ptx::cp_async_commit_group();
  }

  Output output = {};
  SoftmaxRow softmax[kRowTiles * 2];
  for (int tile = first_tile; tile < end_tile; ++tile) {
    unsigned char* stage = smem + QueryTile::kBytes + (tile - first_tile) % 2 * kStageBytes;
    const int first_key = tile * kBlockKeys;
    const int end_key = first_key + kBlockKeys;
    ptx::cp_async_wait_group<0>();
    if (kDrops && (kDropsAlways || first_key < common_begin || end_key > common_end)) {
      if (drop_own_nonfinite<ValueTile, kCopyBytes, kThreads>(stage + KeyTile::kBytes)) atomicMin(first_dropped, tile);
    }
    if constexpr (kPaged) own_places.publish(places_of(tile + 1));
    __syncthreads();
    if (tile + 1 < end_tile) copy_keys_and_values(tile + 1);
    ptx::cp_async_commit_group();
    if constexpr (kPaged) find_places(tile + 2);

    if (!warp_has_rows || end_key <= warp_begin || first_key >= warp_end) continue;
    const unsigned char* warp_queries = smem + warp * kWarpRows * QueryTile::kPitch;
    if (kTestsAlways || first_key < warp_common_begin || end_key > warp_common_end) {
      attend_tile<true>(output, softmax, row_of, band, rules, exponent_scale, first_key, warp_queries, stage,
                        dropout);
    } else {
      attend_tile<false>(output, softmax, row_of, band, rules, exponent_scale, first_key, warp_queries, stage,
                         dropout);
    }
  }

#pragma unroll
  for (int r = 0; r < kRowTiles * 2; ++r) {
    const int row = row_number(r);
    const int query = query_of(row);
    const int head = min(head_of(row), heads - 1);
    softmax[r].finish(kScaleFirst ? 1.0f : scale);
    float factor = 1.0f;
    if (sinks != nullptr) factor = softmax[r].take_logit(sinks[head * sinks_stride]);
    factor *= softmax[r].normalizer();
    if constexpr (kDropout) factor *= dropout_factor;
    if (kDescaled && has_descale) factor *= v_descale[batch * v_descale_batch + kv_head * v_descale_head];
    if (row >= total_rows) continue;
    if (lse != nullptr && lane % 4 == 0)
      lse[lse_index(head, query)] = softmax[r].log_sum_exp();
    Result* out_row = out + out_origin() + query * out_sequence + head * out_head;
#pragma unroll
    for (int n = 0; n < kColumnTiles; ++n) {
      const int column = n * 8 + lane % 4 * 2;
      const float first = output[r / 2][n][r % 2 * 2] * factor;
      const float second = output[r / 2][n][r % 2 * 2 + 1] * factor;
      if constexpr (kPairStore) {
        const float pair[2] = {first, second};
        if (column < value_dim) store_floats(out_row + column, pair);
      } else {
        if (column < value_dim) out_row[column * out_dim] = from_float<Result>(first);
        if (column + 1 < value_dim) out_row[(column + 1) * out_dim] = from_float<Result>(second);
      }
    }
  }

  if constexpr (kDrops) {
    __syncthreads();  // also behind the output, which other threads wrote
    if (*first_dropped == end_tile) return;
    const auto value_row = [&](int key) -> const Source* {
      if constexpr (kPaged) {
        const KeyPlace place = block_row_of_table.find(key);
        return place.block < 0 ? nullptr : v_base + place.block * v_batch + place.slot * v_sequence;
      } else {
        return v_base + key * v_sequence;
      }
    };
    for (int r = static_cast<int>(threadIdx.x); r < min(kBlockRows, total_rows - block_row); r += kThreads) {
      const int query = query_of(block_row + r);
      const int head = head_of(block_row + r);
      Result* out_row = out + out_origin() + query * out_sequence + head * out_head;
      const QueryRow<BiasElement> row = query_row(query, head);
      const auto is_kept = [&](int key) { return !kDropout || !dropout.drops(key, query, row.dropout_row); };
      repair_row<Features, kPaged>(out_row, out_dim, value_row, v_dim, value_dim, *first_dropped * kBlockKeys,
                                   end_tile * kBlockKeys, row, band, rules, is_kept);
    }
  }
}
