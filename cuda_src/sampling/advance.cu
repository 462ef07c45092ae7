// What a decode step reads, from what the step before it left: so that steps follow one another without the host.
//
// Row i is a sequence of the batch with seq_lens[i] stored tokens, 0 for an empty place. chosen[i] is the token after them.
//   ended     chosen[i] is one of the row's ends, or with it the sequence has limits[i] tokens
//   goes on   the token is stored next:  tokens = chosen,  position = seq_lens,  slot = where the block table says,
//             seq_lens + 1
// A row that has ended becomes an empty place (length 0, slot -1): nothing is stored for it and nothing of it is read.
//
// Where the host has written tokens and tables itself (*given is not 0), they stay as they are, for this one step.
//
// Work: one block; a few words a row.
#include "common/types.cuh"

using namespace cki;

extern "C" __global__ void __launch_bounds__(kThreads, 1)
    advance(u32* given, const int* chosen, const int* ends, const int* limits, const int* block_table, int* tokens,
            int* seq_lens, int* positions, i64* slots, int rows, int end_columns, int block_size, int table_columns,
            i64 table_stride) {
  const bool host_wrote = *given != 0;
  __syncthreads();  // every thread has looked
  if (host_wrote) {
    if (threadIdx.x == 0) *given = 0;
    return;
  }
  for (int row = threadIdx.x; row < rows; row += kThreads) {
    const int length = seq_lens[row], token = chosen[row];
    if (length <= 0) continue;
    bool ended = length + 1 >= limits[row];
    for (int column = 0; column < end_columns; ++column) ended |= token == ends[row * end_columns + column];
    const int block = length / block_size;
    const bool stored = !ended && block < table_columns;
    tokens[row] = token;
    seq_lens[row] = stored ? length + 1 : 0;
    positions[row] = stored ? length : 0;
    slots[row] = stored ? static_cast<i64>(block_table[row * table_stride + block]) * block_size + length % block_size : -1;
  }
}
