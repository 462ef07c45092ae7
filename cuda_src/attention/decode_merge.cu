// The second launch of decode.cu where its blocks do not merge themselves: units that several blocks shared.
//
// Units are shared where the line of work was cut, or where tiles were dealt: the lengths say which, exactly as in the
// first launch, which blocks shared a unit and where their parts lie (decode_schedule.cuh). A unit of n parts has n - 1
// blocks here, which share its rows: of the line, block c looks at cut c + 1 of the units blockIdx.x of all sequences; of
// dealt tiles, a sequence has as many blocks as groups. Parts are combined in order and the result is written; what one
// block had is written already.
//
// kProgrammatic (sm_90): the launch begins while the first one runs, and waits for its end when all is prepared.
// Lengths are read before that, as the first launch began when they were there. kOverlaps: the next launch may begin, too.
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
using Result = DecodeResult<Element, kValueDim, kGroup, kDenseOut>;

extern "C" __global__ void __launch_bounds__(kThreads)
    merge_partials(const float* partials, Element* out, float* lse, const LengthIndex* __restrict__ lengths,
                   const float* __restrict__ sinks, i64 out_batch, i64 out_query, i64 out_head, i64 out_dim,
                   i64 lengths_stride, i64 sinks_stride, int capacity, int batch, int queries, int kv_heads, int left,
                   int passes, int least_positions, int dealing_slack) {
  extern __shared__ __align__(128) unsigned char smem[];
  __shared__ __align__(16) float scratch[kWarps * State::kPitch];
  int* tables = reinterpret_cast<int*>(smem);
  if constexpr (kOverlaps) ptx::griddepcontrol_launch_dependents();

  const int total_rows = queries * kGroup;
  const int together = static_cast<int>(gridDim.x), beside = static_cast<int>(blockIdx.x);
  const int group = static_cast<int>(blockIdx.y), groups = static_cast<int>(gridDim.y);
  const int sequence = static_cast<int>(blockIdx.z);
  const Lengths key_lengths{lengths, lengths_stride, capacity, queries, left};
  const Result result{out, lse, sinks, out_batch, out_query, out_head, out_dim, sinks_stride, queries,
                      kv_heads * kGroup};

  // Merges the rows rank, rank + parts - 1, ... of the unit at a place of the schedule, when the first launch has ended:
  // all blocks wait for that, as this launch must not end before. What can be prepared is: nothing of it is overlapped.
  const auto merge = [&](const auto& schedule, const Cursor& at, bool shared, int rank, int parts) {
    const int unit_begin = schedule.unit_begin(at.sequence, at.pass);
    const int unit = at.pass * together + beside;
    const int kv_head = unit / kRowBlocks;
    const int first_row = (unit - kv_head * kRowBlocks) * kRows;
    const PartsInMemory<State> rows(partials, schedule, unit_begin, together, beside);
    if constexpr (kProgrammatic) ptx::griddepcontrol_wait();
    if (!shared) return;
    combine_parts<State, FromOtherBlocks, kWarps>(
        parts, rank, parts - 1, min(kRows, total_rows - first_row), scratch, rows,
        [&](int row, const CombinedRow<State>& total) {
          result.write(result.locate(schedule.base + at.sequence, kv_head, first_row + row), total);
        });
  };

  if constexpr (kDealt) {
    const int keys = key_lengths.keys(sequence);
    if (!kByLengths || dealing_pays(key_lengths, batch, dealing_slack)) {
      Schedule<Order::kDealt> schedule{tables, tables + 1, sequence, 1, passes, groups};
      schedule.cut(least_positions);
      schedule.measure_one(key_lengths, keys);
      const int parts = schedule.sharing_groups(0, schedule.tiles(0));
      merge(schedule, Cursor{0, 0, 0, 0}, group < parts - 1, group, parts);
      return;
    }
  }
  if constexpr (!kDealt || kByLengths) {
    Schedule<Order::kLine> schedule{tables, tables + batch, 0, batch, passes,
                                    groups * static_cast<int>(gridDim.z)};
    schedule.template measure<kThreads>(key_lengths);
    schedule.cut(least_positions);
    const int cut = sequence * groups + group + 1;
    const i64 position = static_cast<i64>(cut) * schedule.chunk;
    Cursor at{0, 0, 0, 0};
    if (position < schedule.positions()) at = Cursor::at(schedule, static_cast<int>(position), 1);
    const int unit_begin = schedule.unit_begin(at.sequence, at.pass);
    const int parts = schedule.sharing_groups(unit_begin, schedule.tiles(at.sequence));
    merge(schedule, at, at.tile != 0, cut - schedule.first_group(unit_begin) - 1, parts);
  }
}
