"""The arenas of a GPU against a driver that keeps "device" memory on the host: what is mapped, copied and given back.

The structs are those of cuda.bindings; only the functions that need a GPU are replaced.  Real memory is the business of
tests/memory/test_kv_cache.py on a GPU.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from cki import dlpack, driver
from cki.errors import DeviceError, OutOfBlocksError
from cki.memory import PagedKVCache, arguments
from cki.memory.arena import Arena, CudaArena, HostArena, VirtualArena

bindings = pytest.importorskip("cuda.bindings.driver")

MIB = 2**20
OK = bindings.CUresult.CUDA_SUCCESS
OUT_OF_MEMORY = bindings.CUresult.CUDA_ERROR_OUT_OF_MEMORY


class FakeDriver:
    """Functions of the driver on host memory of at most `free` bytes."""

    def __init__(self) -> None:
        self.free = 64 * MIB
        self.memory: dict[int, np.ndarray] = {}
        self.reserved: dict[int, np.ndarray] = {}
        self.handles: dict[int, int] = {}
        self.mapped: dict[int, tuple[int, int]] = {}
        self.pinned: dict[int, np.ndarray] = {}
        self.events: list[int] = []
        self.log: list[str] = []
        self.fail_access_at = -1

    def __getattr__(self, name: str) -> Any:
        if name.startswith("CU"):
            return getattr(bindings, name)
        raise AttributeError(name)

    def _buffer(self, nbytes: int, store: dict[int, np.ndarray]) -> int:
        buffer = np.zeros(nbytes, np.uint8)
        store[buffer.ctypes.data] = buffer
        return buffer.ctypes.data

    def cuMemAlloc(self, nbytes: int) -> tuple[Any, Any]:
        if nbytes > self.free:
            return OUT_OF_MEMORY, None
        self.free -= nbytes
        return OK, bindings.CUdeviceptr(self._buffer(nbytes, self.memory))

    def cuMemFree(self, address: Any) -> tuple[Any]:
        self.free += len(self.memory.pop(int(address)))
        return (OK,)

    def cuMemGetInfo(self) -> tuple[Any, int, int]:
        return OK, self.free, 64 * MIB

    def cuMemGetAllocationGranularity(self, properties: Any, option: Any) -> tuple[Any, int]:
        assert properties.location.id == 0
        return OK, 2 * MIB

    def cuMemAddressReserve(self, nbytes: int, *rest: int) -> tuple[Any, Any]:
        assert nbytes % (2 * MIB) == 0
        return OK, bindings.CUdeviceptr(self._buffer(nbytes, self.reserved))

    def cuMemAddressFree(self, address: int, nbytes: int) -> tuple[Any]:
        assert not self.mapped, "addresses freed while memory is mapped"
        assert len(self.reserved.pop(address)) == nbytes
        return (OK,)

    def cuMemCreate(self, nbytes: int, properties: Any, flags: int) -> tuple[Any, Any]:
        assert nbytes % (2 * MIB) == 0
        if nbytes > self.free:
            return OUT_OF_MEMORY, None
        self.free -= nbytes
        handle = 1000 + len(self.log)
        self.log.append("create")
        self.handles[handle] = nbytes
        return OK, handle

    def cuMemMap(self, address: int, nbytes: int, offset: int, handle: int, flags: int) -> tuple[Any]:
        assert self.handles[handle] == nbytes
        for start, (size, _) in self.mapped.items():
            assert address + nbytes <= start or start + size <= address, "mapped twice"
        self.mapped[address] = nbytes, handle
        return (OK,)

    def cuMemSetAccess(self, address: int, nbytes: int, access: list[Any], count: int) -> tuple[Any]:
        assert access[0].location.id == 0
        assert access[0].flags == bindings.CUmemAccess_flags.CU_MEM_ACCESS_FLAGS_PROT_READWRITE
        assert count == 1
        if len(self.mapped) == self.fail_access_at:
            return (bindings.CUresult.CUDA_ERROR_UNKNOWN,)
        return (OK,)

    def cuMemUnmap(self, address: int, nbytes: int) -> tuple[Any]:
        assert self.mapped.pop(address)[0] == nbytes
        return (OK,)

    def cuMemRelease(self, handle: int) -> tuple[Any]:
        self.free += self.handles.pop(handle)
        return (OK,)

    def cuCtxSynchronize(self) -> tuple[Any]:
        self.log.append("synchronize")
        return (OK,)

    def cuMemHostAlloc(self, nbytes: int, flags: int) -> tuple[Any, int]:
        return OK, self._buffer(nbytes, self.pinned)

    def cuMemFreeHost(self, address: int) -> tuple[Any]:
        del self.pinned[address]
        return (OK,)

    def cuEventCreate(self, flags: int) -> tuple[Any, int]:
        assert flags == int(bindings.CUevent_flags.CU_EVENT_DISABLE_TIMING)
        self.events.append(len(self.events))
        return OK, self.events[-1]

    def cuEventDestroy(self, event: int) -> tuple[Any]:
        self.events.remove(event)
        return (OK,)

    def cuEventRecord(self, event: int, stream: int) -> tuple[Any]:
        self.log.append(f"record {event} on {stream}")
        return (OK,)

    def cuEventSynchronize(self, event: int) -> tuple[Any]:
        self.log.append(f"wait {event}")
        return (OK,)

    def cuMemcpyHtoDAsync(self, target: int, source: int, nbytes: int, stream: int) -> tuple[Any]:
        self.log.append(f"upload on {stream}")
        ctypes.memmove(target, source, nbytes)
        return (OK,)

    def cuMemcpyDtoDAsync(self, target: int, source: int, nbytes: int, stream: int) -> tuple[Any]:
        self.log.append(f"copy on {stream}")
        ctypes.memmove(target, source, nbytes)
        return (OK,)

    def cuMemcpyDtoH(self, target: int, source: int, nbytes: int) -> tuple[Any]:
        ctypes.memmove(target, source, nbytes)
        return (OK,)

    def cuMemcpy2DAsync(self, request: Any, stream: int) -> tuple[Any]:
        self.log.append(f"upload rows on {stream}")
        for row in range(request.Height):
            target = int(request.dstDevice) + row * request.dstPitch
            ctypes.memmove(target, int(request.srcHost) + row * request.srcPitch, request.WidthInBytes)
        return (OK,)

    def cuGetErrorString(self, status: Any) -> tuple[Any, bytes]:
        return OK, b"in words"


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeDriver]:
    fake = FakeDriver()
    monkeypatch.setattr(driver, "api", lambda: fake)
    monkeypatch.setattr(driver, "on_device", lambda index: contextlib.nullcontext())
    monkeypatch.setattr(driver, "allowed_while_capturing", contextlib.nullcontext)
    monkeypatch.setattr(driver, "capturing_graph", lambda stream: None)
    monkeypatch.setattr(arguments, "gpu_index", lambda device: 0)
    monkeypatch.setattr(arguments, "has_driver", lambda: True)
    yield fake
    gc.collect()  # tracebacks of expected errors hold arenas
    left = fake.memory, fake.reserved, fake.handles, fake.mapped, fake.pinned, fake.events
    assert not any(left), "memory was not given back"
    assert fake.free == 64 * MIB


@pytest.mark.parametrize("kind", [CudaArena, VirtualArena, HostArena])
def test_copies(fake: FakeDriver, kind: Any) -> None:
    arena: Arena = kind(4096) if kind is HostArena else kind(4096, 0)
    arena.commit([(0, 4096)])
    staging = arena.staging(64)
    source = staging.buffers[staging.next()]
    source[:] = range(64)
    arena.upload(512, source[:16], 7)
    assert arena.read(512, 16).tolist() == list(range(16))
    arena.upload_rows(1024, 100, source[:12].reshape(3, 4), 7)
    rows = [arena.read(1024 + 100 * row, 4).tolist() for row in range(3)]
    assert rows == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9, 10, 11]]
    arena.copy(2048, 512, 16, 7)
    assert arena.read(2048, 16).tolist() == list(range(16))


def test_virtual_arena_maps_what_is_missing_in_whole_pieces(fake: FakeDriver) -> None:
    arena = VirtualArena(32 * MIB - 5, 0)
    assert (arena.nbytes, fake.free) == (32 * MIB, 64 * MIB), "addresses cost no memory"
    arena.commit([(0, 10), (8 * MIB, 5 * MIB)])
    pieces = [(start - arena.base, size) for start, (size, _) in sorted(fake.mapped.items())]
    assert pieces == [(0, 2 * MIB), (8 * MIB, 6 * MIB)]
    arena.commit([(0, 12 * MIB)])
    pieces = [(start - arena.base, size) for start, (size, _) in sorted(fake.mapped.items())]
    assert pieces == [(0, 2 * MIB), (2 * MIB, 6 * MIB), (8 * MIB, 6 * MIB)]
    before = len(fake.log)
    arena.commit([(5, 3 * MIB)])
    assert len(fake.log) == before, "nothing was missing"


def test_a_commit_that_fails_leaves_nothing_behind(fake: FakeDriver) -> None:
    arena = VirtualArena(128 * MIB, 0)
    arena.commit([(0, 4 * MIB)])
    with pytest.raises(OutOfBlocksError, match="58.0 of 64.0 MiB are free") as caught:
        arena.commit([(8 * MIB, 2 * MIB), (32 * MIB, 90 * MIB)])
    assert (caught.value.needed, caught.value.free) == (90 * MIB, 58 * MIB)
    assert (fake.free, len(fake.mapped)) == (60 * MIB, 1)
    fake.fail_access_at = 2
    with pytest.raises(DeviceError, match=r"cuMemSetAccess: CUDA_ERROR_UNKNOWN \(in words\)"):
        arena.commit([(8 * MIB, 2 * MIB)])
    assert (fake.free, len(fake.mapped)) == (60 * MIB, 1)
    fake.fail_access_at = -1
    arena.commit([(8 * MIB, 2 * MIB)])
    assert len(fake.mapped) == 2


def test_too_little_memory_at_the_start(fake: FakeDriver) -> None:
    with pytest.raises(
        OutOfBlocksError, match=r"cuda:0 has no 100.0 MiB for the cache: 64.0 of 64.0 MiB are free"
    ):
        CudaArena(100 * MIB, 0)
    options: dict[str, Any] = {"num_kv_heads": 8, "head_dim": 128, "dtype": "bf16", "max_sequences": 2}
    with pytest.raises(OutOfBlocksError):
        PagedKVCache(32, 4096, **options)
    with pytest.raises(OutOfBlocksError):
        PagedKVCache(32, 4096, max_num_blocks=8192, **options)


def test_a_cache_that_grows(fake: FakeDriver) -> None:
    options: dict[str, Any] = {"num_kv_heads": 2, "head_dim": 64, "dtype": "e4m3", "max_sequences": 4}
    cache = PagedKVCache(2, 4, max_num_blocks=4096, **options)
    assert all(
        tensor.ptr % (2 * MIB) == cache._storage.arena.base % (2 * MIB) for tensor in cache.layer(1) if tensor
    )
    a = cache.allocate_sequence()
    cache.prepare_step([a], 20)
    used, fake.free = fake.free, 4 * MIB
    with pytest.raises(OutOfBlocksError):
        cache.grow(4096)
    assert (cache.num_blocks, fake.free) == (4, 4 * MIB)
    fake.free = used
    cache.grow(4096)
    assert fake.free < used
    last = cache.layer(1).v_scale
    assert last is not None
    end = last.ptr + 4 * last.view.size
    assert any(start <= end - 1 < start + size for start, (size, _) in fake.mapped.items())


def test_a_step_is_one_upload_and_the_rows_that_changed(fake: FakeDriver) -> None:
    cache = PagedKVCache(2, 64, num_kv_heads=2, head_dim=8, dtype="bf16", max_sequences=4, stream=5)
    sequences = [cache.allocate_sequence(), cache.allocate_sequence()]
    fake.log.clear()
    cache.prepare_step(sequences, [3, 16])
    cache.prepare_step(sequences, [1, 0])
    cache.prepare_step(sequences, [0, 1], stream=9)
    cache.prepare_step(sequences[::-1], 0)
    child = cache.fork(sequences[0])
    cache.prepare_step([child], 1)
    assert fake.log == [
        "wait 0", "upload on 5", "upload rows on 5", "record 0 on 5",
        "wait 1", "upload on 5", "record 1 on 5",
        "wait 0", "upload on 9", "upload rows on 9", "record 0 on 9",
        "wait 1", "upload on 5", "upload rows on 5", "record 1 on 5",
        *["copy on 5"] * 4, "wait 0", "upload on 5", "upload rows on 5", "record 0 on 5",
    ]  # fmt: skip


def test_memory_goes_with_its_last_user(fake: FakeDriver) -> None:
    cache = PagedKVCache(2, 64, num_kv_heads=2, head_dim=8, dtype="bf16", max_num_blocks=128, max_sequences=4)
    capsule = cache.layer(0).k.__dlpack__()
    fake.log.clear()
    del cache
    assert fake.mapped, "an export holds the memory"
    del capsule
    dlpack.collect_unconsumed()  # as the next cache does
    assert fake.log == ["synchronize"], "kernels may run until then"
    assert not fake.mapped
