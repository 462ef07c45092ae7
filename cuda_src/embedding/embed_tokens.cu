// Token embedding: the sum of up to three looked-up table rows.
//
//   out[r, s, :] = word_table[token_ids[r, s], :] + position_table[positions[r, s], :] + type_table[type_ids[r, s], :]
// summed in fp32 in this order, rounded once to Element. Without positions a token's position is s; without type_ids its
// type is 0. An id outside its table is inert: nothing is read, and zeros are added.
//
// token_ids, positions, type_ids: [sequences, length] of Index, PositionIndex, TypeIndex (i32 or i64) with two strides each
// (0 where one row serves all sequences). Tables: [entries, width], rows `*_stride` elements apart, dense within a row.
// out: [sequences, length, width] with three strides; kVectorSize is 1 where its last axis is not dense.
// Bytes moved a token: width * sizeof(Element) * (tables + 1); position and type rows are used again and again and come
// from L2.
//
// Work: a token belongs to kThreadsPerToken neighbouring threads, which walk over its vectors; a block holds
// kThreads / kThreadsPerToken tokens and walks over the tokens in steps of the grid.
#include "common/types.cuh"
#include "common/vec.cuh"

using namespace cki;

namespace {

// Adds vector `column` of a table's row, if the table has that row.
__device__ __forceinline__ void add_row(const Element* table, i64 row, int rows, i64 stride, int column,
                                        float (&sum)[kVectorSize]) {
  if (row < 0 || row >= rows) return;
  float values[kVectorSize];
  load_floats(table + row * stride + column, values);
#pragma unroll
  for (int i = 0; i < kVectorSize; ++i) sum[i] += values[i];
}

}  // namespace

extern "C" __global__ void __launch_bounds__(kThreads, kMinBlocks)
    embed_tokens(const Index* token_ids, const Element* word_table, const Element* position_table, const TypeIndex* type_ids,
                 const Element* type_table, const PositionIndex* positions, Element* out, i64 tokens, int length, int width,
                 int words, int position_rows, int type_rows, i64 id_stride0, i64 id_stride1, i64 type_id_stride0,
                 i64 type_id_stride1, i64 position_stride0, i64 position_stride1, i64 word_stride, i64 position_row_stride,
                 i64 type_stride, i64 out_stride0, i64 out_stride1, i64 out_step) {
  constexpr int kTokensPerBlock = kThreads / kThreadsPerToken;
  const int lane = threadIdx.x % kThreadsPerToken;
  const i64 step = static_cast<i64>(gridDim.x) * kTokensPerBlock;
  for (i64 token = static_cast<i64>(blockIdx.x) * kTokensPerBlock + threadIdx.x / kThreadsPerToken; token < tokens;
       token += step) {
    const i64 sequence = token / length;
    const i64 place = token % length;
    const i64 word = token_ids[sequence * id_stride0 + place * id_stride1];
    i64 position = place, type = 0;
    if constexpr (kHasPositions) position = positions[sequence * position_stride0 + place * position_stride1];
    if constexpr (kHasTypeIds) type = type_ids[sequence * type_id_stride0 + place * type_id_stride1];

    for (int column = lane * kVectorSize; column < width; column += kThreadsPerToken * kVectorSize) {
      float sum[kVectorSize] = {};
      add_row(word_table, word, words, word_stride, column, sum);
      if constexpr (kHasPositionTable) add_row(position_table, position, position_rows, position_row_stride, column, sum);
      if constexpr (kHasTypeTable) add_row(type_table, type, type_rows, type_stride, column, sum);
      store_floats(out + (sequence * out_stride0 + place * out_stride1 + column * out_step), sum);
    }
  }
}
