// Philox 4x32-10: four random words from a counter and a key (Salmon, Moraes, Dror, Shaw 2011, "Parallel random numbers: as
// easy as 1, 2, 3"). A pure function: equal counters give equal words on every thread, grid and device.
#pragma once

#include "common/types.cuh"

namespace cki {

struct PhiloxWords {
  u32 word[4];
};

// counter_low, counter_high: the 128-bit counter. key: 64 bits.
__device__ __forceinline__ PhiloxWords philox_4x32_10(u64 counter_low, u64 counter_high, u64 key) {
  u32 c0 = static_cast<u32>(counter_low), c1 = static_cast<u32>(counter_low >> 32);
  u32 c2 = static_cast<u32>(counter_high), c3 = static_cast<u32>(counter_high >> 32);
  u32 k0 = static_cast<u32>(key), k1 = static_cast<u32>(key >> 32);
#pragma unroll
  for (int round = 0; round < 10; ++round) {
    const u64 product0 = static_cast<u64>(c0) * 0xD2511F53u;
    const u64 product1 = static_cast<u64>(c2) * 0xCD9E8D57u;
    c0 = static_cast<u32>(product1 >> 32) ^ c1 ^ k0;
    c1 = static_cast<u32>(product1);
    c2 = static_cast<u32>(product0 >> 32) ^ c3 ^ k1;
    c3 = static_cast<u32>(product0);
    k0 += 0x9E3779B9u;
    k1 += 0xBB67AE85u;
  }
  return {{c0, c1, c2, c3}};
}

}  // namespace cki
