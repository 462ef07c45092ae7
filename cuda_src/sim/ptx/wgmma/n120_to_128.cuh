// Written by ptx/generate_wgmma.py. The simulated wgmma takes any N: nothing is special about 120 to 128.
#pragma once

#include "ptx/wgmma.cuh"
