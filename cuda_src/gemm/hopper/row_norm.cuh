// Norms of rows inside a product: statistics of the rows that it writes, and what it does with those of rows it reads.
//
// Statistics of a row are the sum and the sum of squares of each 64 columns, fp32, in places of their own: the same
// bits in every run. Then
//
//   LN(x) w = rstd (x - mean) w = rstd x w,  where every column of w sums to zero, as `cki.prepare` makes it
//   RMS(x) w = rstd x w
//
// so that a norm costs the product one factor for each row. Weights of the norm are in w, its bias in the product's.
// Where |mean| exceeds kLargestMean standard deviations, too much cancels, in these sums and in those of the tensor
// core, which truncates: such a row's mean and variance are computed from its elements, and it is multiplied again, as
// (x - mean) w in fp32.
#pragma once

#include "common/convert_element.cuh"
#include "common/types.cuh"
#include "gemm/hopper/tiles.cuh"
#include "ptx/mbarrier.cuh"

namespace cki::gemm {

// What the product does with norms of rows. The numbers are those of cki/ops/linear_hopper.py.
enum class RowNorm { kNone = 0, kLayerNorm = 1, kRmsNorm = 2, kResidual = 3 };

constexpr float kLargestMean = 32.0f;

// Over the four lanes that have a row of wgmma's accumulators between them.
__device__ __forceinline__ float quad_sum(float value) {
  value += __shfl_xor_sync(0xffffffffu, value, 2);
  return value + __shfl_xor_sync(0xffffffffu, value, 1);
}

// The same of several rows in fewer instructions: lane q of the four gets the sum of row q * kRows / 4.
template <int kRows>
__device__ __forceinline__ float quad_sums(const float (&values)[kRows]) {
  static_assert(kRows == 1 || kRows == 2 || kRows == 4, "a row, or half of the rows, for each lane");
  if constexpr (kRows == 1) {
    return quad_sum(values[0]);
  } else {
    constexpr int kHalf = kRows / 2;
    const bool is_upper = threadIdx.x % 4 >= 2;
    float kept[kHalf];
#pragma unroll
    for (int i = 0; i < kHalf; ++i) {
      const float given = is_upper ? values[i] : values[i + kHalf];
      kept[i] = (is_upper ? values[i + kHalf] : values[i]) + __shfl_xor_sync(0xffffffffu, given, 2);
    }
    if constexpr (kHalf == 1) return kept[0] + __shfl_xor_sync(0xffffffffu, kept[0], 1);
    const bool is_odd = threadIdx.x % 2 != 0;
    const float given = is_odd ? kept[0] : kept[kHalf - 1];
    return (is_odd ? kept[kHalf - 1] : kept[0]) + __shfl_xor_sync(0xffffffffu, given, 1);
  }
}

// Adds a lane's share of the next 16 slots of some rows, which begins at rows[i]: of each eight slots two beside each
// other, 16 bytes. kWhole: rows have an even number of slots, and begin at multiples of 16 bytes. kFull: all of them
// exist, else `left` from rows[i] on.
template <bool kWhole, bool kFull, int kRows>
__device__ __forceinline__ void add_slots(const float2* const (&rows)[kRows], int left, float (&sum)[kRows],
                                          float (&squares)[kRows]) {
  constexpr int kAhead = 2;  // loads of a row before the first is used: under load a latency is a microsecond
  float4 parts[kAhead][kRows];
#pragma unroll
  for (int j = 0; j < kAhead; ++j) {
    const int at = 8 * j;
#pragma unroll
    for (int i = 0; i < kRows; ++i) {
      if constexpr (kWhole) {
        parts[j][i] = kFull || at < left ? *reinterpret_cast<const float4*>(rows[i] + at) : make_float4(0, 0, 0, 0);
      } else {
        const float2 first = at < left ? rows[i][at] : make_float2(0, 0);
        const float2 second = at + 1 < left ? rows[i][at + 1] : make_float2(0, 0);
        parts[j][i] = make_float4(first.x, first.y, second.x, second.y);
      }
    }
  }
#pragma unroll
  for (int j = 0; j < kAhead; ++j) {
#pragma unroll
    for (int i = 0; i < kRows; ++i) {
      sum[i] += parts[j][i].x + parts[j][i].z;
      squares[i] += parts[j][i].y + parts[j][i].w;
    }
  }
}

// (mean, 1 / sqrt(variance + epsilon)) from statistics, of the row of which lane q of four gets what there is to know:
// q * kRows / 4. numbers: of the rows, each of `columns` elements. All lanes take part. centred: deviations from the
// mean, else from zero.
template <int kRows>
__device__ __forceinline__ float2 moments_of_rows(const float* statistics, const int (&numbers)[kRows], int columns,
                                                  float epsilon, bool centred) {
  constexpr int kStep = 16;  // slots that four lanes add at once
  const int slots = (columns + kSlabColumns - 1) / kSlabColumns, own = static_cast<int>(threadIdx.x) % 4 * 2;
  const float2* rows[kRows];
  float sum[kRows] = {}, squares[kRows] = {};
#pragma unroll
  for (int i = 0; i < kRows; ++i) {
    rows[i] = reinterpret_cast<const float2*>(statistics) + own + static_cast<i64>(numbers[i]) * slots;
  }
  const auto advance = [&] {
#pragma unroll
    for (int i = 0; i < kRows; ++i) rows[i] += kStep;
  };
  int left = slots;
  if (slots % 2 == 0) {
#pragma unroll 1
    for (; left >= kStep; left -= kStep) {
      add_slots<true, true>(rows, left, sum, squares);
      advance();
    }
    if (left > 0) add_slots<true, false>(rows, left - own, sum, squares);
  } else {
#pragma unroll 1
    for (; left > 0; left -= kStep) {
      add_slots<false, false>(rows, left - own, sum, squares);
      advance();
    }
  }
  const float inverse = 1.0f / static_cast<float>(columns);
  const float total = quad_sums(sum), total_squares = quad_sums(squares);
  const float middle = centred ? total * inverse : 0.0f;
  const float variance = fmaf(-middle, middle, total_squares * inverse);
  return make_float2(middle, rsqrtf((variance < 0.0f ? 0.0f : variance) + epsilon));  // a variance of NaN stays one
}

// The same of a layer norm's row from its elements, which lie side by side, in three passes: rare. Each four lanes have a
// row; part: which of the four.
template <class Element>
__device__ __forceinline__ float2 computed_moments(const Element* row, int part, int columns, float epsilon) {
  const float inverse = 1.0f / static_cast<float>(columns);
  float sum = 0.0f, squares = 0.0f;
  for (int k = part; k < columns; k += 4) sum += to_float(row[k]) * inverse;
  float middle = quad_sum(sum), apart_of_it = 0.0f;
  for (int k = part; k < columns; k += 4) apart_of_it += to_float(row[k]) - middle;
  middle += quad_sum(apart_of_it) * inverse;  // exact where all elements are equal
  for (int k = part; k < columns; k += 4) {
    const float apart = to_float(row[k]) - middle;
    squares = fmaf(apart, apart, squares);
  }
  return make_float2(middle, rsqrtf(quad_sum(squares) * inverse + epsilon));
}

// Too much has cancelled, or the squares were beyond fp32. moments: (mean, rstd).
__device__ __forceinline__ bool have_cancelled(float2 moments) {
  return fabsf(moments.x) * moments.y > kLargestMean || moments.y == 0.0f;
}

// Of the two rows of a lane in each 16 x 64 part of a warp: rows lane / 4 and lane / 4 + 8.
template <int kRowTiles>
struct RowMoments {
  static constexpr int kRows = kRowTiles * 2;
  float mean[kRowTiles][2], rstd[kRowTiles][2];

  // The lane's i-th row, or the last that exists. The warp's first row tile begins at first_row, the next 64 below.
  static __device__ __forceinline__ int row_of(int i, int first_row, int rows) {
    const int lane = static_cast<int>(threadIdx.x) % 32;
    return min(first_row + i / 2 * 64 + i % 2 * 8 + lane / 4, rows - 1);
  }

  // statistics: [rows, ceil(columns / 64), 2]. centred: deviations from the mean, else from zero. All lanes take part.
  __device__ __forceinline__ void load(const float* statistics, int first_row, int rows, int columns, float epsilon,
                                       bool centred) {
    int numbers[kRows];
#pragma unroll
    for (int i = 0; i < kRows; ++i) numbers[i] = row_of(i, first_row, rows);
    const float2 found = moments_of_rows(statistics, numbers, columns, epsilon, centred);
#pragma unroll
    for (int i = 0; i < kRows; ++i) {
      mean[i / 2][i % 2] = __shfl_sync(0xffffffffu, found.x, i * 4 / kRows, 4);
      rstd[i / 2][i % 2] = __shfl_sync(0xffffffffu, found.y, i * 4 / kRows, 4);
    }
  }

  // The same from where other warps have left those of a tile's rows. first: the warp's first row in the tile.
  __device__ __forceinline__ void take(const float2* tile_rows, int first) {
#pragma unroll
    for (int i = 0; i < kRows; ++i) {
      const float2 found = tile_rows[first + i / 2 * 64 + i % 2 * 8 + static_cast<int>(threadIdx.x) % 32 / 4];
      mean[i / 2][i % 2] = found.x;
      rstd[i / 2][i % 2] = found.y;
    }
  }

  // The same of a layer norm from the rows themselves.
  template <class Element>
  __device__ __forceinline__ void compute(const Element* x, i64 row_stride, int first_row, int rows, int columns,
                                          float epsilon) {
#pragma unroll 1
    for (int i = 0; i < kRows; ++i) {
      const float2 found = computed_moments(
          x + row_of(i, first_row, rows) * row_stride, static_cast<int>(threadIdx.x) % 4, columns, epsilon);
#pragma unroll
      for (int j = 0; j < kRows; ++j) {  // an index that the compiler knows keeps the array in registers
        if (j == i) mean[j / 2][j % 2] = found.x, rstd[j / 2][j % 2] = found.y;
      }
    }
  }

  // (mean, rstd) of the lane's i-th row.
  __device__ __forceinline__ float2 of(int i) const { return make_float2(mean[i / 2][i % 2], rstd[i / 2][i % 2]); }

  __device__ __forceinline__ bool is_cancelled(int i, int half) const { return have_cancelled(of(i * 2 + half)); }

  // Any of the warp's rows.
  __device__ __forceinline__ bool any_cancelled() const {
    bool any = false;
#pragma unroll
    for (int i = 0; i < kRows; ++i) any = any || is_cancelled(i / 2, i % 2);
    return __any_sync(0xffffffffu, any);
  }
};

// Moments of a tile's rows on their way from spare warps to the consumers: a place for each consumer that takes tiles of
// its own. `ready` completes when all of kWriters warps have written theirs, `taken` when the kReaders warps of a place
// have read them. Each thread arrives for itself: one lane for its warp, behind __syncwarp, is as right, but an order that
// racecheck does not follow.
template <int kPlaces, int kTileRows, int kWriters, int kReaders>
struct MomentsBoard {
  static constexpr int kBytes = kPlaces * (kTileRows * static_cast<int>(sizeof(float2)) + 16);

  unsigned char* memory;

  __device__ __forceinline__ float2* moments(int place) const {
    return reinterpret_cast<float2*>(memory) + place * kTileRows;
  }
  __device__ __forceinline__ u64* ready(int place) const {
    return reinterpret_cast<u64*>(moments(kPlaces)) + place * 2;
  }
  __device__ __forceinline__ u64* taken(int place) const { return ready(place) + 1; }

  // By one thread of the block, before the barrier that publishes it.
  __device__ __forceinline__ void initialise() const {
    for (int place = 0; place < kPlaces; ++place) {
      ptx::mbarrier_init(ready(place), kWriters * 32);
      ptx::mbarrier_init(taken(place), kReaders * 32);
    }
  }

  // A writer: its share of a tile's rows, eight at a time, from statistics [rows, ceil(columns / 64), 2]. The tile begins
  // at tile_row. round: how often the place has been written before. With few registers, so one row a lane.
  __device__ __forceinline__ void write(int place, u32 round, int writer, const float* statistics, int tile_row, int rows,
                                        int columns, float epsilon, bool centred) const {
    const int lane = static_cast<int>(threadIdx.x) % 32;
    ptx::mbarrier_wait_parity(taken(place), (round & 1) ^ 1);
#pragma unroll 1
    for (int at = writer * 8 + lane / 4; at < kTileRows; at += kWriters * 8) {
      const int numbers[1] = {min(tile_row + at, rows - 1)};
      const float2 found = moments_of_rows(statistics, numbers, columns, epsilon, centred);
      if (lane % 4 == 0) moments(place)[at] = found;
    }
    ptx::mbarrier_arrive(ready(place));
  }

  // A reader's warp: the moments of its rows.
  template <int kRowTiles>
  __device__ __forceinline__ void read(RowMoments<kRowTiles>& found, int place, u32 round, int first) const {
    ptx::mbarrier_wait_parity(ready(place), round & 1);
    found.take(moments(place), first);
    ptx::mbarrier_arrive(taken(place));
  }
};

// The operands of a product where they lie: x[row, k] at x + row * x_row + k, w[k, n] at w + k * w_k + n * w_n.
template <class Element>
struct Operands {
  const Element* x;
  const Element* w;
  i64 x_row, w_k, w_n;
  int rows, columns, depth;
};

// sum = (x - mean) w for the lane's rows that have cancelled; the others keep theirs. (first_row, first_column): of the
// warp's part of the tile.
template <int kRowTiles, int kCount, class Element>
__device__ __forceinline__ void multiply_again(float (&sum)[kRowTiles][kCount], const RowMoments<kRowTiles>& moments,
                                               const Operands<Element>& operands, int first_row, int first_column) {
  const Element* x[kRowTiles][2];
#pragma unroll
  for (int i = 0; i < kRowTiles * 2; ++i) {
    const int row = RowMoments<kRowTiles>::row_of(i, first_row, operands.rows);
    x[i / 2][i % 2] = operands.x + row * operands.x_row;
    if (!moments.is_cancelled(i / 2, i % 2)) continue;
#pragma unroll
    for (int at = i % 2 * 2; at < kCount; at += 4) sum[i / 2][at] = sum[i / 2][at + 1] = 0.0f;
  }
#pragma unroll 1
  for (int k = 0; k < operands.depth; ++k) {
    const int first = first_column + opaque_lane() % 4 * 2;  // else all columns' addresses are kept through the loop
    float value[kRowTiles][2];
#pragma unroll
    for (int i = 0; i < kRowTiles * 2; ++i) {
      const bool again = moments.is_cancelled(i / 2, i % 2);
      value[i / 2][i % 2] = again ? to_float(x[i / 2][i % 2][k]) - moments.mean[i / 2][i % 2] : 0.0f;
    }
#pragma unroll
    for (int at = 0; at < kCount; at += 4) {
#pragma unroll
      for (int e = 0; e < 2; ++e) {
        const int column = min(first + at * 2 + e, operands.columns - 1);
        const float factor = to_float(operands.w[k * operands.w_k + column * operands.w_n]);
#pragma unroll
        for (int i = 0; i < kRowTiles * 2; ++i) {
          float& total = sum[i / 2][at + i % 2 * 2 + e];
          total = moments.is_cancelled(i / 2, i % 2) ? fmaf(value[i / 2][i % 2], factor, total) : total;
        }
      }
    }
  }
}

// Statistics of a slab of 16 rows x 64 columns as it is stored, of which `blocks` eights of columns exist: of rows
// lane / 4 and lane / 4 + 8. words[j][half] are columns 8 j + lane % 4 * 2 and the next, of row lane / 4 + 8 half.
template <class Element>
__device__ __forceinline__ void add_up(const u32 (&words)[kSlabColumns / 8][2], int blocks, float2 (&found)[2]) {
  float sum[2] = {}, squares[2] = {};
#pragma unroll
  for (int j = 0; j < kSlabColumns / 8; ++j) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      float values[2];
      unpack_pair<Element>(j < blocks ? words[j][half] : 0u, values[0], values[1]);  // zeros add nothing
#pragma unroll
      for (int e = 0; e < 2; ++e) {
        sum[half] += values[e];
        squares[half] = fmaf(values[e], values[e], squares[half]);
      }
    }
  }
#pragma unroll
  for (int half = 0; half < 2; ++half) found[half] = make_float2(quad_sum(sum[half]), quad_sum(squares[half]));
}

}  // namespace cki::gemm
