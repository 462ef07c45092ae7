// Written by ptx/generate_wgmma.py. The simulated wgmma takes any N: nothing is special about 168 to 176.
#pragma once

#include "ptx/wgmma.cuh"
