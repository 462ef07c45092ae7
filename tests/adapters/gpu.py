"""What the GPU tests of the adapters share: arrays, and a stream that is kept busy."""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable, Iterator
from typing import Any

import ml_dtypes
import numpy as np

#: Of most inputs.
ROWS, WIDTH = 4096, 1024

#: A busy stream is held up for about this long.
BUSY_MILLISECONDS = 250
#: At most so long where it is held up until the test lets go, however slow the host is.
_LONGEST_MILLISECONDS = 20_000
_CODE = """
extern "C" __global__ void spin(const volatile int* released, long long n) {
  const long long begin = clock64();
  while (clock64() - begin < n && !*released) { }
}
"""


@functools.cache
def _spin() -> Any:
    import cupy

    return cupy.RawKernel(_CODE, "spin")


@functools.cache
def _flags() -> tuple[Any, Iterator[int]]:
    """Host memory that GPUs see, and the addresses of its flags, each for one use."""
    import cupy

    memory = cupy.cuda.alloc_pinned_memory(1 << 16)
    ctypes.memset(memory.ptr, 0, 1 << 16)
    return memory, iter(range(memory.ptr, memory.ptr + (1 << 16), 4))


def keep_busy(stream: int, *, until_released: bool = False) -> Callable[[], None]:
    """Hold up all later work on a stream.

    until_released: until the function that is returned is called, after the test has seen that the stream is busy; a
    call that waits for the stream makes it wait long, and the stream is then done.
    """
    import cupy

    flag = next(_flags()[1])
    milliseconds = _LONGEST_MILLISECONDS if until_released else BUSY_MILLISECONDS
    with cupy.cuda.ExternalStream(stream):
        _spin()((1,), (1,), (np.uint64(flag), np.int64(milliseconds * 1_700_000)))

    def release() -> None:
        ctypes.c_int.from_address(flag).value = 1

    return release


class OnGpu:
    """A CuPy array dressed as PyCUDA's or numba's: it shows `__cuda_array_interface__` and nothing else."""

    def __init__(self, array: Any, stream: int | None = None) -> None:
        self.array = array
        interface = dict(array.__cuda_array_interface__)
        interface["version"] = 3
        interface["stream"] = stream
        self.__cuda_array_interface__ = interface


def normal(dtype: Any = np.float32, rows: int = ROWS, width: int = WIDTH, seed: int = 1) -> np.ndarray:
    """Normal random numbers, rounded to dtype."""
    return np.random.default_rng(seed).standard_normal((rows, width)).astype(dtype)


def on_gpu(values: Any) -> Any:
    """A CuPy array, bfloat16 bit for bit."""
    import cupy

    values = np.ascontiguousarray(values)
    if values.dtype == ml_dtypes.bfloat16:
        return cupy.asarray(values.view(np.uint16)).view(values.dtype)
    return cupy.asarray(values)
