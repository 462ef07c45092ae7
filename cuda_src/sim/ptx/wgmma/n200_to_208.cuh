// Written by ptx/generate_wgmma.py. The simulated wgmma takes any N: nothing is special about 200 to 208.
#pragma once

#include "ptx/wgmma.cuh"
