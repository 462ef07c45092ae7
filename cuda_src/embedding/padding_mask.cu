// Which tokens of each sequence are kept, one byte a token, as attention and pooling read it.
//
//   out[b, s] = source[b, s] != 0         a mask of any integer type
//   out[b, s] = s < source[b]             kSourceIsLengths: the first tokens are kept
//   out[b, s] = 1                         without kHasSource
//
// A model is given masks of 64-bit integers or lengths; every layer reads the mask again, so it is made small and dense
// once. source: of Source, any strides (stride 1 of lengths is not used). out: u8 [sequences, length], row-major.
//
// Work: a thread a token, walking in steps of the grid.
#include "common/types.cuh"

using namespace cki;

extern "C" __global__ void __launch_bounds__(kThreads, kMinBlocks)
    padding_mask(const Source* source, u8* out, i64 tokens, int length, i64 stride0, i64 stride1) {
  const i64 step = static_cast<i64>(gridDim.x) * kThreads;
  for (i64 token = static_cast<i64>(blockIdx.x) * kThreads + threadIdx.x; token < tokens; token += step) {
    bool kept = true;
    if constexpr (kHasSource) {
      const i64 sequence = token / length;
      const i64 place = token % length;
      if constexpr (kSourceIsLengths)
        kept = place < source[sequence * stride0];
      else
        kept = source[sequence * stride0 + place * stride1] != 0;
    }
    out[token] = kept ? 1 : 0;
  }
}
