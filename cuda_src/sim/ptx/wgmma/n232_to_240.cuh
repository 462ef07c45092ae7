// Written by ptx/generate_wgmma.py. The simulated wgmma takes any N: nothing is special about 232 to 240.
#pragma once

#include "ptx/wgmma.cuh"
