// A boolean mask beside a row: true keeps the element.
//
// Prelude constants: kVectorMask (mask rows are dense and their vectors aligned, so that kVectorSize bytes are read at a
// time; else one by one, which a mask that is broadcast along the row needs), kVectorSize.
#pragma once

#include "common/types.cuh"
#include "common/vec.cuh"

namespace cki {

// N (kVectorSize) bytes of a mask, the first at p.
template <int N>
__device__ __forceinline__ void load_mask(const u8* p, i64 step, bool (&keep)[N]) {
  if constexpr (kVectorMask) {
    static_assert(N % 4 == 0, "whole words");
    u32 words[N / 4];
    load_words(p, words);
#pragma unroll
    for (int i = 0; i < N; ++i) keep[i] = (words[i / 4] >> (i % 4 * 8) & 0xff) != 0;
  } else {
#pragma unroll
    for (int i = 0; i < N; ++i) keep[i] = p[i * step] != 0;
  }
}

}  // namespace cki
