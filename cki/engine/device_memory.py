"""Memory of one device that the engine owns: named tensors at addresses that never change, and copies to and from them.

No framework is needed: memory comes from the driver (or is NumPy's, on the simulated device).  A captured graph and the
engine's plans hold these addresses.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from cki import driver
from cki.device import DeviceInfo
from cki.dtypes import DType
from cki.errors import DeviceError
from cki.memory.arena import Arena, CudaArena, HostArena
from cki.memory.layout import Place
from cki.memory.views import CacheTensor

ALIGNMENT = 256


def make_arena(device: DeviceInfo, nbytes: int) -> Arena:
    """`nbytes` of a device's memory."""
    nbytes = max(nbytes, ALIGNMENT)
    return CudaArena(nbytes, device.index) if device.kind == "cuda" else HostArena(nbytes)


class DeviceTensors:
    """Named tensors in one piece of a device's memory.

    specs: (name, shape, element type) of each.  A name gives its tensor: `tensors["logits"]`.
    """

    def __init__(self, device: DeviceInfo, specs: Sequence[tuple[str, tuple[int, ...], DType]]) -> None:
        places: dict[str, Place] = {}
        end = 0
        for name, shape, dtype in specs:
            places[name] = Place(end, shape, dtype)
            end += -(-places[name].nbytes // ALIGNMENT) * ALIGNMENT
        self.nbytes = end
        self._places = places
        self._arena = make_arena(device, end)
        self._tensors = {name: CacheTensor(self._arena, place) for name, place in places.items()}

    def __getitem__(self, name: str) -> CacheTensor:
        return self._tensors[name]

    def __iter__(self) -> object:
        return iter(self._tensors)

    def items(self) -> list[tuple[str, CacheTensor]]:
        """Names and tensors."""
        return list(self._tensors.items())

    def write(self, name: str, values: np.ndarray, stream: int = 0, *, first: int = 0) -> None:
        """Copy host values into a tensor from its element `first` on, in stream order.

        From pageable memory: the values may change once this has returned.
        """
        place = self._places[name]
        source = np.ascontiguousarray(values, place.dtype.numpy).reshape(-1)
        self._arena.upload(place.offset + first * place.dtype.itemsize, source.view(np.uint8), stream)


class Readback:
    """Host copies of a few device tensors: `start` enqueues them on a stream, `wait` returns when they are there."""

    def __init__(self, device: DeviceInfo, tensors: Sequence[CacheTensor]) -> None:
        self._tensors = tuple(tensors)
        self._device = device
        self._event: object = None
        if device.kind != "cuda":
            self.arrays = [t.numpy() for t in tensors]
            return
        self._staging = self._tensors[0].view.owner.staging(sum(_rounded(t) for t in tensors))  # type: ignore[attr-defined]
        buffer, start = self._staging.buffers[0], 0
        self.arrays = []
        for t in tensors:
            nbytes = t.view.size * t.dtype.itemsize
            self.arrays.append(buffer[start : start + nbytes].view(t.dtype.numpy).reshape(t.shape))
            start += _rounded(t)
        with driver.on_device(device.index):
            self._event = _checked(driver.api().cuEventCreate(2), "an event")  # 2: CU_EVENT_DISABLE_TIMING

    def start(self, stream: int) -> None:
        """Copy after what is on the stream now."""
        if self._device.kind != "cuda":
            return
        api = driver.api()
        with driver.on_device(self._device.index):
            for tensor, array in zip(self._tensors, self.arrays):
                _checked(api.cuMemcpyDtoHAsync(array.ctypes.data, tensor.ptr, array.nbytes, stream), "a copy")
            _checked(api.cuEventRecord(self._event, stream), "an event after a copy")

    def wait(self) -> list[np.ndarray]:
        """The values, once the copies that were started are done: valid until the next `start`."""
        if self._device.kind == "cuda":
            with driver.on_device(self._device.index):
                _checked(driver.api().cuEventSynchronize(self._event), "results of a step")
        return self.arrays


def _rounded(tensor: CacheTensor) -> int:
    return -(-tensor.view.size * tensor.dtype.itemsize // ALIGNMENT) * ALIGNMENT


def _checked(result: tuple[object, ...], what: str) -> object:
    if int(result[0]) != 0:  # type: ignore[call-overload]
        raise DeviceError(f"{what}: {driver.error_text(result[0])}")
    return result[1] if len(result) == 2 else None
