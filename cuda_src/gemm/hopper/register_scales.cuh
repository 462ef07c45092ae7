// Scales of four stages in registers: of a lane's two rows of x, and of its tile's columns of w.
//
// A stage has one scale for each row of x, and rows lie far apart: copied to shared memory stage by stage (cp.async), each is an
// access of its own to the pipe through which wgmma reads, and took a fifth of a kernel's time. Four stages' are one access
// where they lie side by side, and loaded a group ahead nobody waits for them.
#pragma once

#include "common/types.cuh"
#include "ptx/memory.cuh"

namespace cki::gemm {

// One scale for each row, or block of them, and stage. Strides in elements; 0 where rows or stages share one.
struct ScaleMatrix {
  const float* first;
  i64 row_stride, stage_stride;

  __device__ __forceinline__ const float* at(int row, int stage) const { return first + row * row_stride + stage * stage_stride; }
};

// kHasColumns: w has scales of blocks, else those of w are applied at a tile's end. kVectorRows, kVectorColumns: four
// stages', from a multiple of four on, lie side by side in a unit of 16 bytes.
template <bool kHasColumns, bool kVectorRows, bool kVectorColumns>
struct RegisterScales {
  static constexpr int kGroup = 4;  // stages

  float row[2][kGroup];
  float column[kGroup];

  // Where a lane's scales lie: of row and row + 8 of x, as far as there are so many, and of a block of columns.
  struct Place {
    ScaleMatrix x, w;
    const float *row[2], *column;
    int last;  // stage

    __device__ __forceinline__ Place(const ScaleMatrix& x, int row, int rows, const ScaleMatrix& w, int block, int first_k, int k_tiles)
        : x(x), w(w), row{x.at(min(row, rows - 1), first_k), x.at(min(row + 8, rows - 1), first_k)},
          column(w.at(block, first_k)), last(k_tiles - 1) {}
  };

  // Of stages k to k + 3 from the place on; of fewer, the last one's again.
  __device__ __forceinline__ void load(const Place& place, int k) {
    for (int r = 0; r < 2; ++r) load_group<kVectorRows>(row[r], place.row[r], place.x.stage_stride, k, place.last);
    if constexpr (kHasColumns) load_group<kVectorColumns>(column, place.column, place.w.stage_stride, k, place.last);
  }

  // What the products of stage j of the group are multiplied with, in row r.
  __device__ __forceinline__ float factor(int r, int j) const { return kHasColumns ? row[r][j] * column[j] : row[r][j]; }

  // The group begins one stage later.
  __device__ __forceinline__ void shift() {
#pragma unroll
    for (int j = 0; j + 1 < kGroup; ++j) {
      row[0][j] = row[0][j + 1];
      row[1][j] = row[1][j + 1];
      column[j] = column[j + 1];
    }
  }

 private:
  template <bool kVector>
  static __device__ __forceinline__ void load_group(float (&to)[kGroup], const float* first, i64 stride, int k, int last) {
    if constexpr (kVector) {
      const uint4 words = ptx::load_global_nc_16(first + k);
      to[0] = __uint_as_float(words.x);
      to[1] = __uint_as_float(words.y);
      to[2] = __uint_as_float(words.z);
      to[3] = __uint_as_float(words.w);
    } else {
#pragma unroll
      for (int j = 0; j < kGroup; ++j) to[j] = __uint_as_float(ptx::load_global_nc_4(first + min(k + j, last) * stride));
    }
  }
};

}  // namespace cki::gemm
