// Arithmetic on vector clocks, given as arrays of n times. The loops have no early end, so that they become vector
// instructions.
#pragma once
#include <algorithm>

#include "types.h"

namespace cki::sim {

inline void join(u32* into, const u32* from, u32 n) {
  for (u32 i = 0; i < n; ++i) into[i] = std::max(into[i], from[i]);
}

// Whether any time of `a` is later than that of `b`.
inline bool exceeds(const u32* a, const u32* b, u32 n) {
  u32 later = 0;
  for (u32 i = 0; i < n; ++i) later |= a[i] > b[i];
  return later != 0;
}

}  // namespace cki::sim
