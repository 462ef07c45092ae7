"""What the GPU tests of the adapters share: a stream that is kept busy, and a result to compare with."""

from __future__ import annotations

import functools
from typing import Any

import numpy as np

#: A busy stream is held up for about this long, far longer than any call takes to be launched, also where the test's
#: process shares its cores with many others.
BUSY_MILLISECONDS = 250


@functools.cache
def _spin() -> Any:
    import cupy

    code = 'extern "C" __global__ void spin(long long n) { long long s = clock64(); while (clock64() - s < n) { } }'
    return cupy.RawKernel(code, "spin")


def keep_busy(stream: int) -> None:
    """Hold up all later work on a stream."""
    import cupy

    with cupy.cuda.ExternalStream(stream):
        _spin()((1,), (1,), (np.int64(BUSY_MILLISECONDS * 1_700_000),))


class OnGpu:
    """A CuPy array dressed as PyCUDA's or numba's: it shows `__cuda_array_interface__` and nothing else."""

    def __init__(self, array: Any, stream: int | None = None) -> None:
        self.array = array
        interface = dict(array.__cuda_array_interface__)
        interface["version"] = 3
        interface["stream"] = stream
        self.__cuda_array_interface__ = interface
