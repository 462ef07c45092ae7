// What a launch is asked to look for. The bits are those of cki.sim.Checks in Python.
#pragma once
#include "types.h"

namespace cki::sim {

struct Checks {
  bool adversarial = false;   // asynchronous work completes late, targets and shared memory are poisoned, seeded schedules
  bool hazards = false;       // copies and products in flight against their operands
  bool races = false;         // happens-before on shared memory (instrumented kernels)
  bool bounds = false;        // accesses against tensor extents and shared arrays (instrumented kernels)

  static Checks from_bits(u32 bits) {
    return {(bits & 1) != 0, (bits & 2) != 0, (bits & 4) != 0, (bits & 8) != 0};
  }
};

}  // namespace cki::sim
