"""GPUs as NVML sees them: no CUDA context is made and the CUDA driver is not initialised, so a later fork is safe."""

from __future__ import annotations

import ctypes
import functools
import os
from typing import NamedTuple


class Gpu(NamedTuple):
    """name: model.  capability: compute capability (major, minor).  uuid: as CUDA_VISIBLE_DEVICES may name it."""

    name: str
    capability: tuple[int, int]
    uuid: str


class Survey(NamedTuple):
    """cuda_version: newest CUDA of the driver, (13, 0).  driver: its own version, "580.65.06"."""

    gpus: tuple[Gpu, ...]
    cuda_version: tuple[int, int]
    driver: str


_NOTHING = Survey((), (0, 0), "")


@functools.cache
def survey() -> Survey:
    """All GPUs of the machine and the driver; nothing when there is no driver or no GPU."""
    try:
        library = ctypes.CDLL("libnvidia-ml.so.1")
    except OSError:
        return _NOTHING
    if library.nvmlInit_v2() != 0:
        return _NOTHING
    try:
        return _read(library)
    finally:
        library.nvmlShutdown()


def _read(library: ctypes.CDLL) -> Survey:
    count, version = ctypes.c_uint(), ctypes.c_int()
    driver = ctypes.create_string_buffer(96)
    if library.nvmlDeviceGetCount_v2(ctypes.byref(count)) != 0:
        return _NOTHING
    library.nvmlSystemGetCudaDriverVersion_v2(ctypes.byref(version))
    library.nvmlSystemGetDriverVersion(driver, 96)
    gpus = []
    for index in range(count.value):
        handle = ctypes.c_void_p()
        major, minor = ctypes.c_int(), ctypes.c_int()
        name, uuid = ctypes.create_string_buffer(96), ctypes.create_string_buffer(96)
        if library.nvmlDeviceGetHandleByIndex_v2(index, ctypes.byref(handle)) != 0:
            continue
        if library.nvmlDeviceGetCudaComputeCapability(handle, ctypes.byref(major), ctypes.byref(minor)) != 0:
            continue
        library.nvmlDeviceGetName(handle, name, 96)
        library.nvmlDeviceGetUUID(handle, uuid, 96)
        gpus.append(Gpu(name.value.decode(), (major.value, minor.value), uuid.value.decode()))
    return Survey(tuple(gpus), (version.value // 1000, version.value % 1000 // 10), driver.value.decode())


def visible_gpus() -> tuple[Gpu, ...]:
    """The GPUs that CUDA_VISIBLE_DEVICES leaves, in its order.

    Numbers in it count in CUDA's order, which may differ from NVML's where models are mixed and
    CUDA_DEVICE_ORDER is not PCI_BUS_ID; for what to compile, the set of models is what matters.
    """
    gpus = survey().gpus
    chosen = os.environ.get("CUDA_VISIBLE_DEVICES")
    if chosen is None:
        return gpus
    result = []
    for item in (part.strip() for part in chosen.split(",")):
        if item.isdigit() and int(item) < len(gpus):
            result.append(gpus[int(item)])
            continue
        found = [gpu for gpu in gpus if item and gpu.uuid.startswith(item)]
        if not found:  # CUDA ignores everything from the first name that it does not know
            break
        result += found[:1]
    return tuple(result)


def gpu_count() -> int:
    """How many GPUs CUDA would show."""
    return len(visible_gpus())
