// From raw scores to logits: scale, softcap, ALiBi, bias, then what is hidden; in this order.
//
// Bias and mask are read where they lie, by any strides (0 for a broadcast axis), each lane reading the elements that
// belong to its accumulators: four lanes read eight neighbouring keys, and nothing of size queries x keys is ever written.
// A key is hidden by replacing its logit, never by adding to it, so that a NaN in a hidden key leaves no trace.
#pragma once

#include "common/convert_element.cuh"
#include "common/online_softmax.cuh"
#include "common/types.cuh"
#include "ptx/math.cuh"

namespace cki::attention {

// What one query row needs besides the band.
template <class BiasElement>
struct QueryRow {
  int query;
  float slope;              // ALiBi: subtracted from the logit for each step of distance
  const BiasElement* bias;  // where the row's bias and mask begin
  const u8* mask;
};

// The numbers that are the same for all rows. Strides are in elements, along the key axis.
struct LogitRules {
  float scale;
  float softcap;
  float softcap_rate;  // 2 * log2(e) * scale / softcap
  i64 bias_stride;
  i64 mask_stride;
};

// softcap * tanh(scale * score / softcap), tanh(x) = 1 - 2 / (1 + e^2x). Its absolute error is that of fp32 near 1, which is
// what counts in a logit (tanh.approx is off by 2^-11), and it saturates instead of overflowing.
__device__ __forceinline__ float soft_capped(float score, const LogitRules& rules) {
  const float reciprocal = ptx::rcp_approx(1.0f + ptx::ex2_approx(score * rules.softcap_rate));
  return fmaf(-2.0f * rules.softcap, reciprocal, rules.softcap);
}

// Whether bias and mask let a row see a key of its interval.
template <class Features, class BiasElement>
__device__ __forceinline__ bool is_visible(int key, const QueryRow<BiasElement>& row, const LogitRules& rules) {
  bool visible = true;
  if constexpr (Features::kBias) visible = to_float(row.bias[key * rules.bias_stride]) != negative_infinity();
  if constexpr (Features::kMask) visible = visible && row.mask[key * rules.mask_stride] != 0;
  return visible;
}

// Applies the rules to elements first and first + 1 of each tile of `scores`, keys [first_key, +8 kTiles).
// Features: which rules there are. kBandTest: some of the keys may lie outside the row's interval.
template <class Features, bool kBandTest, class Band, class BiasElement, int kTiles>
__device__ __forceinline__ void apply_rules(float (&scores)[kTiles][4], int first, int first_key,
                                            const QueryRow<BiasElement>& row, const Band& band,
                                            const LogitRules& rules) {
  const int begin = band.begin(row.query), end = band.end(row.query);
  const int position = row.query + band.shift;
#pragma unroll
  for (int n = 0; n < kTiles; ++n) {
#pragma unroll
    for (int e = 0; e < 2; ++e) {
      const int key = first_key + n * 8 + static_cast<int>(threadIdx.x) % 4 * 2 + e;
      float logit = scores[n][first + e];
      if constexpr (Features::kSoftcap) {
        logit = soft_capped(logit, rules);
      } else if constexpr (Features::kScaleFirst) {
        logit *= rules.scale;
      }
      if constexpr (Features::kAlibi) logit -= row.slope * fabsf(static_cast<float>(position - key));
      bool visible = true;
      if constexpr (kBandTest) visible = key >= begin && key < end;
      if constexpr (Features::kBias) {
        if (visible) {
          const float bias = to_float(row.bias[key * rules.bias_stride]);
          visible = bias != negative_infinity();
          logit += bias;
        }
      }
      if constexpr (Features::kMask) {
        if (visible) visible = row.mask[key * rules.mask_stride] != 0;
      }
      scores[n][first + e] = visible ? logit : negative_infinity();
    }
  }
}

}  // namespace cki::attention
