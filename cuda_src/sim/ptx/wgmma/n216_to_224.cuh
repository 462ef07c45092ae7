// Written by ptx/generate_wgmma.py. The simulated wgmma takes any N: nothing is special about 216 to 224.
#pragma once

#include "ptx/wgmma.cuh"
