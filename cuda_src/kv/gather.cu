// Keys and values of some sequences out of a paged cache of e4m3, packed one sequence behind the other, as 16-bit numbers.
//
//   packed[first(s) + p] = codes * scale          of the block that the table of sequence s names for its position p
//
// for what reads keys of 16 bits only: prefills over such a cache. A key is read once for all of a step's queries, so the
// copy costs little beside their products.
//
// Work: a thread moves 8 elements (8 bytes of codes) of a key or a value; a token's heads lie side by side, so neighbouring
//       threads move neighbouring codes. The sequence of a token is found by bisection.
// Bytes: codes and scales once, twice the codes' bytes written.
//
// offsets: [sequences + 1], where each sequence's keys begin among the packed ones. Table entries outside the cache give
// zeros. Row r of the packed tensors is written for r < offsets[sequences] alone.
//
// Grid: (ceil(most keys * kv_heads * head_dim / 8 / kThreads), 2): keys, then values.
// Prelude: Element (cki::f16, cki::bf16), kThreads, kHeadDim (a multiple of 8), kHeads, kBlockSize.
#include "common/convert_element.cuh"
#include "common/types.cuh"
#include "common/vec.cuh"

using namespace cki;

extern "C" __global__ void __launch_bounds__(kThreads)
    gather_cache(const e4m3* k, const e4m3* v, const float* k_scale, const float* v_scale, const int* block_table,
                 const int* offsets, Element* k_packed, Element* v_packed, int sequences, int blocks, int keys,
                 i64 table_stride) {
  constexpr int kUnits = kHeads * kHeadDim / 8;  // of a token
  const i64 unit = static_cast<i64>(blockIdx.x) * kThreads + threadIdx.x;
  const i64 row = unit / kUnits;
  if (row >= min(offsets[sequences], keys)) return;
  int sequence = 0;  // the last one that begins at or before the row
  for (int behind = sequences; behind - sequence > 1;) {
    const int middle = (sequence + behind) / 2;
    if (offsets[middle] <= row) sequence = middle;
    else behind = middle;
  }
  const int position = static_cast<int>(row) - offsets[sequence];
  const int block = block_table[sequence * table_stride + position / kBlockSize];
  const int inside = static_cast<int>(unit % kUnits) * 8;
  const bool values = blockIdx.y == 1;
  float numbers[8] = {};
  if (0 <= block && block < blocks) {
    const i64 token = static_cast<i64>(block) * kBlockSize + position % kBlockSize;
    const float scale = (values ? v_scale : k_scale)[token * kHeads + inside / kHeadDim];
    const e4m3* codes = (values ? v : k) + token * (kHeads * kHeadDim) + inside;
    const uint2 words = *reinterpret_cast<const uint2*>(codes);
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const u16 pair = static_cast<u16>((i < 2 ? words.x : words.y) >> (i % 2 * 16));
      ptx::f16x2_to_f32x2(e4m3x2_as_f16x2(pair), numbers[2 * i], numbers[2 * i + 1]);
    }
#pragma unroll
    for (int i = 0; i < 8; ++i) numbers[i] *= scale;
  }
  store_floats((values ? v_packed : k_packed) + row * (kHeads * kHeadDim) + inside, numbers);
}
