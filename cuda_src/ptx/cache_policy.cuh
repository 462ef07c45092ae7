// L2 cache policies: the 64-bit values that `createpolicy.fractional` yields for a fraction of 1, as immediate
// constants. TMA copies take them as their last argument.
#pragma once

#include "common/types.cuh"

namespace cki::ptx {

constexpr u64 kCacheEvictNormal = 0x1000000000000000ull;
constexpr u64 kCacheEvictFirst = 0x12f0000000000000ull;
constexpr u64 kCacheEvictLast = 0x14f0000000000000ull;

}  // namespace cki::ptx
