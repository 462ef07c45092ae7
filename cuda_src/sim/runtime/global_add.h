// Addition of one element to global memory, atomically: what reducing bulk copies do.
#pragma once
#include "tensor_map.h"
#include "types.h"

namespace cki::sim {

// Both pointers are aligned to the element. Types: 32- and 64-bit integers, f16, bf16, f32, f64.
void add_to_global(TensorType type, u8* global, const u8* value);
bool can_add(TensorType type);

}  // namespace cki::sim
