// Attention for dense tensors on any GPU with mma.sync and cp.async (sm_80 and later): softmax(scale Q K^T + ...) V.
//
//   q [batch, queries, heads, head_dim]    k [batch, keys, kv_heads, head_dim]    v [batch, keys, kv_heads, value_dim]
//   out [batch, queries, heads, value_dim] lse [batch, heads, queries] fp32, natural logarithm, row-major, may be null
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
#include "attention/logits.cuh"
#include "attention/nonfinite.cuh"
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
// Whether values that are not finite are taken out of tiles, and of all or only those in which a key is hidden.
constexpr bool kDropsAlways = sizeof(Element) == 4 || kBias || kMask;
constexpr bool kDrops = kHides || kDropsAlways;

using Band = KeyBand<kLimitLeft, kLimitRight>;
using QueryTile = Tile<Element, kBlockRows, kHeadDim>;
using KeyTile = Tile<Element, kBlockKeys, kHeadDim>;
using ValueTile = Tile<Element, kBlockKeys, kValueDim>;
using Scores = float[kRowTiles][kKeyTiles][4];
using Output = float[kRowTiles][kColumnTiles][4];

// Dynamic shared memory: the query tile, then two stages of a key tile and a value tile each.
constexpr int kStageBytes = KeyTile::kBytes + ValueTile::kBytes;

// A warp's rows on one tile of keys. kBandTest: the tile reaches beyond what some row may see. row_of(r) describes row r of
// this lane; it is asked anew for every tile, because keeping the answers would take registers.
template <bool kBandTest, class RowOf>
__device__ __forceinline__ void attend_tile(Output& output, SoftmaxRow (&softmax)[kRowTiles * 2],
                                            RowOf row_of, const Band& band, const LogitRules& rules, float exponent_scale,
                                            int first_key, const unsigned char* queries, const unsigned char* stage) {
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
  }
  multiply_values<ValueTile>(output, scores, stage + KeyTile::kBytes);
}

extern "C" __global__ void __launch_bounds__(kThreads, kMinBlocks)
    attention(const Element* __restrict__ q, const Element* __restrict__ k, const Element* __restrict__ v, Element* out,
              float* lse, const BiasElement* __restrict__ bias, const u8* __restrict__ mask,
              const float* __restrict__ sinks, const float* __restrict__ alibi_slopes,  //
              i64 q_batch, i64 q_sequence, i64 q_head, i64 q_dim,                       //
              i64 k_batch, i64 k_sequence, i64 k_head, i64 k_dim,                       //
              i64 v_batch, i64 v_sequence, i64 v_head, i64 v_dim,                       //
              i64 out_batch, i64 out_sequence, i64 out_head, i64 out_dim,               //
              i64 bias_batch, i64 bias_head, i64 bias_query, i64 bias_key,              //
              i64 mask_batch, i64 mask_head, i64 mask_query, i64 mask_key,              //
              i64 sinks_stride, i64 slopes_stride,                                      //
              int queries, int keys, int heads, int group, int head_dim, int value_dim,
              int shift, int left, int right, float scale, float exponent_scale, float softcap, float softcap_rate) {
  extern __shared__ __align__(1024) unsigned char smem[];
  // The shuffle tells the compiler that the warp's number, and all that follows from it, is uniform.
  const int warp = __shfl_sync(kFullWarp, static_cast<int>(threadIdx.x) / 32, 0);
  const int lane = static_cast<int>(threadIdx.x) % 32;

  // The grid is one-dimensional, because only x may exceed 65535: row blocks fastest, so that blocks which read the same K
  // and V run together. Causal row blocks grow with their number; the long ones start first.
  const int pack = kPackHeads ? group : 1;
  const int total_rows = queries * pack;
  const int row_blocks = (total_rows + kBlockRows - 1) / kBlockRows;
  const int packed_heads = heads / pack;
  const int head_block = static_cast<int>(blockIdx.x) / row_blocks;
  int row_block = static_cast<int>(blockIdx.x) - head_block * row_blocks;
  if constexpr (kLimitRight) row_block = row_blocks - 1 - row_block;
  const int batch = head_block / packed_heads;
  const int first_head = (head_block - batch * packed_heads) * pack;
  const int block_row = row_block * kBlockRows;
  const int warp_row = block_row + warp * kWarpRows;

  const Element* q_base = q + batch * q_batch;
  const Element* k_base = k + batch * k_batch + first_head / group * k_head;
  const Element* v_base = v + batch * v_batch + first_head / group * v_head;

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
    return row;
  };
  // This lane's rows: lane / 4 and lane / 4 + 8 of each row tile. Rows past the end take the last row's place unstored.
  const auto row_number = [&](int r) { return warp_row + r / 2 * 16 + r % 2 * 8 + lane / 4; };
  const auto row_of = [&](int r) {
    const int row = min(row_number(r), total_rows - 1);
    return query_row(query_of(row), head_of(row));
  };
  const LogitRules rules{scale, softcap, softcap_rate, bias_key, mask_key};

  const auto copy_keys_and_values = [&](int tile) {
    unsigned char* stage = smem + QueryTile::kBytes + (tile - first_tile) % 2 * kStageBytes;
    const int first_key = tile * kBlockKeys;
    copy_tile<KeyTile, kCopyBytes, kThreads>(stage, k_base + first_key * k_sequence, k_sequence, keys - first_key,
                                             head_dim, k_dim, k_base);
    copy_tile<ValueTile, kCopyBytes, kThreads>(stage + KeyTile::kBytes, v_base + first_key * v_sequence, v_sequence,
                                               keys - first_key, value_dim, v_dim, v_base);
  };

  if (first_tile < end_tile) {
    copy_scattered_tile<QueryTile, kCopyBytes, kThreads>(
        smem,
        [&](int row) {
          row += block_row;
          return q_base + query_of(row) * q_sequence + head_of(row) * q_head;
        },
        total_rows - block_row, head_dim, q_dim, q_base);
    copy_keys_and_values(first_tile);
    ptx::cp_async_commit_group();
  }

  Output output = {};
  SoftmaxRow softmax[kRowTiles * 2];
  int first_repair = end_tile, last_repair = -1;  // tiles in which this thread dropped values that are not finite
  for (int tile = first_tile; tile < end_tile; ++tile) {
    unsigned char* stage = smem + QueryTile::kBytes + (tile - first_tile) % 2 * kStageBytes;
    const int first_key = tile * kBlockKeys;
    const int end_key = first_key + kBlockKeys;
    ptx::cp_async_wait_group<0>();
    if (kDrops && (kDropsAlways || first_key < common_begin || end_key > common_end)) {
      if (drop_own_nonfinite<ValueTile, kCopyBytes, kThreads>(stage + KeyTile::kBytes)) {
        first_repair = min(first_repair, tile);
        last_repair = tile;
      }
    }
    __syncthreads();
    if (tile + 1 < end_tile) copy_keys_and_values(tile + 1);
    ptx::cp_async_commit_group();

    if (!warp_has_rows || end_key <= warp_begin || first_key >= warp_end) continue;
    const unsigned char* warp_queries = smem + warp * kWarpRows * QueryTile::kPitch;
    if (first_key < warp_common_begin || end_key > warp_common_end) {
      attend_tile<true>(output, softmax, row_of, band, rules, exponent_scale, first_key, warp_queries, stage);
    } else {
      attend_tile<false>(output, softmax, row_of, band, rules, exponent_scale, first_key, warp_queries, stage);
    }
  }

#pragma unroll
  for (int r = 0; r < kRowTiles * 2; ++r) {
    const int row = row_number(r);
    const int query = query_of(row);
    const int head = min(head_of(row), heads - 1);
    softmax[r].finish(kScaleFirst ? 1.0f : scale);
    float factor = 1.0f;
    if (sinks != nullptr) factor = softmax[r].take_sink(sinks[head * sinks_stride]);
    factor *= softmax[r].normalizer();
    if (row >= total_rows) continue;
    if (lse != nullptr && lane % 4 == 0)
      lse[(static_cast<i64>(batch) * heads + head) * queries + query] = softmax[r].log_sum_exp();
    Element* out_row = out + batch * out_batch + query * out_sequence + head * out_head;
#pragma unroll
    for (int n = 0; n < kColumnTiles; ++n) {
      const int column = n * 8 + lane % 4 * 2;
      const float first = output[r / 2][n][r % 2 * 2] * factor;
      const float second = output[r / 2][n][r % 2 * 2 + 1] * factor;
      if constexpr (kPairStore) {
        const float pair[2] = {first, second};
        if (column < value_dim) store_floats(out_row + column, pair);
      } else {
        if (column < value_dim) out_row[column * out_dim] = from_float<Element>(first);
        if (column + 1 < value_dim) out_row[(column + 1) * out_dim] = from_float<Element>(second);
      }
    }
  }

  if constexpr (kDrops) {
    // Also the barrier behind the output, which other threads wrote.
    if (__syncthreads_or(last_repair >= 0) == 0) return;
    int* range = reinterpret_cast<int*>(smem);  // the tiles are no longer needed
    if (threadIdx.x == 0) {
      range[0] = end_tile;
      range[1] = -1;
    }
    __syncthreads();
    atomicMin(&range[0], first_repair);
    atomicMax(&range[1], last_repair);
    __syncthreads();
    for (int r = static_cast<int>(threadIdx.x); r < min(kBlockRows, total_rows - block_row); r += kThreads) {
      const int query = query_of(block_row + r);
      const int head = head_of(block_row + r);
      repair_row<Features>(out + batch * out_batch + query * out_sequence + head * out_head, out_dim, v_base, v_sequence,
                           v_dim, value_dim, range[0] * kBlockKeys, (range[1] + 1) * kBlockKeys, query_row(query, head),
                           band, rules);
    }
  }
}
