// The compiler's hooks in an instrumented kernel. With -fsanitize=thread it calls a function for every load and store; we
// supply those functions instead of the sanitizer (tsan_abi.cpp), so no sanitizer runtime is linked, nothing has to be
// preloaded, and one instrumented build serves races, bounds and hazards alike.
#pragma once
#include <cstddef>

#include "types.h"

namespace cki::sim {

enum class AtomicAccess { Load, Store, Update };

void hook_access(const void* pointer, std::size_t bytes, bool write, CallSite site);
void hook_atomic(const void* pointer, std::size_t bytes, AtomicAccess kind, int order, CallSite site);
void hook_fence(int order);

}  // namespace cki::sim
