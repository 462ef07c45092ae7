// A decoder's stream begins: rows of a table by tokens, and what the first product of few rows (few_rows.cu) reads of them.
//
//   x[t, :] = table[tokens[t], :]      to = x * gamma      squares[t, n] = sum of x^2 of 128 columns
//
// to: bf16, or kCodes: codes with scales of 128 neighbours. A token outside the table is a row of zeros. table: [words, columns], rows
// `table_stride` elements apart; gamma [columns]; x, to, scales and squares dense (row_parts.cuh); columns a multiple of 128. A warp has
// 512 columns of a token.
// Grid: (columns / 512 / kWarps, tokens). Prelude: kWarps, kCodes, kTwoParts.
#include "common/types.cuh"
#include "common/vec.cuh"
#include "gemm/hopper/row_parts.cuh"
#include "ptx/grid_dependency.cuh"

using namespace cki;

extern "C" __global__ void __launch_bounds__(kWarps * 32)
    embed_stream(const int* tokens, const bf16* table, const bf16* gamma, bf16* x, void* to, float* scales, float* squares,
                 int words, int columns, i64 table_stride) {
  const int lane = static_cast<int>(threadIdx.x) % 32, token = static_cast<int>(blockIdx.y), groups = columns / 128;
  const int group = (static_cast<int>(blockIdx.x) * kWarps + static_cast<int>(threadIdx.x) / 32) * 4 + lane / 8;
  const bool present = group < groups;
  const i64 column = group * 128 + gemm::first_column(lane);
  ptx::griddepcontrol_launch_dependents();
  ptx::griddepcontrol_wait();
  const i64 word = tokens[token];
  gemm::RowPart values;
  float sum = 0.0f;
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    Vector<bf16, 4> row, weight;
    row.fill_zero();
    weight.fill_zero();
    if (present) weight.load(gamma + column + i * 32);
    if (present && word >= 0 && word < words) row.load(table + word * table_stride + column + i * 32);
    if (present) row.store(x + static_cast<i64>(token) * columns + column + i * 32);
    float factors[4];
    row.to_floats(values[i]);
    weight.to_floats(factors);
#pragma unroll
    for (int e = 0; e < 4; ++e) {
      sum = fmaf(values[i][e], values[i][e], sum);
      values[i][e] *= factors[e];
    }
  }
  sum = warp_sum<8>(sum);
  if (present && lane % 8 == 0) squares[static_cast<i64>(token) * groups + group] = sum;
  if constexpr (kCodes) {
    gemm::CodeRows<kTwoParts>{static_cast<u8*>(to), scales, columns}.write(lane, values, token, group, present);
  } else {
    gemm::RoundedRows{static_cast<bf16*>(to), columns}.write(lane, values, token, group, present);
  }
}
