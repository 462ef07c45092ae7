// Conversion of a generic pointer to the 32-bit address of the shared window that PTX's shared-memory instructions
// take.
#pragma once

#include "common/types.cuh"

namespace cki::ptx {

__device__ __forceinline__ u32 shared_address(const void* pointer) {
  return static_cast<u32>(__cvta_generic_to_shared(pointer));
}

}  // namespace cki::ptx
