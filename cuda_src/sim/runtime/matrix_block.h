// The inner loop of the matrix engines: a block of D stays in vector registers while k runs.
//
// Written with the compilers' vector types (GCC and Clang, any architecture), so that it does not depend on what the
// vectoriser makes of nested loops. Additions are in order of k, one accumulator an element.
#pragma once
#include <cstring>

#include "types.h"

namespace cki::sim {

typedef float Float8 __attribute__((vector_size(32)));

inline Float8 load8(const float* p) {
  Float8 v;
  std::memcpy(&v, p, sizeof v);
  return v;
}

inline void store8(float* p, Float8 v) { std::memcpy(p, &v, sizeof v); }

// d[Rows][8*Vectors] += a[Rows][k_count] b[k_count][8*Vectors], with element (r, k) of A at a[r*a_row + k*a_k], row k
// of B at b + k*b_row, row r of D at d + r*d_row.
template <u32 Rows, u32 Vectors>
inline void multiply_block(const float* a, u32 a_row, u32 a_k, const float* b, u32 b_row, float* d, u32 d_row,
                           u32 k_count) {
  Float8 sum[Rows][Vectors];
  for (u32 r = 0; r < Rows; ++r) {
    for (u32 v = 0; v < Vectors; ++v) sum[r][v] = load8(d + r * d_row + 8 * v);
  }
  for (u32 k = 0; k < k_count; ++k) {
    Float8 columns[Vectors];
    for (u32 v = 0; v < Vectors; ++v) columns[v] = load8(b + k * b_row + 8 * v);
    for (u32 r = 0; r < Rows; ++r) {
      const float factor = a[r * a_row + k * a_k];
      for (u32 v = 0; v < Vectors; ++v) sum[r][v] += factor * columns[v];
    }
  }
  for (u32 r = 0; r < Rows; ++r) {
    for (u32 v = 0; v < Vectors; ++v) store8(d + r * d_row + 8 * v, sum[r][v]);
  }
}

}  // namespace cki::sim
