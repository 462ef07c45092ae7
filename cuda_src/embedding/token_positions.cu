// RoBERTa's positions: tokens are counted from padding_id + 1 on, and padding has the position padding_id.
//
//   positions[b, s] = padding_id + (how many of ids[b, 0..s] are not padding_id)    where ids[b, s] is not padding_id
//                   = padding_id                                                    where it is
//
// (fairseq's make_positions.) ids: [sequences, length] of Index, two strides. positions: i32 [sequences, length], row-major.
//
// Work: a warp a sequence, which walks over it 32 tokens at a time; a vote counts the tokens before each. Sequences are
// at most some thousand tokens long, and the ids are read once.
#include "common/types.cuh"

using namespace cki;

extern "C" __global__ void __launch_bounds__(kThreads, kMinBlocks)
    token_positions(const Index* ids, i32* positions, int sequences, int length, int padding_id, i64 stride0, i64 stride1) {
  constexpr int kWarps = kThreads / 32;
  const int lane = threadIdx.x % 32;
  const u32 up_to_this = 0xffffffffu >> (31 - lane);
  for (i64 sequence = static_cast<i64>(blockIdx.x) * kWarps + threadIdx.x / 32; sequence < sequences;
       sequence += static_cast<i64>(gridDim.x) * kWarps) {
    int before = padding_id;
    for (int first = 0; first < length; first += 32) {
      const int place = first + lane;
      const bool inside = place < length;
      const bool counts = inside && ids[sequence * stride0 + place * stride1] != padding_id;
      const u32 votes = __ballot_sync(0xffffffffu, counts);
      if (inside) positions[sequence * length + place] = counts ? before + __popc(votes & up_to_this) : padding_id;
      before += __popc(votes);
    }
  }
}
