// Written by ptx/generate_wgmma.py. The simulated wgmma takes any N: nothing is special about 8 to 16.
#pragma once

#include "ptx/wgmma.cuh"
