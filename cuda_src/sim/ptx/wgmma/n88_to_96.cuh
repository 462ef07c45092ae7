// Written by ptx/generate_wgmma.py. The simulated wgmma takes any N: nothing is special about 88 to 96.
#pragma once

#include "ptx/wgmma.cuh"
