"""The simulated device: CUDA kernels of `cuda_src` run on the CPU, with checks.  See docs/simulated_device.md."""

from cki.errors import SimulationError
from cki.sim.checking import Checks, checks
from cki.sim.kernel import SimKernel, compile_kernel
from cki.sim.launcher import launch

__all__ = ["Checks", "SimKernel", "SimulationError", "checks", "compile_kernel", "launch"]
