// The k-th of a row's tokens in the order of their distance from the largest logit, equal distances by token: where top-k
// ends.
//
// Distances are not negative, so their bits order as they do, and a threshold is found bit by bit from counts alone. Reading
// the row 31 times would be slow. But k of the threads' own nearest tokens lie within some distance, which the block finds in
// registers; only tokens within it can be among the k, they fit into shared memory (unless very many are equal), and the
// search goes over those.
#pragma once

#include "sampling/block_best.cuh"
#include "sampling/logit_row.cuh"

namespace cki {

constexpr int kCandidates = 2 * kThreads;
constexpr u32 kInfinityBits = 0x7f800000u;

// A place in the order: everything nearer comes before it, and of equal distance the lower token.
struct Place {
  float distance;
  int token;

  __device__ __forceinline__ bool holds(float other, int other_token) const {  // at or before this place
    return other < distance || (other == distance && other_token <= token);
  }
};

struct CandidateList {
  u32 distances[kCandidates];
  int tokens[kCandidates];
  int count;
};

// The smallest bits b for which count(b) >= wanted, of monotone counts that are the same for every thread.
template <typename Count>
__device__ __forceinline__ u32 smallest_with(int wanted, u32 highest, Count count) {
  u32 low = 0;
  while (low < highest) {
    const u32 middle = low + (highest - low) / 2;
    if (count(middle) >= wanted) highest = middle;
    else low = middle + 1;
  }
  return low;
}

// The k-th nearest token, for 1 <= k < vocabulary. largest: the row's largest (penalised) logit.
__device__ __forceinline__ Place nearest(const LogitRow& row, float largest, int k, CandidateList& list,
                                         BlockScratch& scratch) {
  u32 own = kInfinityBits;
  row.for_each([&](int, float logit) { own = min(own, __float_as_uint(distance_from(largest, logit))); });
  u32 reach = kInfinityBits;
  if (k <= kThreads)
    reach = smallest_with(k, kInfinityBits, [&](u32 bits) { return __syncthreads_count(own <= bits); });

  __syncthreads();
  if (threadIdx.x == 0) list.count = 0;
  __syncthreads();
  row.for_each([&](int token, float logit) {
    const u32 bits = __float_as_uint(distance_from(largest, logit));
    if (bits > reach) return;
    const int place = atomicAdd(&list.count, 1);
    if (place < kCandidates) {
      list.distances[place] = bits;
      list.tokens[place] = token;
    }
  });
  __syncthreads();
  const int listed = list.count;

  // How many tokens satisfy a condition on (bits of the distance, token).
  auto count_of = [&](auto condition) {
    int found = 0;
    if (listed <= kCandidates) {
      for (int i = threadIdx.x; i < listed; i += kThreads) found += condition(list.distances[i], list.tokens[i]);
    } else {
      row.for_each<1>([&](int token, float logit) {
        found += condition(__float_as_uint(distance_from(largest, logit)), token);
      });
    }
    return block_total(found, scratch);
  };
  const u32 last = smallest_with(k, reach, [&](u32 bits) {
    return count_of([=](u32 distance, int) { return distance <= bits; });
  });
  const int before = count_of([=](u32 distance, int) { return distance < last; });
  const u32 token = smallest_with(k - before, row.vocabulary - 1, [&](u32 limit) {
    return count_of([=](u32 distance, int other) { return distance == last && other <= static_cast<int>(limit); });
  });
  return {__uint_as_float(last), static_cast<int>(token)};
}

}  // namespace cki
