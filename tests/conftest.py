"""Fixtures common to all tests.

`device` runs a test body in two places: on the simulated device with NumPy arrays, and (marker `gpu`) on the GPU with
CuPy arrays.  CuPy 14 knows bfloat16 when ml_dtypes is installed, but no 8-bit floats, and all tensors of one call are
of one framework: a body that may hold 8-bit floats makes its arrays with `device.holding(dtypes)`, on the GPU torch
tensors where one of the dtypes is such.  Copies to and from the GPU go through unsigned integers, bit for bit.
"""

from __future__ import annotations

import os
import tempfile

# Before cki is imported.  Kernels compiled by tests do not go to the user's cache, but are kept from run to run.
os.environ.setdefault("CKI_CACHE_DIR", os.path.join(tempfile.gettempdir(), f"cki-tests-{os.getuid()}"))
os.environ.setdefault("CKI_COMPILE", "lazy")

from collections.abc import Iterator
from typing import Any

import ml_dtypes
import numpy as np
import pytest

import cki
from cki.device import DeviceInfo

_FP8 = (np.dtype(ml_dtypes.float8_e4m3fn), np.dtype(ml_dtypes.float8_e5m2))


class DeviceUnderTest:
    """Where a test body runs.  kind: "sim" or "cuda".  info: its DeviceInfo.  framework: whose arrays it makes."""

    def __init__(self, kind: str, info: DeviceInfo, framework: str | None = None) -> None:
        self.kind = kind
        self.info = info
        self.framework = framework or ("numpy" if kind == "sim" else "cupy")

    def holding(self, *dtypes: Any) -> DeviceUnderTest:
        """This device with a framework that has arrays of all these dtypes."""
        if self.framework == "cupy" and any(np.dtype(dtype) in _FP8 for dtype in dtypes):
            return DeviceUnderTest(self.kind, self.info, "torch")
        return self

    def array(self, values: Any, dtype: Any = None) -> Any:
        """A row-major copy of an array in this device's memory."""
        host = np.array(values, dtype=dtype, order="C", ndmin=0)
        if self.framework == "numpy":
            return host
        if self.framework == "torch":
            import torch

            flat = torch.from_numpy(host.reshape(-1).view(np.uint8))
            there = flat.to("cuda" if self.kind == "cuda" else "cpu")
            return there.view(getattr(torch, host.dtype.name)).reshape(host.shape)
        import cupy

        assert host.dtype not in _FP8, "CuPy has no 8-bit floats: make the arrays with device.holding(dtype)"
        if host.dtype != ml_dtypes.bfloat16:
            return cupy.asarray(host)
        return cupy.asarray(host.view(np.uint16)).view(host.dtype)

    def empty(self, shape: tuple[int, ...], dtype: Any) -> Any:
        """An array filled with 0xFF bytes (NaN in every float type): what must be written shows if it is not."""
        host = np.empty(shape, dtype)
        host.view(np.uint8).fill(0xFF) if host.size and host.ndim else None
        return self.array(host)

    def numpy(self, array: Any) -> np.ndarray:
        """The array's values in host memory, in its own dtype."""
        if isinstance(array, np.ndarray):
            return array
        if type(array).__module__.startswith("torch"):
            import torch

            name = str(array.dtype).removeprefix("torch.")
            dtype = np.dtype(getattr(ml_dtypes, name, None) or name)
            carrier = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[dtype.itemsize]
            return array.detach().contiguous().view(carrier).cpu().numpy().view(dtype)
        import cupy

        if array.dtype == ml_dtypes.bfloat16:
            return cupy.asnumpy(array.view(np.uint16)).view(array.dtype)
        return cupy.asnumpy(array)

    def synchronize(self) -> None:
        """Wait for everything launched."""
        if self.kind == "cuda":
            import cupy

            cupy.cuda.runtime.deviceSynchronize()


@pytest.fixture(params=["sim", pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request: pytest.FixtureRequest) -> Iterator[DeviceUnderTest]:
    """The device that the test runs on; operations called in the test run there."""
    kind = request.param
    with cki.device(kind) as info:
        if kind == "cuda":
            pytest.importorskip("cupy")
            from cki.device import cuda_device

            info = cuda_device(0)
        yield DeviceUnderTest(kind, info)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out tests marked gpu where there is no GPU, unless they were asked for by `-m`."""
    if config.getoption("-m"):
        return
    from cki.nvml import gpu_count

    if gpu_count() == 0:
        skip = pytest.mark.skip(reason="no CUDA GPU")
        for item in items:
            if "gpu" in item.keywords:
                item.add_marker(skip)
