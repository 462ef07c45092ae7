// The position of each token in its sequence, where it is not simply the column of a padded batch.
//
//   positions = padding_id + (how many tokens of the sequence up to this one are not padding_id)     where it is not
//             = padding_id                                                                           where it is
//                                      kSkipsPadding: RoBERTa's rule (fairseq's make_positions)
//   positions = 0, 1, 2, ...           otherwise, which only packed sequences need
//
// Sequences are the rows of a batch [sequences, length]; or, with kPacked, pieces of one row of `length` tokens: sequence b
// from offsets[b] up to offsets[b + 1]. Offsets beyond the row are cut off; tokens of no sequence are not written.
//
// ids: of Index, two strides (packed: the second). offsets: of Offset. positions: i32, row-major, like the ids.
//
// Work: a warp a sequence, which walks over it 32 tokens at a time; a vote counts the tokens before each. Sequences are
// at most some thousand tokens long, and the ids are read once.
#include "common/types.cuh"

using namespace cki;

extern "C" __global__ void __launch_bounds__(kThreads, kMinBlocks)
    token_positions(const Index* ids, const Offset* offsets, i32* positions, int sequences, int length, int padding_id,
                    i64 stride0, i64 stride1, i64 offset_stride) {
  constexpr int kWarps = kThreads / 32;
  const int lane = threadIdx.x % 32;
  const u32 up_to_this = 0xffffffffu >> (31 - lane);
  for (i64 sequence = static_cast<i64>(blockIdx.x) * kWarps + threadIdx.x / 32; sequence < sequences;
       sequence += static_cast<i64>(gridDim.x) * kWarps) {
    i64 first = sequence * length, last = first + length;
    const Index* row = ids + sequence * stride0 - first * stride1;
    if constexpr (kPacked) {
      const i64 start = offsets[sequence * offset_stride], end = offsets[(sequence + 1) * offset_stride];
      first = start < 0 ? 0 : start;
      last = end > length ? length : end;
      row = ids;
    }
    int before = kSkipsPadding ? padding_id : -1;
    for (i64 chunk = first; chunk < last; chunk += 32) {
      const i64 token = chunk + lane;
      const bool inside = token < last;
      bool counts = inside;
      if constexpr (kSkipsPadding) counts = inside && row[token * stride1] != padding_id;
      const u32 votes = __ballot_sync(0xffffffffu, counts);
      if (inside) positions[token] = counts ? before + __popc(votes & up_to_this) : padding_id;
      before += __popc(votes);
    }
  }
}
