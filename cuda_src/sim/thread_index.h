// threadIdx, blockIdx and their kin: fields of the views that the runtime sets. Macros, because they are values that change
// with the running thread, not variables that a kernel could own.
#pragma once

#define threadIdx (cki_sim_thread->thread_index)
#define blockIdx (cki_sim_block.block_index)
#define blockDim (cki_sim_block.block_dim)
#define gridDim (cki_sim_block.grid_dim)

constexpr int warpSize = 32;

// Shared addresses.
static inline __attribute__((always_inline)) std::size_t __cvta_generic_to_shared(const void* pointer) {
  return cki_sim_shared_address(pointer);
}
static inline __attribute__((always_inline)) void* __cvta_shared_to_generic(std::size_t address) {
  return cki_sim_shared_pointer(static_cast<unsigned>(address));
}

// Time: the number of thread changes so far, which is reproducible; a cycle count would not be.
static inline long long clock64() { return static_cast<long long>(cki_sim_clock()); }
static inline int clock() { return static_cast<int>(cki_sim_clock()); }
