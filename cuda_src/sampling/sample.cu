// The next token of each row of logits: greedy, or drawn at random after temperature, top-k, top-p and min-p.
//
//   p_i = logit, after the repetition penalty          m = max_i p_i
//   d_i = m - p_i in fp32                              the order of tokens: by d, equal ones by token
//   w_i = exp(-d_i / temperature)                      weight
//   kept = { the first top_k of the order, K }  and  { i in K: sum of w_j, j in K before i,  <  top_p * sum of w_j, j in K }
//          and  { w_i >= min_p }                       a beginning of the order, never empty
//   token = argmax over kept of  -d_i / temperature - log(-log(1 - u_i))
//
// which draws token i with probability w_i / sum over kept of w_j (the Gumbel-max trick). u_i is word i % 4 of Philox 4x32-10
// with counter (i / 4, step) and key seed: a row's token depends on its logits, parameters, seed and step alone, not on the
// batch, and not on where kept ends as long as the winner is in it. So kept needs no sorting: the block draws from all that
// is left; if sums over what comes before the winner say that it is not kept, nothing from the winner on is, and the block
// draws again from what comes before it. The mass that is left shrinks by half and more each time, in the mean.
//
// A temperature of 0 is the first token of the order. logprobs: log softmax of the row as it came (no penalty, no
// temperature) at the token; and where asked for, of the first tokens of that softmax.
//
// Parameters are one a row, null for their neutral values. seen: bits of the tokens that a row's sequence holds, row
// seen_rows[row] of [.., seen_stride] words (a negative one has none); the drawn token's is set.
//
// Work: a block a row, which stays in L2 while it is read a few times. Bytes: row's own. The first pass, all that a greedy token
// needs, is a cluster's, kBlocks of them a row: one SM takes 33 us for 152 000 logits. The others then leave.
// Prelude: Element, StepIndex (int or i64), kThreads, kBlocks (1 or 8), kVectorLoads, kProgrammatic.
#include "common/philox.cuh"
#include "ptx/cluster.cuh"
#include "ptx/grid_dependency.cuh"
#include "ptx/math.cuh"
#include "sampling/nearest.cuh"

using namespace cki;

namespace {

constexpr float kLog2E = 1.44269504f;
constexpr float kMostNoise = 22.9f;  // -log(-log(1 - u)) for the least u that a word gives, rounded up

// -log(-log(1 - u)) for u = (word + 1/2) / 2^32. Large noise comes from small u, which fp32 resolves well.
__device__ __forceinline__ float gumbel(u32 word) {
  const float u = fminf((static_cast<float>(word) + 0.5f) * 0x1p-32f, 1.0f - 0x1p-24f);
  return -logf(-log1pf(-u));
}

struct Draw {
  float inverse_temperature, largest;
  u64 seed, step;

  __device__ __forceinline__ float scaled(float logit) const {
    return distance_from(largest, logit) * inverse_temperature;
  }
  __device__ __forceinline__ float weight(float logit) const { return ptx::ex2_approx(-kLog2E * scaled(logit)); }

  // The winner among the tokens at or before `last` whose scaled distance is at most `farthest`.
  __device__ __forceinline__ Scored among(const LogitRow& row, const Place& last, float farthest,
                                          BlockScratch& scratch) const {
    Scored best{Max::identity(), kNoToken};
    row.for_each_group([&](int first, float (&logits)[kGroup]) {
      bool any = false;
#pragma unroll
      for (int i = 0; i < kGroup; ++i) {
        const bool inside = first + i < row.vocabulary && last.holds(distance_from(largest, logits[i]), first + i);
        logits[i] = inside && scaled(logits[i]) <= farthest ? -scaled(logits[i]) : Max::identity();
        any |= logits[i] + kMostNoise >= best.value && logits[i] > Max::identity();
      }
      if (!any) return;  // no noise makes one of these the winner
      const PhiloxWords words = philox_4x32_10(static_cast<u64>(first / kGroup), step, seed);
#pragma unroll
      for (int i = 0; i < kGroup; ++i)
        if (logits[i] > Max::identity()) best = better_of(best, {logits[i] + gumbel(words.word[i]), first + i});
    });
    return block_best(best, scratch);
  }

  // Sum of the weights of the tokens at or before `last`.
  __device__ __forceinline__ float mass(const LogitRow& row, const Place& last, BlockScratch& scratch) const {
    float sum = 0.0f;
    row.for_each([&](int token, float logit) {
      if (last.holds(distance_from(largest, logit), token)) sum += weight(logit);
    });
    return block_total(sum, scratch);
  }
};

// A row's first token in the order, and the sum of exp(logit - largest).
struct Peak {
  Scored first;
  float total;
};

__device__ __forceinline__ float relative(float largest, float logit) {
  return ptx::ex2_approx(-kLog2E * distance_from(largest, logit));
}

// One pass: each thread's sum is relative to the largest that it has seen, and to the block's at the end.
__device__ __forceinline__ Peak peak_of(const LogitRow& row, int block, BlockScratch& scratch) {
  Peak own{{Max::identity(), kNoToken}, 0.0f};
  row.for_each_group<2 * kAhead, kBlocks>(
      [&](int first, float (&logits)[kGroup]) {
        const float before = own.first.value;
#pragma unroll
        for (int i = 0; i < kGroup; ++i)
          if (first + i < row.vocabulary) own.first = better_of(own.first, {logits[i], first + i});
        own.total *= relative(own.first.value, before);
#pragma unroll
        for (int i = 0; i < kGroup; ++i)
          if (first + i < row.vocabulary) own.total += relative(own.first.value, logits[i]);
      },
      block);
  const Scored first = block_best(own.first, scratch);
  return {first, block_total(own.total * relative(first.value, own.first.value), scratch)};
}

// The peaks of a cluster's blocks as one, in their order, for its first block. To be called by all of them.
template <int kCount>
__device__ __forceinline__ Peak peak_of_cluster(const Peak& own, Peak& shared) {
  if (threadIdx.x == 0) shared = own;
  ptx::cluster_sync();
  Peak all = own;
  if (ptx::cluster_cta_rank() == 0) {
    Peak peaks[kCount];
#pragma unroll
    for (int block = 0; block < kCount; ++block) {
      const u32 peer = static_cast<u32>(block);
      peaks[block].first.value = ptx::load_shared_cluster_f32(ptx::map_shared_rank(&shared.first.value, peer));
      peaks[block].first.token = static_cast<int>(ptx::load_shared_cluster_u32(ptx::map_shared_rank(&shared.first.token, peer)));
      peaks[block].total = ptx::load_shared_cluster_f32(ptx::map_shared_rank(&shared.total, peer));
      all.first = better_of(all.first, peaks[block].first);
    }
    all.total = 0.0f;
#pragma unroll
    for (int block = 0; block < kCount; ++block)
      all.total += peaks[block].total * relative(all.first.value, peaks[block].first.value);
  }
  ptx::cluster_sync();  // no block's memory goes while it is read
  return all;
}

template <typename T>
__device__ __forceinline__ T parameter(const T* values, i64 stride, int row, T neutral) {
  return values == nullptr ? neutral : values[row * stride];
}

}  // namespace

extern "C" __global__ void __launch_bounds__(kThreads, 1)
    sample(const Element* logits, const float* temperature, const int* top_k, const float* top_p, const float* min_p,
           const float* repetition_penalty, const i64* seed, const StepIndex* step, u32* seen, const int* seen_rows,
           const int* alternatives, int* tokens, float* logprobs, int* top_tokens, float* top_logprobs, int vocabulary,
           int top_columns, int seen_count, i64 logits_stride, i64 logits_step, i64 temperature_stride, i64 top_k_stride,
           i64 top_p_stride, i64 min_p_stride, i64 penalty_stride, i64 seed_stride, i64 step_stride, i64 seen_stride,
           i64 seen_rows_stride, i64 alternatives_stride, i64 tokens_stride, i64 logprobs_stride, i64 top_tokens_stride,
           i64 top_logprobs_stride) {
  __shared__ BlockScratch scratch;
  __shared__ CandidateList list;
  if constexpr (kProgrammatic) {
    ptx::griddepcontrol_launch_dependents();
    ptx::griddepcontrol_wait();
  }
  const int r = static_cast<int>(blockIdx.x) / kBlocks, block = static_cast<int>(blockIdx.x) % kBlocks;
  const int seen_row = parameter(seen_rows, seen_rows_stride, r, -1);
  u32* seen_words = 0 <= seen_row && seen_row < seen_count ? seen + seen_row * seen_stride : nullptr;
  const LogitRow plain{logits + r * logits_stride, logits_step, vocabulary, nullptr, 1.0f};
  const float penalty = parameter(repetition_penalty, penalty_stride, r, 1.0f);
  Peak peak = peak_of(plain, block, scratch);
  if constexpr (kBlocks > 1) {
    __shared__ Peak shared;
    peak = peak_of_cluster<kBlocks>(peak, shared);
    if (block > 0) return;
  }
  const Scored top = peak.first;
  LogitRow row = plain;
  Scored first = top;
  if (penalty != 1.0f && seen_words != nullptr) {
    row.seen = seen_words;
    row.penalty = penalty;
    first = {Max::identity(), kNoToken};
    row.for_each([&](int token, float logit) { first = better_of(first, {logit, token}); });
    first = block_best(first, scratch);
  }

  int token = first.token;
  const float heat = parameter(temperature, temperature_stride, r, 1.0f);
  if (heat > 0.0f && first.value > Max::identity()) {
    const Draw draw{1.0f / fmaxf(heat, 1e-30f), first.value,
                    static_cast<u64>(parameter(seed, seed_stride, r, i64{0})),
                    static_cast<u64>(parameter(step, step_stride, r, StepIndex{0}))};
    const int most = parameter(top_k, top_k_stride, r, 0);
    const float share = parameter(top_p, top_p_stride, r, 1.0f);
    const float least = parameter(min_p, min_p_stride, r, 0.0f);
    const float farthest = least > 0.0f ? fmaxf(-logf(least), 0.0f) : -Max::identity();
    Place last{-Max::identity(), kNoToken};
    if (0 < most && most < vocabulary) last = nearest(row, first.value, most, list, scratch);
    const float limit = share < 1.0f ? share * draw.mass(row, last, scratch) : 0.0f;
    while (true) {
      token = draw.among(row, last, farthest, scratch).token;
      if (share >= 1.0f || token == first.token) break;
      last = {distance_from(first.value, row.one_penalised(token)), token - 1};  // everything before the winner
      if (draw.mass(row, last, scratch) < limit) break;
    }
  }

  // The softmax of the row as it came.
  const float log_total = logf(peak.total);

  auto log_share = [&](float logit) { return -distance_from(top.value, logit) - log_total; };

  const int shown = min(parameter(alternatives, alternatives_stride, r, 0), top_columns);
  Scored next = top;
  for (int column = 0; column < shown; ++column) {
    if (threadIdx.x == 0) {
      top_tokens[r * top_tokens_stride + column] = next.token;
      top_logprobs[r * top_logprobs_stride + column] = log_share(next.value);
    }
    Scored following{Max::identity(), kNoToken};
    plain.for_each([&](int other, float logit) {
      if (logit < next.value || (logit == next.value && other > next.token)) following = better_of(following, {logit, other});
    });
    next = block_best(following, scratch);
  }
  if (threadIdx.x == 0) {
    tokens[r * tokens_stride] = token;
    logprobs[r * logprobs_stride] = log_share(plain.one(token));
    if (seen_words != nullptr) seen_words[token / 32] |= 1u << (token % 32);
  }
}
