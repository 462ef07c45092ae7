// y[M, N] = act(x[M, K] w[K, N] + bias[N]) + residual[M, N], for sm_80 and up (mma.sync, cp.async).
//
// Why this kernel: the generic path. It takes any M, N, K, any strides and any alignment, in f16, bf16 and fp32, on every
// GPU since Ampere; Hopper's own instructions reach more of its peak on large aligned problems.
//
// Work.    One block computes a kBlockM x kBlockN tile of y; its kWarpsM x kWarpsN warps split the tile, each an array of
//          m16n8 products in registers. Blocks take tiles in the order of rasterize.cuh.
// K loop.  A ring of kStages stages in dynamic shared memory, each with 128 bytes of K (64 16-bit or 32 fp32 elements) of
//          both operands, filled by cp.async kStages - 1 ahead (tile_load.cuh).
// fp32.    3xTF32 (fragments.cuh). Tensor cores truncate when they accumulate, so each stage starts from zero and its sum
//          is added to the running one by a rounded fp32 addition: the error then does not drift with K. Products with
//          infinities are repaired (nonfinite.cuh).
// Finish.  Bias, activation and residual in registers (epilogue.cuh).
// Traffic. x is read ceil(N / kBlockN) times and w ceil(M / kBlockM) times, mostly from the L2 cache; 2 M N K flops.
//
// Layouts. Rows of x, residual and y are numbered over up to three axes (kRowAxes 1 or 3, extents rows / extent1 /
//          extent2 outermost first, one stride an axis); their columns have strides of their own. w is [K, N] with rows
//          along N (kWeightAlongN) or [N, K] with rows along K, w_stride between rows. A weight in kSegments parts (fused
//          Q, K, V projections) is kSegments tensors of the same strides and n0, n1, n2 columns, whose results lie side
//          by side in y. All strides in elements.
//
// Prelude: Element (cki::f16, cki::bf16, float), Bias (Element or float), kBlockM, kBlockN, kWarpsM, kWarpsN, kStages,
//   kMinBlocks, kCopyBytesX, kCopyBytesW (16, 8, 4, or the element's size), kUnitStrideX, kUnitStrideW, kWeightAlongN,
//   kRowAxes, kSegments (1 to 3), kHasBias, kHasResidual, kActivation, kVectorY, kVectorResidual (1 or 2).
// Dynamic shared memory: kStages * (kBlockM + kBlockN) * 128 bytes.
#include "common/convert_element.cuh"
#include "common/types.cuh"
#include "gemm/activation.cuh"
#include "gemm/epilogue.cuh"
#include "gemm/fragments.cuh"
#include "gemm/nonfinite.cuh"
#include "gemm/rasterize.cuh"
#include "gemm/tile_load.cuh"
#include "ptx/cp_async.cuh"

using namespace cki;

constexpr int kThreads = kWarpsM * kWarpsN * 32;
constexpr int kTilesM = kBlockM / kWarpsM / 16;  // m16n8 products of a warp
constexpr int kTilesN = kBlockN / kWarpsN / 8;
constexpr int kStageK = gemm::kTileRowBytes / static_cast<int>(sizeof(Element));
constexpr int kStageBytes = (kBlockM + kBlockN) * gemm::kTileRowBytes;
constexpr bool kSumPerStage = sizeof(Element) == 4;
static_assert(kTilesM * kWarpsM * 16 == kBlockM && kTilesN * kWarpsN * 8 == kBlockN, "warps split the tile evenly");
static_assert(kTilesN % 2 == 0, "one ldmatrix.x4 brings 16 columns of w");
static_assert(kStages >= 2, "a stage is filled while another is read");

using Weight = gemm::WeightTile<Element, kBlockN, kWeightAlongN>;
using Rows = gemm::RowOffset<kRowAxes>;
using WeightRows = gemm::RowOffset<1>;

// The tile's share of the weight: its part of a weight in segments, and where the part's columns begin in y.
struct Segment {
  const Element* w;
  const Bias* bias;
  int columns;
  int tile_n;
  int first_y_column;
};

__device__ __forceinline__ Segment find_segment(int tile_n, const Element* w0, const Element* w1, const Element* w2,
                                                const Bias* bias0, const Bias* bias1, const Bias* bias2, int n0, int n1,
                                                int n2) {
  Segment segment = {w0, bias0, n0, tile_n, 0};
  if constexpr (kSegments > 1) {
    const int tiles0 = (n0 + kBlockN - 1) / kBlockN;
    const int tiles1 = (n1 + kBlockN - 1) / kBlockN;
    if (tile_n >= tiles0 + tiles1) {
      segment = {w2, bias2, n2, tile_n - tiles0 - tiles1, n0 + n1};
    } else if (tile_n >= tiles0) {
      segment = {w1, bias1, n1, tile_n - tiles0, n0};
    }
  }
  return segment;
}

// sum += the products of one stage. Both operands' fragments are loaded ahead of their use, x by one step, w by 16 columns:
// all of w's for a step at once would cost 64x64 warp tiles 24 more registers, which they do not have.
__device__ __forceinline__ void add_stage(float (&sum)[kTilesM][kTilesN][4], const unsigned char* x_tile,
                                          const unsigned char* w_tile, int row, int column) {
  constexpr int kPairs = kTilesN / 2;
  u32 a[2][kTilesM][4];
  u32 b[2][2][2];
  gemm::load_x(a[0], x_tile, row, 0);
  gemm::load_weight<Element, kBlockN, kWeightAlongN>(b[0], w_tile, column, 0);
#pragma unroll
  for (int step = 0; step < gemm::kStepsPerStage; ++step) {
#pragma unroll
    for (int pair = 0; pair < kPairs; ++pair) {
      const int next = step * kPairs + pair + 1;
      if (pair == 0 && step + 1 < gemm::kStepsPerStage) gemm::load_x(a[(step + 1) % 2], x_tile, row, step + 1);
      if (next < gemm::kStepsPerStage * kPairs) {
        gemm::load_weight<Element, kBlockN, kWeightAlongN>(b[next % 2], w_tile, column + next % kPairs * 16, next / kPairs);
      }
      gemm::add_products(sum, pair * 2, a[step % 2], b[(next - 1) % 2], ElementTag<Element>{});
    }
  }
}

extern "C" __global__ void __launch_bounds__(kThreads, kMinBlocks)
    linear(const Element* x, const Element* w0, const Element* w1, const Element* w2, const Bias* bias0,
           const Bias* bias1, const Bias* bias2, const Element* residual, Element* y, int rows, int extent1, int extent2,
           int n0, int n1, int n2, int depth, i64 x_stride0, i64 x_stride1, i64 x_stride2, i64 residual_stride0,
           i64 residual_stride1, i64 residual_stride2, i64 y_stride0, i64 y_stride1, i64 y_stride2, i64 w_stride,
           i64 x_column_stride, i64 residual_column_stride, i64 y_column_stride, i64 w_column_stride, i64 bias_stride) {
  extern __shared__ __align__(128) unsigned char shared[];

  const int tiles_m = (rows + kBlockM - 1) / kBlockM;
  const gemm::TileIndex tile =
      gemm::tile_of_block(static_cast<int>(blockIdx.x), tiles_m, static_cast<int>(gridDim.x) / tiles_m);
  const Segment segment = find_segment(tile.n, w0, w1, w2, bias0, bias1, bias2, n0, n1, n2);
  const int first_row = tile.m * kBlockM;
  const int first_column = segment.tile_n * kBlockN;

  const Rows x_rows = {{x_stride0, x_stride1, x_stride2}, extent1, extent2};
  const WeightRows w_rows = {{0, 0, w_stride}, 1, 1};
  const auto load_stage = [&](int k_tile) {
    unsigned char* x_tile = shared + k_tile % kStages * kStageBytes;
    unsigned char* w_tile = x_tile + kBlockM * gemm::kTileRowBytes;
    const int k = k_tile * kStageK;
    gemm::copy_tile<kBlockM, gemm::kTileRowBytes / 16, kCopyBytesX, gemm::Swizzle::kRows8, kThreads>(
        x_tile, x, x_rows, kUnitStrideX ? 1 : x_column_stride, first_row, rows, k, depth);
    gemm::copy_tile<Weight::kRows, Weight::kChunks, kCopyBytesW, Weight::kSwizzle, kThreads>(
        w_tile, segment.w, w_rows, kUnitStrideW ? 1 : w_column_stride,
        kWeightAlongN ? k : first_column, kWeightAlongN ? depth : segment.columns, kWeightAlongN ? first_column : k,
        kWeightAlongN ? segment.columns : depth);
  };

  const int warp = static_cast<int>(threadIdx.x) / 32;
  const int warp_row = warp / kWarpsN * (kTilesM * 16);
  const int warp_column = warp % kWarpsN * (kTilesN * 8);
  float sum[kTilesM][kTilesN][4] = {};

  // A group is committed for every stage, also an empty one behind the end: the count of groups then says which stage
  // has landed.
  const int k_tiles = (depth + kStageK - 1) / kStageK;
#pragma unroll
  for (int stage = 0; stage < kStages - 1; ++stage) {
    if (stage < k_tiles) load_stage(stage);
    ptx::cp_async_commit_group();
  }
#pragma unroll 1
  for (int k_tile = 0; k_tile < k_tiles; ++k_tile) {
    ptx::cp_async_wait_group<kStages - 2>();
    __syncthreads();  // stage k_tile is there for all, and nobody reads the stage that is filled next
    if (k_tile + kStages - 1 < k_tiles) load_stage(k_tile + kStages - 1);
    ptx::cp_async_commit_group();
    const unsigned char* x_tile = shared + k_tile % kStages * kStageBytes;
    const unsigned char* w_tile = x_tile + kBlockM * gemm::kTileRowBytes;
    if constexpr (kSumPerStage) {
      float part[kTilesM][kTilesN][4] = {};
      add_stage(part, x_tile, w_tile, warp_row, warp_column);
#pragma unroll
      for (int i = 0; i < kTilesM; ++i) {
#pragma unroll
        for (int j = 0; j < kTilesN; ++j) {
#pragma unroll
          for (int e = 0; e < 4; ++e) sum[i][j][e] += part[i][j][e];
        }
      }
    } else {
      add_stage(sum, x_tile, w_tile, warp_row, warp_column);
    }
  }

  if constexpr (kSumPerStage) {
    const auto plain_dot = [&](int row, int column) {
      const Element* x_row = x + x_rows(row);
      const Element* w_column = segment.w + column * (kWeightAlongN ? w_column_stride : w_stride);
      const i64 w_step = kWeightAlongN ? w_stride : w_column_stride;
      float dot = 0.0f;
#pragma unroll 1
      for (int k = 0; k < depth; ++k) dot = fmaf(to_float(x_row[k * x_column_stride]), to_float(w_column[k * w_step]), dot);
      return dot;
    };
    gemm::recompute_nan(sum, first_row + warp_row, rows, first_column + warp_column, segment.columns, plain_dot);
  }

  const gemm::Matrix<const Element, Rows> added = {
      residual + segment.first_y_column * residual_column_stride,
      {{residual_stride0, residual_stride1, residual_stride2}, extent1, extent2},
      kVectorResidual == 2 ? 1 : residual_column_stride};
  const gemm::Matrix<Element, Rows> result = {y + segment.first_y_column * y_column_stride,
                                              {{y_stride0, y_stride1, y_stride2}, extent1, extent2},
                                              kVectorY == 2 ? 1 : y_column_stride};
  gemm::write_result<static_cast<gemm::Activation>(kActivation), kHasBias, kHasResidual, kVectorY, kVectorResidual>(
      sum, segment.bias, bias_stride, added, result, first_row + warp_row, rows, first_column + warp_column, segment.columns);
}
