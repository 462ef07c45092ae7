// The second launch of decode.cu where its blocks do not merge themselves: units that several blocks shared.
//
// Units are shared where the line of work was cut, or where tiles were dealt: the lengths say which, exactly as in the
// first launch, which blocks shared a unit and where their parts lie (decode_schedule.cuh). The rows of a unit of n parts are
// shared by n - 1 of the items that the blocks of a column blockIdx.x go through: item c stands for cut c + 1 of the line, or
// for a group of dealt tiles. Parts are combined in order and the result is written; what one block had is written already.
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
constexpr bool kByLengths = kLengthsOfLane > 0;
using Lengths = KeyLengths<LengthIndex, kPaging == 2, kLimitLeft>;
using State = StateLayout<kRows, kPaddedValueDim>;
using Result = DecodeResult<Element, kValueDim, kGroup, kDenseOut>;

extern "C" __global__ void __launch_bounds__(kThreads)
    merge_partials(const float* partials, Element* out, float* lse, const LengthIndex* __restrict__ lengths,
                   const float* __restrict__ sinks, i64 out_batch, i64 out_query, i64 out_head, i64 out_dim,
                   i64 lengths_stride, i64 sinks_stride, int capacity, int batch, int queries, int kv_heads, int left,
                   int groups, int passes, int least_positions, int dealing_slack) {
  extern __shared__ __align__(128) unsigned char smem[];
  __shared__ __align__(16) float scratch[kWarps * State::kPitch];
  int* tables = reinterpret_cast<int*>(smem);

  const int total_rows = queries * kGroup;
  const int together = static_cast<int>(gridDim.x), beside = static_cast<int>(blockIdx.x);
  const int first_item = static_cast<int>(blockIdx.y), items_at_once = static_cast<int>(gridDim.y);
  const int items = kByLengths ? groups * batch : groups;
  const Lengths key_lengths{lengths, lengths_stride, capacity, queries, left};
  const Result result{out, lse, sinks, out_batch, out_query, out_head, out_dim, sinks_stride, queries,
                      kv_heads * kGroup};

  // Merges the rows rank, rank + parts - 1, ... of the unit at a place of the schedule, when the first launch has ended:
  // all blocks wait for that, as this launch must not end before.
  const auto merge = [&](const auto& schedule, const Cursor& at, bool shared, int rank, int parts) {
    const int unit_begin = schedule.unit_begin(at.sequence, at.pass);
    const int unit = at.pass * together + beside;
    const int kv_head = unit / kRowBlocks;
    const int first_row = (unit - kv_head * kRowBlocks) * kRows;
    if constexpr (kProgrammatic) ptx::griddepcontrol_wait();
    if (!shared) return;
    combine_parts<State, FromOtherBlocks, kWarps>(
        parts, rank, parts - 1, min(kRows, total_rows - first_row), scratch,
        [&](int i, int row) {
          return partials + (static_cast<i64>(schedule.place(unit_begin, i)) * together + beside) * State::kFloats +
                 row * State::kPitch;
        },
        [&](int row, const CombinedRow<State>& total) {
          result.write(schedule.base + at.sequence, kv_head, first_row + row, total);
        });
    __syncthreads();  // the next item uses scratch, too
  };

  if constexpr (kDealt) {
    Schedule<Order::kDealt> schedule{tables, tables + 1, 0, 1, passes, groups};
    schedule.cut(least_positions);
    if (!kByLengths || dealing_pays<kLengthsOfLane>(key_lengths, batch, dealing_slack)) {
      for (int item = first_item; item < items; item += items_at_once) {
        schedule.base = item / groups;
        schedule.measure_one(key_lengths, key_lengths.keys(schedule.base));
        const int parts = schedule.sharing_groups(0, schedule.tiles(0)), rank = item - schedule.base * groups;
        merge(schedule, Cursor{0, 0, 0, 0}, rank < parts - 1, rank, parts);
      }
      return;
    }
  }
  if constexpr (!kDealt || kByLengths) {
    Schedule<Order::kLine> schedule{tables, tables + batch, 0, batch, passes, items};
    schedule.template measure<kThreads>(key_lengths);
    schedule.cut(least_positions);
    for (int item = first_item; item < items; item += items_at_once) {
      const i64 position = static_cast<i64>(item + 1) * schedule.chunk;
      Cursor at{0, 0, 0, 0};
      if (position < schedule.positions()) at = Cursor::at(schedule, static_cast<int>(position), 1);
      const int unit_begin = schedule.unit_begin(at.sequence, at.pass);
      const int parts = schedule.sharing_groups(unit_begin, schedule.tiles(at.sequence));
      merge(schedule, at, at.tile != 0, item - schedule.first_group(unit_begin), parts);
    }
  }
}
