// Simulated ptx/elect.cuh.
#pragma once

#include "runtime_api.h"

namespace cki::ptx {

__device__ __forceinline__ bool elect_one() { return cki_sim_warp(CKI_SIM_ELECT, 0xffffffffu, 0, 0) != 0; }

}  // namespace cki::ptx
