// The CUDA built-ins for a host compiler. Force-included (-include) in front of a kernel that is compiled for the simulated
// device, so that the kernel's own text needs no change. Defines what NVRTC gives without any header; not the headers of the
// CUDA toolkit, which our kernels do not use.
#pragma once
#define CKI_SIMULATED 1

// The special functions of C++17 (Bessel's, elliptic integrals) are most of <cmath> of GNU's C++ library, and no device
// function: left out, a kernel compiles in two thirds of the time. <cstddef> brings that library's settings.
#include <cstddef>
#undef _GLIBCXX_USE_STD_SPEC_FUNCS

#include <cmath>
#include <cstdio>
#include <cstring>
#include <math.h>
#include <type_traits>
#include <utility>

#include "runtime_api.h"

// ---- declaration qualifiers ----

// The trick that makes shared memory work without touching a kernel: an OS thread runs one block at a time, so storage of an
// OS thread is storage of a block. At block scope thread_local implies static, and `extern thread_local T name[]` is legal,
// so static and dynamic shared arrays need no change in the kernel's source. (g++ refuses `__shared__ alignas(16) T x[4]`:
// write __align__(16).)
#define __shared__ thread_local

#define __global__
#define __device__
#define __host__
#define __constant__ static
#define __managed__
#define __grid_constant__
#define __launch_bounds__(...)
#define __cluster_dims__(...)
#define __maxnreg__(...)
#define __forceinline__ inline __attribute__((always_inline))
#define __noinline__ __attribute__((noinline))
#define __align__(n) __attribute__((aligned(n)))
#define __builtin_align__(n) __attribute__((aligned(n)))

// ---- threadIdx, blockIdx and their kin: fields of the views that the runtime sets. Macros, because they are values that
// change with the running thread, not variables that a kernel could own ----

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

// In this order: later ones use the earlier.
#include "vector_types.h"
#include "math_functions.h"
#include "synchronization.h"
#include "atomics.h"

// ---- the bridge from an argument array in the manner of cuLaunchKernel to a kernel's parameters ----

namespace cki_sim_detail {

// Not instrumented, and neither is whoever it is inlined into: the array lies in the host's memory, which is none of the
// kernel's tensors. Through a volatile pointer, so that the kernel keeps its own, instrumented, body.
#define CKI_SIM_NOT_INSTRUMENTED __attribute__((no_sanitize("thread")))

template <class... P, std::size_t... I>
CKI_SIM_NOT_INSTRUMENTED void call(void (*kernel)(P...), void** arguments, std::index_sequence<I...>) {
  void (*volatile called)(P...) = kernel;
  (void)arguments;   // a kernel without parameters
  called(*static_cast<std::remove_reference_t<P>*>(arguments[I])...);
}

template <class... P>
CKI_SIM_NOT_INSTRUMENTED void call(void (*kernel)(P...), void** arguments) {
  call(kernel, arguments, std::index_sequence_for<P...>{});
}

}  // namespace cki_sim_detail
