"""One range of a device's addresses that never moves, and the copies into it.

    HostArena      the simulated device: one NumPy buffer, whose pages the system gives when they are first written
    CudaArena      one cuMemAlloc
    VirtualArena   addresses reserved for all that may come, memory mapped into them when `commit` asks: growing moves
                   nothing, so captured graphs and tensor maps stay right (cuMemAddressReserve, cuMemCreate, cuMemMap;
                   CUDA driver API, section "Virtual Memory Management")

Memory is given back when the last reference to the arena goes: tensors exported from it hold one.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from cki import driver
from cki.errors import DeviceError, OutOfBlocksError
from cki.tensor import DeviceId

#: (offset, bytes) of a part of an arena.
Range = tuple[int, int]


class Staging(ABC):
    """Host memory from which uploads are made.  Several buffers in turn: one is refilled while others are under way."""

    buffers: list[np.ndarray]

    @abstractmethod
    def next(self) -> int:
        """Index of a buffer that no upload reads any more (waits for one if needed)."""

    @abstractmethod
    def sent(self, index: int, stream: int) -> None:
        """All uploads from that buffer are on the stream now."""


class Arena(ABC):
    """nbytes of addresses from `base` on a device.  Offsets count bytes from `base`."""

    #: Offsets of parts that grow are multiples of this.
    granularity = 256

    def __init__(self, device: DeviceId, base: int, nbytes: int) -> None:
        self.device = device
        self.base = base
        self.nbytes = nbytes

    @abstractmethod
    def commit(self, ranges: Sequence[Range]) -> None:
        """Make these parts usable, those that are stay so.  OutOfBlocksError, and nothing done, without memory."""

    @abstractmethod
    def staging(self, nbytes: int) -> Staging:
        """Host memory of that size for `upload`."""

    @abstractmethod
    def upload(self, offset: int, source: np.ndarray, stream: int) -> None:
        """Copy a contiguous array of a staging buffer into the arena, in stream order."""

    @abstractmethod
    def upload_rows(self, offset: int, pitch: int, source: np.ndarray, stream: int) -> None:
        """Copy the rows of a contiguous 2-d array of a staging buffer to places `pitch` bytes apart."""

    @abstractmethod
    def copy(self, target: int, source: int, nbytes: int, stream: int) -> None:
        """Copy within the arena, in stream order."""

    @abstractmethod
    def read(self, offset: int, nbytes: int) -> np.ndarray:
        """uint8 [nbytes] in host memory: on the simulated device the memory itself, else a copy after all work."""


class _HostStaging(Staging):
    def __init__(self, nbytes: int) -> None:
        self.buffers = [np.zeros(nbytes, np.uint8)]

    def next(self) -> int:
        return 0

    def sent(self, index: int, stream: int) -> None:
        pass


class HostArena(Arena):
    """Memory of the simulated device, where everything is done when a call returns."""

    def __init__(self, nbytes: int) -> None:
        try:
            raw = np.empty(nbytes + self.granularity, np.uint8)
        except (MemoryError, ValueError) as error:  # ValueError: more than an array can be long
            raise OutOfBlocksError(f"no {nbytes} bytes of host memory", needed=nbytes) from error
        start = -raw.ctypes.data % self.granularity
        self._bytes = raw[start : start + nbytes]
        super().__init__(DeviceId("cpu"), self._bytes.ctypes.data, nbytes)

    def commit(self, ranges: Sequence[Range]) -> None:
        pass

    def staging(self, nbytes: int) -> Staging:
        return _HostStaging(nbytes)

    def upload(self, offset: int, source: np.ndarray, stream: int) -> None:
        self._bytes[offset : offset + source.nbytes] = source.view(np.uint8).reshape(-1)

    def upload_rows(self, offset: int, pitch: int, source: np.ndarray, stream: int) -> None:
        target = np.ndarray(source.shape, source.dtype, self._bytes, offset, (pitch, source.itemsize))
        target[:] = source

    def copy(self, target: int, source: int, nbytes: int, stream: int) -> None:
        self._bytes[target : target + nbytes] = self._bytes[source : source + nbytes]

    def read(self, offset: int, nbytes: int) -> np.ndarray:
        return self._bytes[offset : offset + nbytes]


def _done(result: tuple[Any, ...], what: str) -> Any:
    """The value of a driver call; DeviceError that says what failed."""
    if int(result[0]) != 0:
        raise DeviceError(f"{what}: {driver.error_text(result[0])}")
    return result[1] if len(result) == 2 else None


#: An arena's addresses are 64-bit numbers.
_MOST_BYTES = 2**63 - 1


def _out_of_memory(nbytes: int, index: int) -> OutOfBlocksError:
    free, total = driver.api().cuMemGetInfo()[1:]
    return OutOfBlocksError(
        f"cuda:{index} has no {nbytes / 2**20:.1f} MiB for the cache: {free / 2**20:.1f} of "
        f"{total / 2**20:.1f} MiB are free",
        needed=nbytes, free=int(free), hint="fewer blocks, or free what other libraries keep in their pools",
    )  # fmt: skip


def _release_in(index: int, release: Callable[[], object]) -> Callable[[], None]:
    """`release` as a finalizer: in the process that made the memory only, and never an error."""
    process = os.getpid()

    def run() -> None:
        if os.getpid() == process:
            with contextlib.suppress(Exception), driver.on_device(index), driver.allowed_while_capturing():
                release()

    return run


def _finalize(owner: object, index: int, release: Callable[[], object]) -> None:
    # At exit the driver frees everything itself, and may be gone before us.
    weakref.finalize(owner, _release_in(index, release)).atexit = False


class _PinnedStaging(Staging):
    """Two page-locked buffers, each with an event that says when it was read."""

    def __init__(self, nbytes: int, index: int) -> None:
        api = driver.api()
        self._index = index
        self._last = 0
        self._events: list[Any] = []
        self.buffers = []
        with driver.on_device(index):
            for _ in range(2):
                address = int(_done(api.cuMemHostAlloc(nbytes, 0), "page-locked host memory"))
                self.buffers.append(np.ctypeslib.as_array((ctypes.c_uint8 * nbytes).from_address(address)))
                event = _done(api.cuEventCreate(2), "an event")  # 2: CU_EVENT_DISABLE_TIMING
                self._events.append(event)
                _finalize(self, index, lambda address=address: api.cuMemFreeHost(address))  # type: ignore[misc]
                _finalize(self, index, lambda event=event: api.cuEventDestroy(event))  # type: ignore[misc]

    def next(self) -> int:
        self._last = 1 - self._last
        with driver.on_device(self._index):
            _done(driver.api().cuEventSynchronize(self._events[self._last]), "waiting for an upload")
        return self._last

    def sent(self, index: int, stream: int) -> None:
        with driver.on_device(self._index):
            _done(driver.api().cuEventRecord(self._events[index], stream), "an event after an upload")


class CudaArena(Arena):
    """Memory of a GPU, all of it there from the start."""

    def __init__(self, nbytes: int, index: int) -> None:
        super().__init__(DeviceId("cuda", index), self._allocate(nbytes, index), nbytes)

    def _allocate(self, nbytes: int, index: int) -> int:
        api = driver.api()
        with driver.on_device(index):
            if nbytes > _MOST_BYTES:
                raise _out_of_memory(nbytes, index)
            status, address = api.cuMemAlloc(nbytes)
            if status == api.CUresult.CUDA_ERROR_OUT_OF_MEMORY:
                raise _out_of_memory(nbytes, index)
            _done((status, address), "cuMemAlloc")
        _finalize(self, index, lambda: api.cuMemFree(address))  # waits for work in progress
        return int(address)

    def commit(self, ranges: Sequence[Range]) -> None:
        pass

    def staging(self, nbytes: int) -> Staging:
        return _PinnedStaging(nbytes, self.device.index)

    def upload(self, offset: int, source: np.ndarray, stream: int) -> None:
        with driver.on_device(self.device.index):
            result = driver.api().cuMemcpyHtoDAsync(
                self.base + offset, source.ctypes.data, source.nbytes, stream
            )
        _done(result, "an upload to the cache")

    def upload_rows(self, offset: int, pitch: int, source: np.ndarray, stream: int) -> None:
        api = driver.api()
        width = source.nbytes // len(source)
        request = api.CUDA_MEMCPY2D()
        request.srcMemoryType = api.CUmemorytype.CU_MEMORYTYPE_HOST
        request.srcHost, request.srcPitch = source.ctypes.data, width
        request.dstMemoryType = api.CUmemorytype.CU_MEMORYTYPE_DEVICE
        request.dstDevice, request.dstPitch = self.base + offset, pitch
        request.WidthInBytes, request.Height = width, len(source)
        with driver.on_device(self.device.index):
            _done(api.cuMemcpy2DAsync(request, stream), "an upload to the block table")

    def copy(self, target: int, source: int, nbytes: int, stream: int) -> None:
        with driver.on_device(self.device.index):
            result = driver.api().cuMemcpyDtoDAsync(self.base + target, self.base + source, nbytes, stream)
        _done(result, "a copy of a block")

    def read(self, offset: int, nbytes: int) -> np.ndarray:
        api = driver.api()
        host = np.empty(nbytes, np.uint8)
        with driver.on_device(self.device.index):
            _done(api.cuCtxSynchronize(), "work before reading the cache")
            _done(api.cuMemcpyDtoH(host.ctypes.data, self.base + offset, nbytes), "reading the cache")
        return host


class VirtualArena(CudaArena):
    """Memory of a GPU that arrives in pieces, at addresses reserved before."""

    def __init__(self, nbytes: int, index: int) -> None:
        self._properties = _allocation_properties(index)
        self.granularity = allocation_granularity(index)
        # What is mapped: (offset, bytes, handle).  The finalizer holds this list, not the arena.
        self._pieces: list[tuple[int, int, Any]] = []
        super().__init__(-(-nbytes // self.granularity) * self.granularity, index)
        self._mapped = np.zeros(self.nbytes // self.granularity, np.bool_)

    def _allocate(self, nbytes: int, index: int) -> int:
        api = driver.api()
        with driver.on_device(index):
            if nbytes > _MOST_BYTES:
                raise _out_of_memory(nbytes, index)
            base = int(
                _done(api.cuMemAddressReserve(nbytes, 0, 0, 0), f"reserving {nbytes} bytes of addresses")
            )
        pieces = self._pieces

        def release() -> None:
            api.cuCtxSynchronize()  # unmapping, unlike cuMemFree, does not wait for kernels
            _unmap(base, pieces)
            api.cuMemAddressFree(base, nbytes)

        _finalize(self, index, release)
        return base

    def commit(self, ranges: Sequence[Range]) -> None:
        wanted = self._mapped.copy()
        for offset, nbytes in ranges:
            wanted[offset // self.granularity : -(-(offset + nbytes) // self.granularity)] = True
        edges = np.flatnonzero(np.diff(wanted & ~self._mapped, prepend=False, append=False))
        before = len(self._pieces)
        with driver.on_device(self.device.index):
            try:
                for start, end in edges.reshape(-1, 2).tolist():
                    self._map(start * self.granularity, (end - start) * self.granularity)
            except BaseException:
                added = self._pieces[before:]
                del self._pieces[before:]
                _unmap(self.base, added)
                raise
        self._mapped = wanted

    def _map(self, offset: int, nbytes: int) -> None:
        api = driver.api()
        address = self.base + offset
        status, handle = api.cuMemCreate(nbytes, self._properties, 0)
        if status == api.CUresult.CUDA_ERROR_OUT_OF_MEMORY:
            raise _out_of_memory(nbytes, self.device.index)
        _done((status, handle), "cuMemCreate")
        mapped = api.cuMemMap(address, nbytes, 0, handle, 0)
        if int(mapped[0]) != 0:
            api.cuMemRelease(handle)
            _done(mapped, "cuMemMap")
        self._pieces.append((offset, nbytes, handle))
        access = api.CUmemAccessDesc()
        access.location = self._properties.location
        access.flags = api.CUmemAccess_flags.CU_MEM_ACCESS_FLAGS_PROT_READWRITE
        _done(api.cuMemSetAccess(address, nbytes, [access], 1), "cuMemSetAccess")


def _unmap(base: int, pieces: list[tuple[int, int, Any]]) -> None:
    api = driver.api()
    for offset, nbytes, handle in pieces:
        api.cuMemUnmap(base + offset, nbytes)
        api.cuMemRelease(handle)


def _allocation_properties(index: int) -> Any:
    api = driver.api()
    properties = api.CUmemAllocationProp()
    properties.type = api.CUmemAllocationType.CU_MEM_ALLOCATION_TYPE_PINNED
    properties.location.type = api.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE
    properties.location.id = index
    return properties


def allocation_granularity(index: int) -> int:
    """Bytes in which a GPU's memory can be mapped (2 MiB on all so far)."""
    api = driver.api()
    recommended = api.CUmemAllocationGranularity_flags.CU_MEM_ALLOC_GRANULARITY_RECOMMENDED
    with driver.on_device(index):
        result = api.cuMemGetAllocationGranularity(_allocation_properties(index), recommended)
    return int(_done(result, "the granularity of allocations"))
