// Simulated ptx/target.cuh: the simulated device offers everything that sm_90a does.
#pragma once

namespace cki::ptx {

constexpr int kTargetSm = 90;
constexpr bool kTargetHasWgmma = true;
constexpr bool kTargetHasSetmaxnreg = true;

}  // namespace cki::ptx
