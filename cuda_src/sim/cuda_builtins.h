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

#include "runtime_api.h"
// In this order: later ones use the earlier.
#include "qualifiers.h"
#include "vector_types.h"
#include "thread_index.h"
#include "bit_functions.h"
#include "math_functions.h"
#include "synchronization.h"
#include "warp_functions.h"
#include "atomics.h"
#include "kernel_entry.h"
