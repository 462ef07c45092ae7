// Written by ptx/generate_wgmma.py. The simulated wgmma takes any N: nothing is special about 72 to 80.
#pragma once

#include "ptx/wgmma.cuh"
