// y[M, N] = act(x[M, K] w[K, N] + bias[N]) + residual[M, N] on Hopper (sm_90a): wgmma on operands brought by TMA.
//
// f16 or bf16 with fp32 sums: the same function as gemm/linear.cu, for matrices whose rows TMA can describe.
//
// Roles.   Warpgroup 0 is the producer: one thread keeps TMA copies in flight through a ring of kStages stages, 64
//          elements of K each; its registers go to the two consumer warpgroups (setmaxnreg), which multiply and finish.
// Tiles.   Persistent: block b computes tiles b, b + gridDim, ...; they are numbered so that those that run at the same
//          time share rows of x and columns of w in L2 (rasterize.cuh). The producer runs ahead into the next tile.
// Sharing. Cooperative: both consumers work on one tile, half of its rows each. The tensor core idles while both finish
//          it. kPingPong: they take the tiles in turn, each a whole one, and one's finish runs beside the other's
//          products; turns (common/warpgroup_turns.cuh) keep one tile's products together.
// Narrow.  kNarrowN > 0: tiles from column up_column on have kNarrowN columns, and come last, so that the blocks end at more
//          like the same time. A number of wide columns that the planner chooses makes the rounds those of narrow tiles alone.
// Loop.    One stage's products stay in flight while the next are issued; a stage is released when its own have ended.
//          Beside a running tensor core warps issue a quarter of what they could, and the one that finishes a tile takes part
//          of that: of many instructions between two stages the next products would come late.
// Traffic. x is read ceil(N / kBlockN) times and w ceil(M / kBlockM) times, mostly from L2; 2 M N K flops.
// Split.   kSplit = 2, for fewer tiles than SMs: a cluster of two blocks has one tile, each block half of K. Each stores
//          half of its sums into the other's shared memory, and finishes the other half (cluster_sum.cuh). Not
//          persistent: a block has one tile.
// Small.   kConsumers = 1, for few rows: blocks so small that two share an SM, and that the next launch's are there when
//          this one's end.
// Sharers. kSharers > 1: the blocks of a cluster compute tiles below each other, and each brings a part of their weight
//          for all (multicast), which saves traffic from L2. A stage is free when all blocks' consumers have read it.
// Gated.   kGated: y = act(x w_gate + bias_gate) (x w_up + bias_up), of N columns each, which begin at gate_column and
//          up_column of w. A tile has as many columns of both, so that a lane holds a gate and its up; no weight moves.
// Norms.   kRowNorm: the rows of x, or those of the residual, are normalised by their statistics (row_norm.cuh), which
//          a launch before has stored with kStatistics. kSpareWarps: the producer's other warps read those of x, a tile
//          ahead of the consumers, who otherwise wait for them in front of each tile. With kParks they wait in shared memory.
// Launch.  May begin while the launch before it in the stream ends: nothing that one may have written is read, and
//          nothing is written, before griddepcontrol_wait. The next one may when kLeft of this one's copies are left, so
//          that it asks for its first weights (kStagesAhead) when memory has nothing else to do; with -1 at once.
// Sums.    Over K in one order, whatever the tile; with kSplit, parts in the order of K. Tiles that consumers share start
//          from the bias, others end with it.
//
// Prelude: Element (cki::f16, cki::bf16), Bias (Element or float), kBlockM, kRowsX, kBlockN, kStages, kStagesAhead,
//   kLeft, kConsumers, kMinBlocks, kPingPong, kNarrowN, kSplit, kSharers, kGated, kWeightAlongN (w is [K, N], else [N, K]),
//   kHasBias, kHasResidual, kActivation, kRowNorm, kSpareWarps, kStatistics, kTmaStore, kTmaResidual, kVectorY,
//   kVectorBias, kVectorResidual (1 or 2: elements an access), kProducerRegisters, kConsumerRegisters.
// Boxes: x_map 64 x kRowsX; w_map 64 columns x 64 along N, 64 x kBlockN / kBoxes along K (64 x 64 with kNarrowN); y_map
//   and residual_map 64 x 16, unused without kTmaStore and kTmaResidual.
// Dynamic shared memory: HopperLayout::kBytes (tiles.cuh); then with kTmaResidual a barrier a warp, with kSpareWarps
//   MomentsBoard::kBytes (row_norm.cuh), with kParks ParkedRows::kBytes a warp (parked_rows.cuh).
#include "common/constant.cuh"
#include "common/stage_ring.cuh"
#include "common/types.cuh"
#include "common/warpgroup_turns.cuh"
#include "common/wgmma_descriptor.cuh"
#include "gemm/activation.cuh"
#include "gemm/hopper/cluster_sum.cuh"
#include "gemm/hopper/epilogue.cuh"
#include "gemm/hopper/parked_rows.cuh"
#include "gemm/hopper/row_norm.cuh"
#include "gemm/hopper/tiles.cuh"
#include "gemm/rasterize.cuh"
#include "ptx/barrier.cuh"
#include "ptx/cluster.cuh"
#include "ptx/elect.cuh"
#include "ptx/grid_dependency.cuh"
#include "ptx/mbarrier.cuh"
#include "ptx/setmaxnreg.cuh"
#include "ptx/tma.cuh"
#include "ptx/wgmma.cuh"

using namespace cki;

constexpr int kThreads = 128 * (kConsumers + 1);
// One wgmma tile high: consumers share the columns.
constexpr bool kShareColumns = kConsumers > 1 && !kPingPong && kBlockM == 64;
constexpr int kGroupRows = kPingPong || kShareColumns ? kBlockM : kBlockM / kConsumers;  // of a consumer
constexpr int kGroupColumns = kShareColumns ? kBlockN / kConsumers : kBlockN;
constexpr int kRowTiles = kGroupRows / 64;
constexpr int kOutN = kGated ? kBlockN / 2 : kBlockN;  // columns of y in a tile
constexpr int kNarrowColumns = kNarrowN > 0 ? kNarrowN : kGroupColumns;
constexpr int kTilesPerRound = kPingPong ? kConsumers : 1;
static_assert(kRowTiles >= 1 && kRowTiles * 64 == kGroupRows, "a consumer has whole wgmma tiles");
static_assert(kRowTiles * kGroupColumns <= 384, "at most 192 accumulators a thread");
static_assert(kGroupColumns % gemm::kSlabColumns == 0, "a consumer has whole slabs");
static_assert(kSplit == 1 || !kPingPong, "the blocks of a cluster have one tile");
static_assert(kStages >= 2, "a stage is released only when the products of the next have been issued");

// Of a warp: slabs that it finishes of a tile, and buffers for them.
constexpr int kAcross = kGroupColumns / (kGated ? 2 : 1) / gemm::kSlabColumns, kSlabs = kRowTiles * kAcross;
constexpr int kBuffers = !kTmaResidual || kSlabs <= gemm::kOutputBuffers ? gemm::kOutputBuffers
                         : kSlabs < gemm::kResidualBuffers               ? kSlabs
                                                                         : gemm::kResidualBuffers;
constexpr int kFetchedFirst = kSlabs < kBuffers ? kSlabs : kBuffers;  // slabs of the residual; the others follow
static_assert(!kTmaResidual || (kHasResidual && kTmaStore && kSplit == 1), "slabs of a residual that TMA can bring");

constexpr gemm::RowNorm kNorm = static_cast<gemm::RowNorm>(kRowNorm);
constexpr bool kNormalisesX = kNorm == gemm::RowNorm::kLayerNorm || kNorm == gemm::RowNorm::kRmsNorm;
constexpr bool kNormalisesResidual = kNorm == gemm::RowNorm::kResidual;

// Wide tiles whose rows are normalised: what a finish reads waits for it in shared memory, for the sums leave no registers.
constexpr bool kParks = kNormalisesX && kRowTiles * kGroupColumns > 256;

// The epilogue; the names are the prelude's.
struct Rules {
  static constexpr gemm::Activation kActivation = static_cast<gemm::Activation>(::kActivation);
  static constexpr bool kHasBias = ::kHasBias, kHasResidual = ::kHasResidual, kTmaStore = ::kTmaStore;
  static constexpr bool kTmaResidual = ::kTmaResidual;
  static constexpr int kBuffers = ::kBuffers;
  static constexpr bool kGated = ::kGated, kStatistics = ::kStatistics;
  static constexpr gemm::RowNorm kRowNorm = kNorm;
  // Of tiles that consumers share, whose finish is beside nothing; not where a norm scales the sums, or two blocks add them
  // up. Beside another's products the moves cost more than additions in the finish.
  static constexpr bool kBiasInSums = kHasBias && !kPingPong && kSplit == 1 && !kNormalisesX;
  static constexpr bool kBiasParked = kParks && kHasBias;
  static constexpr int kVectorY = ::kVectorY, kVectorBias = ::kVectorBias, kVectorResidual = ::kVectorResidual;
};

static_assert(kSplit == 1 || kNorm == gemm::RowNorm::kNone, "a warp finishes the rows that it multiplies");
// What belongs to a tile's columns is loaded before its products, where registers allow: a finish that nothing hides waits
// for no memory. Else that of its first slab, beside the last products.
constexpr bool kHoldsColumns =
    kPingPong && kAcross <= 2 && !kNormalisesResidual && (kNorm == gemm::RowNorm::kNone || sizeof(Bias) == 2);
constexpr int kHeldSlabs = kHoldsColumns ? kAcross : 1;
static_assert(!kGated || kNorm != gemm::RowNorm::kLayerNorm, "the columns that are multiplied again are y's");
static_assert(Rules::kActivation != gemm::Activation::kGeluPairs || (kTmaStore && !kHasResidual && !kGated),
              "pairs are activated as they are stored");
static_assert(kHasResidual || !kNormalisesResidual, "a residual to normalise");
static_assert(kTmaStore || !kStatistics, "a lane has whole eights of columns");
static_assert(!kGated || (kSplit == 1 && !kShareColumns && !kHasResidual), "a warp has gates and ups of its columns");

// Of a stage's weight along K.
constexpr int kBoxes = kNarrowN > 0 ? kBlockN / gemm::kSlabColumns : kGated && kSharers == 1 ? 2 : kSharers;
using Layout = gemm::HopperLayout<kBlockM, kBlockN, kStages, 4 * kConsumers, kBuffers>;
constexpr int kLandedBytes = kTmaResidual ? 4 * kConsumers * 8 : 0;  // a barrier a warp
constexpr int kCluster = kSplit * kSharers;  // blocks
static_assert(kSplit == 1 || kSharers == 1, "blocks of a cluster share a tile or a weight");
static_assert(kNarrowN % gemm::kSlabColumns == 0 && kNarrowN < kBlockN, "a narrower tile has whole slabs");
static_assert(kNarrowN == 0 || (kPingPong && kCluster == 1 && !kGated && !kStatistics && !kNormalisesResidual),
              "narrower tiles of consumers in turn, without statistics, gates and norms of the residual");

// Of a tile that consumers share, multiplied before its residual is asked for; half of them, where there are fewer than 16.
constexpr int kStagesBeforeResidual = 8;

using Ring = StageRing<kStages>;
constexpr int kSpareWarpCount = 3;  // the producer's warpgroup, less its one thread's warp
using Board = gemm::MomentsBoard<kTilesPerRound, kBlockM, kSpareWarpCount, kPingPong ? 4 : 4 * kConsumers>;
static_assert(!kSpareWarps || kNormalisesX, "spare warps read the statistics of x");
using Parked = gemm::ParkedRows<kRowTiles, kGroupColumns, Bias>;
static_assert(!kParks || (!kSpareWarps && kTmaStore && !kHasResidual && !kStatistics && !kGated), "rows that can be stored again");
using Pushed = gemm::PushedSum<kRowTiles, kGroupColumns / 2, 4 * kConsumers, kSplit>;
static_assert(kSplit == 1 || (kSplit == 2 && Pushed::kFits), "each block finishes half of a tile");

// The cluster's last barrier: all barriers have been arrived at. It orders no memory, which would cost half a
// microsecond.
__device__ __forceinline__ void end_cluster() {
  ptx::cluster_arrive_relaxed();
  ptx::cluster_wait();
}

// By warps that compute nothing: their share in the consumers' cluster barriers.
__device__ __forceinline__ void leave_cluster() {
  if constexpr (kSplit > 1) {
    Pushed::pass_by();
  } else if constexpr (kSharers > 1) {
    end_cluster();
  }
}

// A consumer's way through the stages of its tiles. It is where a stage's barriers lie, from which the descriptor of x's
// rows follows: a loop of fewer instructions than one that computes all from the stage's number.
class StageWalk {
 public:
  // x: the descriptor of the consumer's rows in the first stage.
  __device__ __forceinline__ StageWalk(const Ring& ring, u64 x) : barriers_(reinterpret_cast<unsigned char*>(ring.full)) {
    u32 lower[1] = {static_cast<u32>(x)};
    ptx::wgmma_fence_registers(lower);  // opaque: else it is computed anew for each stage
    x_ = gemm::with_lower(x, lower[0]);
  }

  // Until the stage's copies have landed.
  __device__ __forceinline__ void wait() const { ptx::mbarrier_wait_parity(full(place_), phase_); }

  // The descriptor of the stage's x. The shuffle: in uniform registers, where wgmma wants it.
  __device__ __forceinline__ u64 x() const {
    return gemm::with_lower(x_, static_cast<u32>(x_) + __shfl_sync(0xffffffffu, place_, 0) * kUnits);
  }

  // Where the stage is, for `release`.
  __device__ __forceinline__ u32 place() const { return place_; }

  // This warp is done with the stage that is there: all blocks that copy into it may do so again.
  __device__ __forceinline__ void release(u32 place) const {
    const u32 lane = threadIdx.x % 32;
    if constexpr (kSharers == 1) {
      if (lane == 0) ptx::mbarrier_arrive(full(place) + kStages);
    } else {
      if (lane < kSharers) ptx::mbarrier_arrive_cluster_unordered(full(place) + kStages, lane);
    }
  }

  // On to the next stage.
  __device__ __forceinline__ void advance() {
    const bool is_last = place_ == (kStages - 1) * kStep;
    place_ = is_last ? 0 : place_ + kStep;
    phase_ ^= is_last ? 1 : 0;
  }

  // Over stages that the other consumer reads.
  __device__ __forceinline__ void skip(int count) {
    const u32 stage = place_ / kStep + static_cast<u32>(count);
    phase_ ^= stage / kStages & 1;
    place_ = stage % kStages * kStep;
  }

 private:
  static constexpr u32 kStep = sizeof(u64);                         // from one stage's barrier to the next
  static constexpr u32 kUnits = Layout::kStageBytes / 16 / kStep;  // of a descriptor, for each byte of that
  static_assert(Layout::kStageBytes % (16 * kStep) == 0, "a stage is whole units for each byte");

  // The barriers `empty` follow those of all stages.
  __device__ __forceinline__ u64* full(u32 place) const { return reinterpret_cast<u64*>(barriers_ + place); }

  u64 x_;
  unsigned char* barriers_;
  u32 place_ = 0;
  u32 phase_ = 0;
};

// Tiles by number: those that are wide, and behind them those that are not.
struct TileOrder {
  int tiles_m, wide_n, wide, narrow_n = 0, all;
  int narrow_column;  // from which on they are not

  __device__ __forceinline__ TileOrder(int rows, int columns, int narrow_from)
      : tiles_m((rows + kSharers * kBlockM - 1) / (kSharers * kBlockM)), narrow_column(narrow_from) {
    const int wide_columns = kNarrowN > 0 ? narrow_from : columns;
    wide_n = (wide_columns + kOutN - 1) / kOutN;
    wide = all = tiles_m * wide_n;
    if constexpr (kNarrowN > 0) {
      narrow_n = (columns - narrow_from + kNarrowColumns - 1) / kNarrowColumns;
      all += tiles_m * narrow_n;
    }
  }

  struct Place {
    int m, column, width;
  };

  __device__ __forceinline__ Place operator()(int number) const {
    if constexpr (kNarrowN > 0) {
      if (number >= wide) {
        const gemm::TileIndex tile = gemm::tile_of_block(number - wide, tiles_m, narrow_n);
        return {tile.m, narrow_column + tile.n * kNarrowColumns, kNarrowColumns};
      }
    }
    const gemm::TileIndex tile = gemm::tile_of_block(number, tiles_m, wide_n);
    return {tile.m, tile.n * kOutN, kBlockN};
  }
};

extern "C" __global__ void __launch_bounds__(kThreads, kMinBlocks)
    linear_hopper(const __grid_constant__ TensorMap x_map, const __grid_constant__ TensorMap w_map,
                  const __grid_constant__ TensorMap y_map, const __grid_constant__ TensorMap residual_map,
                  const Bias* bias, const Element* residual, Element* y,
                  int rows, int columns, int depth, int gate_column, int up_column, i64 bias_stride,
                  i64 residual_stride, i64 residual_column_stride, i64 y_stride, i64 y_column_stride,
                  const float* statistics, float epsilon, const Bias* gamma, float* y_statistics,
                  const Element* x, const Element* w, i64 x_stride, i64 w_stride_k, i64 w_stride_n, u32* zeroed) {
  extern __shared__ __align__(1024) unsigned char smem[];
  // The shuffle tells the compiler that the number, and the branches on it, are uniform in the warp.
  const int warpgroup = __shfl_sync(0xffffffffu, static_cast<int>(threadIdx.x) / 128, 0);
  // With sharers, of clusters' tiles: kSharers tiles below each other.
  const TileOrder order(rows, columns, up_column);
  const int tiles = order.all, all_k_tiles = (depth + gemm::kStageDepth - 1) / gemm::kStageDepth;
  const int block = static_cast<int>(blockIdx.x) / kCluster, blocks = static_cast<int>(gridDim.x) / kCluster;
  const int rank = static_cast<int>(blockIdx.x) % kCluster;  // which part of K, or which of the tiles below each other
  const int k_part = kSplit > 1 ? rank : 0, m_part = kSharers > 1 ? rank : 0;
  const int first_k = static_cast<int>(static_cast<i64>(all_k_tiles) * k_part / kSplit);
  const int k_tiles = static_cast<int>(static_cast<i64>(all_k_tiles) * (k_part + 1) / kSplit) - first_k;

  Ring ring(smem + Layout::kRing);
  const Board board{smem + Layout::kBytes + kLandedBytes};
  u64* const landed = reinterpret_cast<u64*>(smem + Layout::kBytes);
  if (threadIdx.x == 0) {
    ptx::prefetch_tensormap(&x_map);
    ptx::prefetch_tensormap(&w_map);
    if constexpr (kTmaStore) ptx::prefetch_tensormap(&y_map);
    ring.initialise(kSharers * (kPingPong ? 4 : 4 * kConsumers));
    if constexpr (kSpareWarps) board.initialise();
    if constexpr (kTmaResidual) {
      ptx::prefetch_tensormap(&residual_map);
      for (int i = 0; i < 4 * kConsumers; ++i) ptx::mbarrier_init(landed + i, 1);
    }
    ptx::fence_mbarrier_init();
  }
  if constexpr (kSharers > 1) {
    ptx::cluster_sync();
  } else {
    __syncthreads();
  }
  if constexpr (kSplit > 1) ptx::cluster_arrive_relaxed();  // the block has started; who writes into it waits for that

  gemm::Result<Element, Bias> result = {
      bias,   kVectorBias == 2 ? 1 : bias_stride,
      {residual, {residual_stride}, kVectorResidual == 2 ? 1 : residual_column_stride},
      {y, {y_stride}, kVectorY == 2 ? 1 : y_column_stride},
      &y_map, &residual_map, rows, columns, gate_column, up_column, gamma, y_statistics};
  const gemm::Operands<Element> operands = {x, w, x_stride, w_stride_k, w_stride_n, rows, columns, depth};
  const auto weight_columns = [&](const TileOrder::Place& tile) {
    return gemm::TileColumns{gate_column + tile.column, kGated ? up_column + tile.column : 0, kGated ? kOutN : kBlockN,
                             kNarrowN > 0 ? tile.width : kBlockN};
  };

  if (warpgroup == 0) {
    if constexpr (kConsumers > 1) ptx::setmaxnreg_dec<kProducerRegisters>();
    if (threadIdx.x >= 32) {
      if constexpr (kSpareWarps) {
        ptx::griddepcontrol_wait();
        u32 turn = 0;
        for (int number = block; number < tiles; number += blocks, ++turn) {
          const int row = (order(number).m * kSharers + m_part) * kBlockM;
          board.write(turn % kTilesPerRound, turn / kTilesPerRound, static_cast<int>(threadIdx.x) / 32 - 1, statistics,
                      row, rows, kNormalisesX ? depth : columns, epsilon, kNorm != gemm::RowNorm::kRmsNorm);
        }
      }
      leave_cluster();
      return;
    }
    const bool elected = ptx::elect_one();
    // The others of the warp may go, or must meet it at the cluster's end. Alone, its loop is uniform for the compiler.
    if (kCluster == 1 && !elected) return;
    if (elected) {
      const auto stage_depth = [&](int k) { return (first_k + k) * gemm::kStageDepth; };
      // The first weights towards L2: no read, so it need not wait for the launch before.
      const gemm::TileColumns first = weight_columns(order(block));
      for (int k = 0; k < min(k_tiles, kStagesAhead); ++k) {
        gemm::prefetch_weight<Layout, kWeightAlongN, kSharers, kBoxes>(&w_map, first, stage_depth(k), m_part);
      }
      ptx::griddepcontrol_wait();
      if constexpr (kLeft < 0) ptx::griddepcontrol_launch_dependents();
      for (int number = block; number < tiles; number += blocks) {
        const TileOrder::Place tile = order(number);
        const int row = (tile.m * kSharers + m_part) * kBlockM;
        const gemm::TileColumns from = weight_columns(tile);
        for (int k = 0; k < k_tiles; ++k) {
          ring.wait_empty();
          gemm::load_stage<Layout, kRowsX, kWeightAlongN, kSharers, kBoxes>(
              smem + ring.stage * Layout::kStageBytes, &x_map, &w_map, ring.full + ring.stage, row, from, stage_depth(k),
              m_part);
          ring.advance();
          if (kLeft >= 0 && number + blocks >= tiles && k == max(k_tiles - 1 - kLeft, 0)) {
            ptx::griddepcontrol_launch_dependents();
          }
        }
      }
      if constexpr (kSharers > 1) {  // no arrival of another block may find this one gone
#pragma unroll 1
        for (int i = 0; i < kStages; ++i) {
          ring.wait_empty();
          ring.advance();
        }
      }
    }
    if constexpr (kCluster > 1) __syncwarp();
    leave_cluster();
    return;
  }

  if constexpr (kConsumers > 1) ptx::setmaxnreg_inc<kConsumerRegisters>();
  ptx::griddepcontrol_wait();
  // A counter of the next launch, which would cost one of its own.
  if (zeroed != nullptr && blockIdx.x == 0 && threadIdx.x == kThreads - 1) *zeroed = 0;
  const int consumer = warpgroup - 1;
  // Uniform, as TMA wants the place of a store, where registers allow.
  const int all_warps = static_cast<int>(threadIdx.x) / 32;
  const int warp = (kSpareWarps ? all_warps : __shfl_sync(0xffffffffu, all_warps, 0)) % 4;
  const int group_row = kPingPong || kShareColumns ? 0 : consumer * kGroupRows;  // in a tile
  const int group_column = kShareColumns ? consumer * kGroupColumns : 0;
  const WarpgroupTurns<kConsumers, kPingPong> turns(consumer);
  StageWalk walk(ring, wgmma_descriptor_k_major<gemm::kSpan>(smem + group_row * gemm::kSpan));
  const u32 w_ahead = gemm::weight_ahead<Layout, kWeightAlongN>(group_row, group_column);
  gemm::OutputBuffers buffers{smem + Layout::kOutput +
                                  (consumer * 4 + warp) * kBuffers * gemm::kWarpSlabBytes,
                              landed + consumer * 4 + warp};

  if (kPingPong && consumer == 1) walk.skip(k_tiles);
  u32 round = 0;
  for (int first = block; first < tiles; first += kTilesPerRound * blocks, ++round) {
    const int number = kPingPong ? first + consumer * blocks : first;
    if (number >= tiles) {  // the last round is half empty; each consumer takes a turn in every round
      turns.take();
      turns.pass();
      break;
    }
    const TileOrder::Place tile = order(number);
    const int tile_row = (tile.m * kSharers + m_part) * kBlockM, tile_column = tile.column;
    if constexpr (kNarrowN > 0) result.columns = min(columns, tile_column + tile.width);
    const int first_row = tile_row + group_row + warp * 16, first_column = tile_column + group_column;  // of this warp
    const bool finishes = kSplit == 1 || Pushed::owner_of(consumer * 4 + warp) == rank;
    if (finishes) {
      gemm::prefetch_inputs<Rules, kRowTiles, kGroupColumns / (kGated ? 2 : 1)>(result, first_row, first_column);
    }
    // Of a block's first tile, and of tiles that consumers share, behind the first stages: in front of them all SMs'
    // residuals keep the products waiting.
    const bool fetches_late = kTmaResidual && (!kPingPong || first == block);
    const auto fetch_residual = [&] {
      if constexpr (kTmaResidual) {
        buffers.template fetch<kRowTiles, kBuffers, 0, kFetchedFirst>(&residual_map, first_row, first_column, rows,
                                                                       result.columns);
        __syncwarp();
      }
    };
    if (!fetches_late) fetch_residual();
    gemm::RowMoments<kRowTiles> moments = {};
    bool is_cancelled = false;
    const auto look_at_moments = [&] {
      is_cancelled = moments.any_cancelled();
      if constexpr (kNormalisesResidual) {
        if (is_cancelled) moments.compute(residual, residual_stride, first_row, rows, columns, epsilon);
      }
    };
    const Parked parked{smem + Layout::kBytes + (consumer * 4 + warp) * Parked::kBytes};
    const auto load_moments = [&] {
      if constexpr (kNorm != gemm::RowNorm::kNone) {
        moments.load(statistics, first_row, rows, kNormalisesX ? depth : columns, epsilon,
                     kNorm != gemm::RowNorm::kRmsNorm);
        look_at_moments();
      }
    };
    if constexpr (Rules::kBiasParked) {
      const typename Parked::Share share = Parked::load(result, first_column);
      load_moments();
      parked.park(moments, share);
    } else if constexpr (kNorm != gemm::RowNorm::kNone && !kSpareWarps) {
      load_moments();
      if constexpr (kParks) parked.park(moments);
    }
    gemm::SlabColumns<Rules, Bias> held[kHeldSlabs];
    const auto load_held = [&] {
#pragma unroll
      for (int i = 0; i < kHeldSlabs; ++i) held[i].load(result, first_column + i * gemm::kSlabColumns);
    };
    if constexpr (kHoldsColumns) load_held();
    turns.take();
    if (kPingPong && fetches_late) {
      walk.wait();
      fetch_residual();
    }
    float sum[kRowTiles][kGroupColumns / 2];
    if constexpr (Rules::kBiasInSums) gemm::start_from_bias<Rules>(sum, result, first_column);
    gemm::SlabInputs<Rules, Element, Bias> inputs;
    const auto multiply = [&](auto tile_columns) {  // all of it for each width: no branch while products are in flight
      constexpr int kColumns = decltype(tile_columns)::kValue;
      u32 done = 0;  // one stage behind
      int k = 0;
      const auto multiply_next = [&] {
        walk.wait();
        ptx::wgmma_fence();
        gemm::multiply_stage<Element, kColumns, kWeightAlongN>(sum, walk.x(), w_ahead, Rules::kBiasInSums || k > 0);
        ptx::wgmma_commit_group();
        ptx::wgmma_wait_group<1>();
        if (k > 0) walk.release(done);
        done = walk.place();
        walk.advance();
        ++k;
      };
      // At least one: then all sums that are in flight are products, and no other instruction has defined them.
      const int before = kTmaResidual && !kPingPong ? min(k_tiles / 2, kStagesBeforeResidual) : k_tiles;
#pragma unroll 1
      do {
        multiply_next();
      } while (k < before);
      if constexpr (kTmaResidual && !kPingPong) {
        fetch_residual();
#pragma unroll 1
        while (k < k_tiles) multiply_next();
      }
      turns.pass();
      if (finishes) {  // from L2, beside the last stage's products
        if constexpr (!kHoldsColumns) load_held();
        inputs.columns = held[0];
        inputs.load_rows(result, first_row, first_column);
      }
      if constexpr (kSpareWarps) {
        board.read(moments, kPingPong ? consumer : 0, round, group_row + warp * 16);
        look_at_moments();
      }
      ptx::wgmma_wait_group<0>();
#pragma unroll
      for (int i = 0; i < kRowTiles; ++i) ptx::wgmma_fence_registers(gemm::first_of<kColumns / 2>(sum[i]));
      walk.release(done);
    };
    if (kNarrowN > 0 && tile.width < kBlockN) {
      multiply(Constant<kNarrowColumns>{});
    } else {
      multiply(Constant<kGroupColumns>{});
    }
    if constexpr (kPingPong) walk.skip(k_tiles);

    if constexpr (kParks) {
      gemm::write_tile(sum, inputs, held, parked.bias(), result, buffers, first_row, first_column, parked);
      if constexpr (kNorm == gemm::RowNorm::kLayerNorm) {
        if (is_cancelled) parked.template repair<Rules>(operands, result, epsilon, first_row, first_column);
      }
    } else {
      if constexpr (kNorm == gemm::RowNorm::kLayerNorm) {
        if (is_cancelled) {
          moments.compute(x, x_stride, first_row, rows, depth, epsilon);
          gemm::multiply_again(sum, moments, operands, first_row, first_column);
        }
      }
      if constexpr (kSplit > 1) {
        Pushed{smem + Layout::kOutput}.exchange(sum, consumer * 4 + warp, rank);
      }
      if (finishes) {
        gemm::write_tile(sum, inputs, held, static_cast<const Bias*>(nullptr), result, buffers, first_row, first_column,
                         moments);
      }
    }
  }
  if constexpr (kTmaStore) buffers.drain();
  turns.finish();
  if constexpr (kSharers > 1) end_cluster();
}
