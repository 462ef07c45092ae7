"""Prints the install extra that this machine's NVIDIA driver needs: ",cuda13", ",cuda12", or nothing.

Asks the driver library itself, which needs no package: cuDriverGetVersion gives 13000 for CUDA 13.0.
"""

from __future__ import annotations

import ctypes
import sys


def driver_version() -> int:
    """The newest CUDA version that the driver runs, as 1000 * major + 10 * minor; 0 without a usable GPU."""
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return 0
    version, count = ctypes.c_int(), ctypes.c_int()
    if driver.cuInit(0) or driver.cuDeviceGetCount(ctypes.byref(count)) or count.value == 0:
        return 0
    return version.value if driver.cuDriverGetVersion(ctypes.byref(version)) == 0 else 0


def extra(version: int) -> str:
    """The extra for a driver version, with the comma that joins it to others."""
    if version >= 13000:
        return ",cuda13"
    return ",cuda12" if version >= 12000 else ""


if __name__ == "__main__":
    found = driver_version()
    if 0 < found < 12000:
        message = f"the NVIDIA driver runs CUDA {found // 1000}.{found % 1000 // 10}; CKI needs 12.0 or newer"
        print(message, file=sys.stderr)
    print(extra(found))
