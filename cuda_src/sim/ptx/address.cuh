// Simulated ptx/address.cuh.
#pragma once

#include "common/types.cuh"
#include "runtime_api.h"

namespace cki::ptx {

__device__ __forceinline__ u32 shared_address(const void* pointer) { return cki_sim_shared_address(pointer); }

}  // namespace cki::ptx
