// Written by ptx/generate_wgmma.py. The simulated wgmma takes any N: nothing is special about 248 to 256.
#pragma once

#include "ptx/wgmma.cuh"
