// Written by ptx/generate_wgmma.py. The simulated wgmma takes any N: nothing is special about 136 to 144.
#pragma once

#include "ptx/wgmma.cuh"
