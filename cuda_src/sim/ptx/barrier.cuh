// Simulated ptx/barrier.cuh.
#pragma once

#include "runtime_api.h"

namespace cki::ptx {

__device__ __forceinline__ void bar_sync(int id, int threads) { cki_sim_bar_sync(id, threads); }
__device__ __forceinline__ void bar_arrive(int id, int threads) { cki_sim_bar_arrive(id, threads); }

}  // namespace cki::ptx
