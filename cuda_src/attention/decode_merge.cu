// The second launch of decode.cu where its blocks do not merge themselves: units that several blocks shared.
//
// Units are shared where the line of work was cut. Block (j, c - 1) looks at cut c of the units j of all sequences: it finds out from the lengths, exactly as the first launch did, which unit the cut went through, which
// blocks shared that and where their parts lie (decode_schedule.cuh). The blocks of a unit's cuts share its rows; where tiles are
// dealt, as many as the unit has cuts. Parts
// are combined in order and the result is written; what one block had is written already.
//
// kProgrammatic (sm_90): the launch begins while the first one runs, and waits for its end when all is prepared.
// Lengths are read before that, as the first launch began when they were there.
//
// Bytes moved: the parts, fp32, once: at most two parts of kRows rows a block of the first launch; they come from L2.
#include "attention/decode_combine.cuh"
#include "attention/decode_result.cuh"
#include "attention/decode_schedule.cuh"
#include "ptx/grid_dependency.cuh"

using namespace cki;
using namespace cki::attention;

constexpr int kThreads = 32 * kWarps;
using Lengths = KeyLengths<LengthIndex, kPaging == 2, kLimitLeft>;
using State = StateLayout<kRows, kPaddedValueDim>;
using Division = Schedule<kDealt ? Order::kDealt : Order::kLine>;
using Result = DecodeResult<Element, kValueDim, kGroup, kDenseOut>;

extern "C" __global__ void __launch_bounds__(kThreads)
    merge_partials(const float* partials, Element* out, float* lse, const LengthIndex* __restrict__ lengths,
                   const float* __restrict__ sinks, i64 out_batch, i64 out_query, i64 out_head, i64 out_dim,
                   i64 lengths_stride, i64 sinks_stride, int capacity, int batch, int queries, int kv_heads, int left,
                   int passes, int least_positions) {
  extern __shared__ __align__(128) unsigned char smem[];
  __shared__ __align__(16) float scratch[kWarps * State::kPitch];
  int* tables = reinterpret_cast<int*>(smem);

  const int total_rows = queries * kGroup;
  const int together = static_cast<int>(gridDim.x), beside = static_cast<int>(blockIdx.x);
  const int cut = static_cast<int>(blockIdx.y) + 1;
  Division schedule{tables, tables + batch, 0, batch, passes, static_cast<int>(gridDim.y) + 1};
  schedule.template measure<kThreads>(Lengths{lengths, lengths_stride, capacity, queries, left});
  schedule.cut(least_positions);

  const i64 position = static_cast<i64>(cut) * schedule.chunk;
  Cursor at{0, 0, 0, 0};
  if (!kDealt && position < schedule.positions()) at = Cursor::at(schedule, static_cast<int>(position), 1);
  const int unit_begin = schedule.unit_begin(at.sequence, at.pass);
  const int parts = schedule.sharing_groups(unit_begin, schedule.tiles(at.sequence));
  const int rank = cut - schedule.first_group(unit_begin) - 1;  // among the unit's parts - 1 cuts
  const int unit = at.pass * together + beside;
  const int kv_head = unit / kRowBlocks;
  const int first_row = (unit - kv_head * kRowBlocks) * kRows;
  const Result result{out, lse, sinks, out_batch, out_query, out_head, out_dim, sinks_stride, queries,
                      kv_heads * kGroup};
  if constexpr (kProgrammatic) ptx::griddepcontrol_wait();  // all blocks: the launch must not end before the first one
  if (kDealt ? rank >= parts - 1 : at.tile == 0) return;  // not within a unit
  combine_parts<State, FromOtherBlocks, kWarps>(
      parts, rank, parts - 1, min(kRows, total_rows - first_row), scratch,
      [&](int i, int row) {
        return partials + (static_cast<i64>(schedule.place(unit_begin, i)) * together + beside) * State::kFloats +
               row * State::kPitch;
      },
      [&](int row, const CombinedRow<State>& total) { result.write(at.sequence, kv_head, first_row + row, total); });
}
