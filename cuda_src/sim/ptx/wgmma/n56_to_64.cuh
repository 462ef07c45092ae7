// Written by ptx/generate_wgmma.py. The simulated wgmma takes any N: nothing is special about 56 to 64.
#pragma once

#include "ptx/wgmma.cuh"
