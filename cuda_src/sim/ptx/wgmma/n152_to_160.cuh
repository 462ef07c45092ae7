// Written by ptx/generate_wgmma.py. The simulated wgmma takes any N: nothing is special about 152 to 160.
#pragma once

#include "ptx/wgmma.cuh"
