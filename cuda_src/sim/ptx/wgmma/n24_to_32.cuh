// Written by ptx/generate_wgmma.py. The simulated wgmma takes any N: nothing is special about 24 to 32.
#pragma once

#include "ptx/wgmma.cuh"
