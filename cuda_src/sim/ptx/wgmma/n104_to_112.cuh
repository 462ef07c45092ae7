// Written by ptx/generate_wgmma.py. The simulated wgmma takes any N: nothing is special about 104 to 112.
#pragma once

#include "ptx/wgmma.cuh"
