// Written by ptx/generate_wgmma.py. Every N, for a kernel whose N is a prelude constant: 30 ms more to compile than one.
#pragma once

#include "ptx/wgmma/n8_to_16.cuh"
#include "ptx/wgmma/n24_to_32.cuh"
#include "ptx/wgmma/n40_to_48.cuh"
#include "ptx/wgmma/n56_to_64.cuh"
#include "ptx/wgmma/n72_to_80.cuh"
#include "ptx/wgmma/n88_to_96.cuh"
#include "ptx/wgmma/n104_to_112.cuh"
#include "ptx/wgmma/n120_to_128.cuh"
#include "ptx/wgmma/n136_to_144.cuh"
#include "ptx/wgmma/n152_to_160.cuh"
#include "ptx/wgmma/n168_to_176.cuh"
#include "ptx/wgmma/n184_to_192.cuh"
#include "ptx/wgmma/n200_to_208.cuh"
#include "ptx/wgmma/n216_to_224.cuh"
#include "ptx/wgmma/n232_to_240.cuh"
#include "ptx/wgmma/n248_to_256.cuh"
