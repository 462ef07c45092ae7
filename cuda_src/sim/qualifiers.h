// CUDA's declaration qualifiers.
#pragma once

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
