// Units that the blocks of one cluster shared: their parts meet in distributed shared memory, and the whole is written
// without a second launch, a counter or a trip through device memory.
//
// All groups of blocks that can share a unit are one cluster: consecutive groups share a unit, so a block has a part of at
// most two, of the unit that it begins with and of the one that it ends with. Parts are cut into items of up to 32 columns
// of a row (kWholeRows: whole rows of 128). Of `parts` blocks that shared a unit, block i ends the items i, i + parts, ...: every block stores its part of
// an item in the memory of the block that ends it, as soon as it has it. The stores complete on an mbarrier there, so a
// block waits for the bytes that it needs and for nothing else: a barrier of the cluster costs half a microsecond, as its
// release waits for all accesses to memory. A block may exit when it has what it waits for.
//
// A block's inbox holds the items of both units: those of the unit that it is the first to work at fill it from its end,
// the others from its begin. They fit: of parts p and q that two units of one block have, p + q <= blocks + 1.
#pragma once

#include "attention/decode_combine.cuh"
#include "common/online_softmax.cuh"
#include "common/types.cuh"
#include "ptx/cluster.cuh"
#include "ptx/math.cuh"
#include "ptx/mbarrier.cuh"

namespace cki::attention {

// A unit that a block shares with others. parts 0: none.
struct SharedUnit {
  int parts;
  int own;  // which of them the block has
  int sequence;
  int kv_head;
  int first_row, rows;  // of the KV head's rows
};

template <class State, int kRows, int kBlocks, bool kWholeRows = false>
struct ClusterInbox {
  static constexpr int kItemColumns = kWholeRows ? 128 : State::kColumns % 32 == 0 ? 32 : 16;
  static constexpr int kRowItems = State::kColumns / kItemColumns;
  static constexpr int kPitch = kItemColumns + 4;  // the reference, the sum, and two floats that spread the banks
  static constexpr int kEntries = 2 * kRows * kRowItems + kBlocks - 1;
  static constexpr int kFloats = kEntries * kPitch;
  static constexpr int kItemLanes = kItemColumns / 4;
  static constexpr int kShares = 32 / kItemLanes;  // of the parts of an item, among lanes
  static constexpr int kTrips = (kBlocks + kShares - 1) / kShares;
  static_assert(State::kColumns % kItemColumns == 0, "whole items");

  float* entries;
  u64* arrived;  // for either unit, in the order of SharedUnit's places; one arrival beside the bytes

  // The place of a unit among the two that a block shares.
  static __device__ __forceinline__ int side(int own) { return own == 0 ? 1 : 0; }

  // One thread, before the blocks of the cluster wait for one another.
  __device__ __forceinline__ void begin() const {
    ptx::mbarrier_init(arrived, 1);
    ptx::mbarrier_init(arrived + 1, 1);
    ptx::fence_mbarrier_init();
  }

  // One thread: what this block will be sent of a unit.
  __device__ __forceinline__ void expect(const SharedUnit& unit) const {
    const int items = max((unit.rows * kRowItems - unit.own + unit.parts - 1) / unit.parts, 0);
    ptx::mbarrier_arrive_expect_tx(arrived + side(unit.own), static_cast<u32>(items * unit.parts * kPitch * 4));
  }

  // Where in the inbox of block `owner` of a unit's blocks a part of its item number `round` lies.
  __device__ __forceinline__ float* place(int owner, int round, int parts, int part) const {
    const int entry = round * parts + part;
    return entries + (owner == 0 ? kEntries - 1 - entry : entry) * kPitch;
  }

  // What items are multiplied by, in units of 2^-16, to be divided by `parts`: exact for all there can be.
  static __device__ __forceinline__ int inverse_of(int parts) {
    static_assert(kRows * kRowItems * kBlocks < 65536, "items times parts");
    return static_cast<int>(65536u / static_cast<u32>(parts)) + 1;
  }

  // Where a row of part `own` goes, in the blocks that end its items; first_rank: of the unit's first block in the
  // cluster. It is found before the row is there.
  struct Addresses {
    u32 values[State::kVectors], numbers[State::kVectors], barriers[State::kVectors];
  };
  __device__ __forceinline__ Addresses addresses(int row, int first_rank, int parts, int inverse, int own) const {
    Addresses found;
#pragma unroll
    for (int j = 0; j < State::kVectors; ++j) {
      const int column = min(State::column(j), State::kColumns - 4);
      const int item = row * kRowItems + column / kItemColumns;
      const int round = item * inverse / 65536, owner = item - round * parts;
      const u32 block = static_cast<u32>(first_rank + owner);
      found.numbers[j] = ptx::map_shared_rank(place(owner, round, parts, own) + kItemColumns, block);
      found.values[j] = found.numbers[j] - static_cast<u32>(kItemColumns - column % kItemColumns) * 4;
      found.barriers[j] = ptx::map_shared_rank(arrived + side(owner), block);
    }
    return found;
  }

  template <class Row>
  __device__ __forceinline__ void send(const Row& total, const Addresses& to) const {
#pragma unroll
    for (int j = 0; j < State::kVectors; ++j) {
      if (State::column(j) >= State::kColumns) break;
      ptx::store_async_cluster_f32x4(to.values[j], total.values[j], to.barriers[j]);
      if (State::column(j) % kItemColumns == 0)
        ptx::store_async_cluster_f32x4(to.numbers[j], make_float4(total.reference, total.sum, 0.0f, 0.0f),
                                       to.barriers[j]);
    }
  }

  // Waits for all parts of this block's items of a unit and ends them, an item a warp at a time. locate(row): what finish
  // needs of a row, found before the wait. finish(at, column, values, reference, sum): by the lanes that have an item's
  // columns, four each.
  template <int kWarps, class Locate, class Finish>
  __device__ __forceinline__ void end(const SharedUnit& unit, Locate locate, Finish finish) const {
    const int lane = static_cast<int>(threadIdx.x % 32), share = lane / kItemLanes;
    const int column = lane % kItemLanes * 4;
    const int items = unit.rows * kRowItems;
    int round = static_cast<int>(threadIdx.x / 32), item = round * unit.parts + unit.own;
    if (item >= items) return;
    auto at = locate(item / kRowItems);
    ptx::mbarrier_wait_parity(arrived + side(unit.own), 0);
#pragma unroll 1
    for (;;) {
      float2 numbers[kTrips];
      float4 loaded[kTrips];
      float largest = negative_infinity();
#pragma unroll
      for (int i = 0; i < kTrips; ++i) {
        const int part = share + i * kShares;
        numbers[i] = make_float2(negative_infinity(), 0.0f);
        loaded[i] = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
        if (part < unit.parts) {
          const float* at = place(unit.own, round, unit.parts, part);
          numbers[i] = FromShared::numbers(at + kItemColumns);
          loaded[i] = FromShared::values(at + column);
        }
        largest = fmaxf(largest, numbers[i].x);
      }
#pragma unroll
      for (int distance = kItemLanes; distance < 32; distance *= 2)
        largest = fmaxf(largest, __shfl_xor_sync(kFullWarp, largest, distance));
      const float subtract = largest == negative_infinity() ? 0.0f : largest;
      float sums[5] = {};
#pragma unroll
      for (int i = 0; i < kTrips; ++i) {
        const float weight = ptx::ex2_approx(numbers[i].x - subtract);
        sums[0] = fmaf(weight, loaded[i].x, sums[0]);
        sums[1] = fmaf(weight, loaded[i].y, sums[1]);
        sums[2] = fmaf(weight, loaded[i].z, sums[2]);
        sums[3] = fmaf(weight, loaded[i].w, sums[3]);
        sums[4] = fmaf(weight, numbers[i].y, sums[4]);
      }
#pragma unroll
      for (int distance = kItemLanes; distance < 32; distance *= 2) {
#pragma unroll
        for (float& sum : sums) sum += __shfl_xor_sync(kFullWarp, sum, distance);
      }
      if (share == 0)
        finish(at, item % kRowItems * kItemColumns + column, make_float4(sums[0], sums[1], sums[2], sums[3]), largest,
               sums[4]);
      round += kWarps;
      item = round * unit.parts + unit.own;
      if (item >= items) return;
      at = locate(item / kRowItems);
    }
  }
};

}  // namespace cki::attention
