"""Where the demo runs: the GPU with CuPy arrays, or the simulated device with NumPy arrays."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import ml_dtypes
import numpy as np

from cki.demo.minilm import Array
from cki.device import DeviceInfo, cuda_device, sim_device
from cki.errors import DeviceError
from cki.nvml import gpu_count


@dataclass(frozen=True)
class Place:
    """info: the device.  why_not_gpu: for a simulated device chosen by itself, what keeps the GPU from being used."""

    info: DeviceInfo
    why_not_gpu: str = ""

    def __str__(self) -> str:
        if self.info.kind == "sim":
            return f"simulated device (CPU), standing for {self.info.arch}"
        return f"{self.info.name} (cuda:{self.info.index}, {self.info.arch})"

    def put(self, array: Array) -> Any:
        """A copy of a NumPy array in this place's memory."""
        if self.info.kind == "sim":
            return array
        import cupy

        if array.dtype == ml_dtypes.bfloat16:
            return cupy.asarray(array.view(np.uint16)).view(array.dtype)
        return cupy.asarray(array)

    def get(self, array: Any) -> Array:
        """The values of an array of this place as float64; waits for them."""
        if self.info.kind == "cuda":
            import cupy

            is_bf16 = array.dtype == ml_dtypes.bfloat16
            array = cupy.asnumpy(array.view(np.uint16)).view(array.dtype) if is_bf16 else cupy.asnumpy(array)
        return np.asarray(array, np.float64)


def choose(device: str) -> Place:
    """The place for "auto", "sim" or "cuda"; DeviceError when "cuda" is asked for and there is none."""
    if device == "sim":
        return Place(sim_device())
    try:
        if gpu_count() == 0:
            raise DeviceError("no NVIDIA GPU was found")
        info = cuda_device(0)
        _import_cupy()
    except DeviceError as error:
        if device == "cuda":
            raise
        return Place(sim_device(), str(error).splitlines()[0])
    return Place(info)


def _import_cupy() -> None:
    try:
        import cupy  # noqa: F401
    except ImportError as error:
        raise DeviceError(
            "the GPU needs CuPy", hint="pip install 'cki-runtime[cuda13]' or [cuda12]"
        ) from error
