"""Memory of one device that the engine owns: named tensors at addresses that never change, and copies to and from them.

No framework is needed: memory comes from the driver (or is NumPy's, on the simulated device).  A captured graph and the
engine's plans hold these addresses.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from cki import driver
from cki.device import DeviceInfo
from cki.dtypes import DType
from cki.errors import DeviceError
from cki.memory.arena import Arena, CudaArena, HostArena
from cki.memory.views import CacheTensor, Place

ALIGNMENT = 256
#: (name, shape, element type) of a tensor.
TensorSpec = tuple[str, tuple[int, ...], DType]


def make_arena(device: DeviceInfo, nbytes: int) -> Arena:
    """`nbytes` of a device's memory."""
    nbytes = max(nbytes, ALIGNMENT)
    return CudaArena(nbytes, device.index) if device.kind == "cuda" else HostArena(nbytes)


class DeviceTensors:
    """Named tensors in one piece of a device's memory.  A name gives its tensor: `tensors["logits"]`."""

    def __init__(self, device: DeviceInfo, specs: Sequence[TensorSpec]) -> None:
        self._places: dict[str, Place] = {}
        end = 0
        for name, shape, dtype in specs:
            self._places[name] = place = Place(end, shape, dtype)
            end += -(-place.nbytes // ALIGNMENT) * ALIGNMENT
        self.nbytes = end
        self._arena = make_arena(device, end)
        self._tensors = {name: CacheTensor(self._arena, place) for name, place in self._places.items()}

    def __getitem__(self, name: str) -> CacheTensor:
        return self._tensors[name]

    def items(self) -> list[tuple[str, CacheTensor]]:
        """Names and tensors."""
        return list(self._tensors.items())

    def head(self, name: str, count: int) -> CacheTensor:
        """The first `count` entries of a tensor."""
        place = self._places[name]
        return CacheTensor(self._arena, place._replace(shape=(count, *place.shape[1:])))

    def write(self, name: str, values: np.ndarray, stream: int = 0, *, first: int = 0) -> None:
        """Copy host values into a tensor from its element `first` on, in stream order.

        From pageable memory: the values may change once this has returned.
        """
        place = self._places[name]
        source = np.ascontiguousarray(values, place.dtype.numpy).reshape(-1)
        if source.size:
            self._arena.upload(place.offset + first * place.dtype.itemsize, source.view(np.uint8), stream)

    def finish(self) -> None:
        """Wait until all copies of `write` are done, on whichever stream."""
        if self._arena.device.kind == "cuda":
            with driver.on_device(self._arena.device.index):
                _checked(driver.api().cuCtxSynchronize(), "copies to the device")


class StagedTensors(DeviceTensors):
    """Named tensors that the host writes anew before a step, all of them by one copy that nobody waits for."""

    def __init__(self, device: DeviceInfo, specs: Sequence[TensorSpec]) -> None:
        super().__init__(device, specs)
        self._staging = self._arena.staging(max(self.nbytes, ALIGNMENT))

    def send(self, values: Mapping[str, Any], stream: int) -> None:
        """Write the first rows of each tensor; what lies behind them, and tensors left out, become zero."""
        index = self._staging.next()
        buffer = self._staging.buffers[index]
        buffer[:] = 0
        for name, given in values.items():
            offset, _, dtype = place = self._places[name]
            target = buffer[offset : offset + place.nbytes].view(dtype.numpy).reshape(place.shape)
            target[: len(given)] = given
        self._arena.upload(0, buffer[: self.nbytes], stream)
        self._staging.sent(index, stream)


class Readback:
    """Host copies of a few device tensors: `start` enqueues them on a stream, `wait` returns when they are there."""

    def __init__(self, device: DeviceInfo, tensors: Sequence[CacheTensor]) -> None:
        self._tensors = tuple(tensors)
        self._index = device.index if device.kind == "cuda" else -1
        self._arrays: list[np.ndarray] = []
        #: (host address, device address, bytes): tensors that lie side by side come in one copy.
        self._copies: list[tuple[int, int, int]] = []
        if self._index < 0:
            return
        owner = self._tensors[0].view.owner
        assert isinstance(owner, Arena)
        self._staging = owner.staging(sum(_rounded(t) for t in tensors))  # owns the memory
        buffer, start = self._staging.buffers[0], 0
        for tensor in tensors:
            nbytes = tensor.view.size * tensor.dtype.itemsize
            part = buffer[start : start + nbytes].view(tensor.dtype.numpy)
            self._arrays.append(part.reshape(tensor.shape))
            self._copies = _joined(self._copies, (part.ctypes.data, tensor.ptr, nbytes))
            start += _rounded(tensor)
        with driver.on_device(self._index):
            self._event = _checked(driver.api().cuEventCreate(2), "an event")  # 2: CU_EVENT_DISABLE_TIMING

    def start(self, stream: int) -> None:
        """Copy the tensors as they are after what is on the stream now."""
        if self._index < 0:
            self._arrays = [tensor.numpy().copy() for tensor in self._tensors]
            return
        api = driver.api()
        with driver.on_device(self._index):
            for target, source, nbytes in self._copies:
                _checked(api.cuMemcpyDtoHAsync(target, source, nbytes, stream), "a copy")
            _checked(api.cuEventRecord(self._event, stream), "an event after a copy")

    def wait(self) -> list[np.ndarray]:
        """The values, once the copies that were started are done: valid until the next `start`."""
        if self._index >= 0:
            with driver.on_device(self._index):
                _checked(driver.api().cuEventSynchronize(self._event), "the results of a step")
        return self._arrays


def _joined(copies: list[tuple[int, int, int]], another: tuple[int, int, int]) -> list[tuple[int, int, int]]:
    """Copies (target, source, bytes) with one more, which the last one takes in if it follows on both sides alike."""
    if copies:
        (target, source, nbytes), (next_target, next_source, more) = copies[-1], another
        gap = next_source - source - nbytes
        if next_target - target == next_source - source and 0 <= gap < ALIGNMENT:
            return [*copies[:-1], (target, source, nbytes + gap + more)]
    return [*copies, another]


def _rounded(tensor: CacheTensor) -> int:
    return -(-tensor.view.size * tensor.dtype.itemsize // ALIGNMENT) * ALIGNMENT


def _checked(result: tuple[Any, ...], what: str) -> Any:
    if int(result[0]) != 0:
        raise DeviceError(f"{what}: {driver.error_text(result[0])}")
    return result[1] if len(result) == 2 else None


def free_bytes(device: DeviceInfo) -> int:
    """Free memory of a GPU."""
    with driver.on_device(device.index):
        free, _ = driver.api().cuMemGetInfo()[1:]
    return int(free)


def new_stream(device: DeviceInfo) -> int:
    """A stream of a GPU that waits for no other; it lives as long as the process.  0 on the simulated device."""
    if device.kind != "cuda":
        return 0
    with driver.on_device(device.index):
        return int(_checked(driver.api().cuStreamCreate(1), "a stream"))  # 1: CU_STREAM_NON_BLOCKING
