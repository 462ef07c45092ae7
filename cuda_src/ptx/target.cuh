// What the architecture being compiled offers.
//
// Each function of this folder takes a defaulted template argument from here and checks it by static_assert. The
// argument makes the check dependent: a header can be included for any architecture, and only a call that the
// architecture cannot execute fails to compile, with a message that names what it needs.
#pragma once

namespace cki::ptx {

// 80, 89, 90, 100, 120, ...
constexpr int kTargetSm = __CUDA_ARCH__ / 10;

// sm_90a: wgmma exists on this architecture alone.
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
constexpr bool kTargetHasWgmma = true;
#else
constexpr bool kTargetHasWgmma = false;
#endif

// setmaxnreg needs an architecture-specific target (suffix "a") of sm_90 or later.
#if defined(__CUDA_ARCH_FEAT_SM90_ALL) || (defined(__CUDA_ARCH_SPECIFIC__) && __CUDA_ARCH__ >= 900) || \
    (defined(__CUDA_ARCH_FAMILY_SPECIFIC__) && __CUDA_ARCH__ >= 1000)
constexpr bool kTargetHasSetmaxnreg = true;
#else
constexpr bool kTargetHasSetmaxnreg = false;
#endif

}  // namespace cki::ptx
