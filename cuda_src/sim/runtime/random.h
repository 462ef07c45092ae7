// The seeded generator behind every choice of a launch: xorshift64, one for each group of co-resident blocks, so that a
// seed reproduces a schedule whatever the number of OS threads.
#pragma once
#include "types.h"

namespace cki::sim {

class Random {
 public:
  void seed(u64 launch_seed, u64 group_index) {
    state_ = (launch_seed + 1) * 0x9E3779B97F4A7C15ull ^ (group_index + 1) * 0xD1B54A32D192ED03ull;
    if (!state_) state_ = 1;
    for (int i = 0; i < 4; ++i) next();
  }
  u64 next() {
    state_ ^= state_ << 13;
    state_ ^= state_ >> 7;
    state_ ^= state_ << 17;
    return state_;
  }
  u32 below(u32 n) { return static_cast<u32>((next() >> 32) * n >> 32); }
  bool one_in(u32 n) { return below(n) == 0; }

 private:
  u64 state_ = 1;
};

}  // namespace cki::sim
