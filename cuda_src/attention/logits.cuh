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
  u32 dropout_row;  // batch * heads + head (attention/dropout.cuh)
};

// The numbers that are the same for all rows. Strides are in elements, along the key axis.
struct LogitRules {
  float scale;
  float softcap;
  float softcap_rate;  // 2 * log2(e) * scale / softcap
  i64 bias_stride;
  i64 mask_stride;
};

// softcap * tanh(x), x = scale * score / softcap. tanh(x) = 1 - 2 / (1 + e^2x) has the absolute error of fp32 near 1 and
// saturates instead of overflowing (tanh.approx is off by 2^-11). Where x is small that error is large beside the logit, so
// there the series is taken: x (1 - x^2/3 + 2x^4/15 - 17x^6/315 + 62x^8/2835), exact to 6e-8 of x below 0.3.
__device__ __forceinline__ float soft_capped(float score, const LogitRules& rules) {
  const float exponent = score * rules.softcap_rate;
  const float reciprocal = ptx::rcp_approx(1.0f + ptx::ex2_approx(exponent));
  const float saturating = fmaf(-2.0f * rules.softcap, reciprocal, rules.softcap);
  const float x = exponent * 0.34657359f;  // ln(2) / 2
  const float square = x * x;
  float series = fmaf(square, 62.0f / 2835.0f, -17.0f / 315.0f);
  series = fmaf(square, series, 2.0f / 15.0f);
  series = fmaf(square, series, -1.0f / 3.0f);
  const float logit = score * rules.scale;
  return fabsf(x) < 0.3f ? fmaf(logit * square, series, logit) : saturating;
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
