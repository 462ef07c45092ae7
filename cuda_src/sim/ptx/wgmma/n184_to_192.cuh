// Written by ptx/generate_wgmma.py. The simulated wgmma takes any N: nothing is special about 184 to 192.
#pragma once

#include "ptx/wgmma.cuh"
