// The second launch of decode.cu where its blocks do not merge themselves: units that several blocks shared.
//
// One block a unit finds out from the lengths, exactly as the first launch did, which blocks shared it and where their
// parts lie (decode_schedule.cuh), combines them in order and writes the result. A unit that one block had is written
// already.
// Bytes moved: the parts, fp32, once: at most two parts of kRows rows a block of the first launch; they come from L2.
#include "attention/decode_combine.cuh"
#include "attention/decode_schedule.cuh"
#include "common/convert_element.cuh"

using namespace cki;
using namespace cki::attention;

constexpr int kThreads = 32 * kWarps;
using Lengths = KeyLengths<LengthIndex, kPaging == 2, kLimitLeft>;
using State = StateLayout<kRows, kValueDim>;

extern "C" __global__ void __launch_bounds__(kThreads)
    merge_partials(float* partials, Element* out, float* lse, const LengthIndex* __restrict__ lengths,
                   const float* __restrict__ sinks, i64 out_batch, i64 out_query, i64 out_head, i64 out_dim,
                   i64 lengths_stride, i64 sinks_stride, int blocks, int capacity, int batch, int queries, int kv_heads,
                   int group, int left, int least_positions) {
  extern __shared__ __align__(1024) unsigned char smem[];
  __shared__ float totals[kRows][2];
  float* weights = reinterpret_cast<float*>(smem);  // [kRows][parts]
  int* tables = reinterpret_cast<int*>(weights + kRows * blocks);

  const int total_rows = queries * group;
  const int row_blocks = (total_rows + kRows - 1) / kRows;
  const int units = kv_heads * row_blocks;
  const int sequence = static_cast<int>(blockIdx.x) / units;
  const int unit = static_cast<int>(blockIdx.x) - sequence * units;
  Schedule schedule{tables, tables + batch, 0, batch, units, 0};
  schedule.measure<kThreads>(Lengths{lengths, lengths_stride, capacity, queries, left});
  schedule.cut(blocks, least_positions);

  const int unit_begin = schedule.unit_begin(sequence, unit);
  const int parts = schedule.sharing_blocks(unit_begin, schedule.tiles(sequence));
  if (parts == 1) return;
  const int kv_head = unit / row_blocks;
  const int first_row = (unit - kv_head * row_blocks) * kRows;
  combine<State, FromOtherBlocks, kWarps>(
      parts, min(kRows, total_rows - first_row), weights, totals,
      [&](int i) { return partials + static_cast<i64>(schedule.place(unit_begin, i)) * State::kFloats; },
      [&](int row, int column, float value, float reference, float sum) {
        const int query = (first_row + row) / group, head = kv_head * group + (first_row + row) % group;
        const RowEnd end(reference, sum, sinks == nullptr ? negative_infinity() : sinks[head * sinks_stride]);
        out[sequence * out_batch + query * out_query + head * out_head + column * out_dim] =
            from_float<Element>(value * end.factor);
        if (column == 0 && lse != nullptr)
          lse[(static_cast<i64>(sequence) * kv_heads * group + head) * queries + query] = end.lse;
      });
}
