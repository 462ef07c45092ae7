// From raw scores to logits on wgmma accumulators: scale, softcap, ALiBi, bias, then what is hidden; in this order.
//
// The same rules as attention/logits.cuh. Bias and mask are read where they lie, each lane the elements of its own
// accumulators: pairs of neighbouring keys, by one load where addresses allow. Their stride along the keys is a
// compile-time constant (1, or 0 for a broadcast axis), so that the elements of a tile are one address and immediate
// offsets; with strides in registers the addresses alone would not fit. Loads wait for the product before them in a few
// steps, not all at once, for the same reason.
#pragma once

#include "attention/logits.cuh"
#include "common/convert_element.cuh"
#include "common/online_softmax.cuh"
#include "common/types.cuh"
#include "common/vec.cuh"
#include "ptx/wgmma.cuh"

namespace cki::attention {

// p[0] and p[1], or p[0] twice where all keys share it.
template <int kKeyStride, bool kPair, class T>
__device__ __forceinline__ void load_pair(const T* p, T (&pair)[2]) {
  if constexpr (kPair && kKeyStride == 1) {
    struct alignas(2 * sizeof(T)) Both {
      T first, second;
    };
    const Both both = *reinterpret_cast<const Both*>(p);
    pair[0] = both.first;
    pair[1] = both.second;
  } else {
    pair[0] = p[0];
    pair[1] = p[kKeyStride];
  }
}

// Applies the rules to row r (0 or 1) of `scores`, keys [first_key, +kCount * 2).
// kBandTest: some of the keys may lie outside the row's interval.
template <class Features, bool kBandTest, class Band, class BiasElement, int kCount>
__device__ __forceinline__ void finish_logits(float (&scores)[kCount], int r, int first_key,
                                              const QueryRow<BiasElement>& row, const Band& band,
                                              const LogitRules& rules) {
  constexpr int kPairsInFlight = 4;
  // The lane's first key; from here on keys count from it.
  const int own_key = first_key + static_cast<int>(threadIdx.x) % 4 * 2;
  const int begin = band.begin(row.query) - own_key, end = band.end(row.query) - own_key;
  const int keys_left = band.keys - own_key;
  const int distance = row.query + band.shift - own_key;
  const BiasElement* bias = nullptr;
  const u8* mask = nullptr;
  if constexpr (Features::kBias) bias = row.bias + own_key * Features::kBiasKeyStride;
  if constexpr (Features::kMask) mask = row.mask + own_key * Features::kMaskKeyStride;
#pragma unroll
  for (int n = 0; n < kCount / 4; ++n) {
    BiasElement biases[2];
    u8 kept[2];
    // A pair's second key may be the first past the end: then it is hidden, and no pair is loaded (kPair needs an even
    // number of keys).
    const bool exists = !kBandTest || 8 * n < keys_left;
    const bool both_exist = !kBandTest || 8 * n + 1 < keys_left;
    if constexpr (Features::kBias) {
      if (both_exist) {
        load_pair<Features::kBiasKeyStride, Features::kBiasPair>(bias + 8 * n * Features::kBiasKeyStride, biases);
      } else if (exists) {
        biases[0] = biases[1] = bias[8 * n * Features::kBiasKeyStride];
      }
    }
    if constexpr (Features::kMask) {
      if (both_exist) {
        load_pair<Features::kMaskKeyStride, Features::kMaskPair>(mask + 8 * n * Features::kMaskKeyStride, kept);
      } else if (exists) {
        kept[0] = kept[1] = mask[8 * n * Features::kMaskKeyStride];
      }
    }
#pragma unroll
    for (int e = 0; e < 2; ++e) {
      float& score = scores[4 * n + 2 * r + e];
      const int key = 8 * n + e;
      float logit = score;
      if constexpr (Features::kSoftcap) {
        logit = soft_capped(logit, rules);
      } else if constexpr (Features::kScaleFirst) {
        logit *= rules.scale;
      }
      if constexpr (Features::kAlibi) logit -= row.slope * fabsf(static_cast<float>(distance - key));
      bool visible = true;
      if constexpr (kBandTest) visible = key < end;
      if constexpr (kBandTest && Features::kLimitLeft) visible = visible && key >= begin;
      if constexpr (Features::kBias) {
        const float added = to_float(biases[e]);
        visible = visible && added != negative_infinity();
        logit += added;
      }
      if constexpr (Features::kMask) visible = visible && kept[e] != 0;
      score = visible ? logit : negative_infinity();
    }
    if constexpr (Features::kBias || Features::kMask) {
      if (n % kPairsInFlight == kPairsInFlight - 1) ptx::wgmma_fence_registers(scores);
    }
  }
}

// Both rows of a lane, or those that are wanted.
template <class Features, bool kBandTest, class Band, class BiasElement, int kCount>
__device__ __forceinline__ void finish_scores(float (&scores)[kCount], const QueryRow<BiasElement> (&rows)[2],
                                              int first_key, const Band& band, const LogitRules& rules,
                                              const bool (&wanted)[2] = {true, true}) {
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    if (wanted[r]) finish_logits<Features, kBandTest>(scores, r, first_key, rows[r], band, rules);
  }
}

}  // namespace cki::attention
