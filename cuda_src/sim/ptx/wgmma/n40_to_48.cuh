// Written by ptx/generate_wgmma.py. The simulated wgmma takes any N: nothing is special about 40 to 48.
#pragma once

#include "ptx/wgmma.cuh"
