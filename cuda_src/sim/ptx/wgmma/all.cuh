// Written by ptx/generate_wgmma.py. Every N, for a kernel whose N is a prelude constant: 30 ms more to compile than one.
#pragma once

#include "ptx/wgmma/n8_to_64.cuh"
#include "ptx/wgmma/n72_to_128.cuh"
#include "ptx/wgmma/n136_to_192.cuh"
#include "ptx/wgmma/n200_to_256.cuh"
