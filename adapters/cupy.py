"""CuPy arrays, and the few CUDA runtime calls that the other adapters share.

Outputs come from CuPy's current allocator, kernels run on CuPy's current stream of the arrays' device.
"""

from __future__ import annotations

import functools
import math
import threading
from collections import deque
from collections.abc import Hashable
from typing import Any

import cupy
from cupy.cuda import ExternalStream, alloc, get_current_stream, runtime

from cki import dtypes
from cki.adapter import ALIGNMENT, Adapter, canonical_strides, type_name
from cki.adapters.numpy import array_problems
from cki.dtypes import DType
from cki.errors import InvalidTypeError
from cki.generated import Expression
from cki.ops.match import Guard
from cki.tensor import DeviceId, TensorView

_WITHOUT_ARRAYS = (dtypes.e4m3, dtypes.e5m2)


class CupyAdapter(Adapter):
    """Arrays of any strides that are not negative; bfloat16 through ml_dtypes."""

    name = "cupy"

    def signature(self, tensor: cupy.ndarray) -> tuple[int, Hashable]:
        data = tensor.data
        pointer = data.ptr
        return pointer, (tensor.shape, tensor.strides, tensor.dtype, data.device_id, ALIGNMENT[pointer & 15])

    def guard(self, tensor: cupy.ndarray, trusted: bool = False) -> Guard | None:
        if not tensor.size or tensor.data.ptr & 15:
            return None
        # Built-in dtypes are single objects; an equal one of another's making is rare.  Shape and strides are made
        # anew by each look, 0.1 us each, so they are looked at only where less does not tell.
        conditions = ["({t}.dtype is {dtype} or {t}.dtype == {dtype})", "{t}.ndim == {ndim}"]
        if tensor.ndim in (1, 2):
            conditions += ["len({t}) == {length}", "{t}.size == {size}"][: tensor.ndim]
        else:
            conditions.append("{t}.shape == {shape}")
        is_plain = getattr(tensor, "_c_contiguous", False) is True
        conditions.append("{t}._c_contiguous" if is_plain else "{t}.strides == {strides}")
        if not _is_only_device():
            conditions.append("{t}.data.device_id == {device}")
        if not trusted:
            conditions.append("{t}.__class__ is {cls}")
        constants = {
            "shape": tensor.shape, "dtype": tensor.dtype, "device": tensor.data.device_id, "strides": tensor.strides,
            "cls": type(tensor), "ndim": tensor.ndim, "size": tensor.size,
            "length": tensor.shape[0] if tensor.ndim else 1,
        }  # fmt: skip
        # TypeError: of something that is no array and has no length.
        return Guard("{t}.data.ptr", tuple(conditions), constants, (AttributeError, TypeError))

    def check(self, tensor: cupy.ndarray, name: str = "tensor", output: bool = False) -> list[str]:
        problems: list[str] = array_problems(
            name, tensor, "the GPU is little-endian", "cupy.ascontiguousarray"
        )
        return problems

    def view(self, tensor: cupy.ndarray) -> TensorView:
        dtype = dtypes.from_numpy(tensor.dtype)
        shape = tensor.shape
        strides = canonical_strides(shape, tuple(stride // dtype.itemsize for stride in tensor.strides))
        pointer = tensor.data.ptr if tensor.size else 0
        return TensorView(
            pointer, shape, strides, dtype, DeviceId("cuda", tensor.data.device_id), False, tensor
        )

    def empty(
        self, shape: tuple[int, ...], dtype: DType, like: Any, stream: int | None = None
    ) -> cupy.ndarray:
        index = like.device.index if type(like) is TensorView else like.data.device_id
        return device_empty(shape, dtype, index, stream)

    def allocation(self, shape: tuple[int, ...], dtype: DType, device: DeviceId) -> Expression:
        if dtype in _WITHOUT_ARRAYS or not _is_only_device():
            return super().allocation(shape, dtype, device)
        nbytes = math.prod(shape) * dtype.itemsize
        text = "{array}({shape}, {dtype}, {alloc}({nbytes}))"
        constants = {
            "array": cupy.ndarray,
            "shape": shape,
            "dtype": dtype.numpy,
            "alloc": alloc,
            "nbytes": nbytes,
        }
        return Expression(text, constants)

    def pointer(self, output: cupy.ndarray) -> int:
        return int(output.data.ptr)

    def address(self) -> Expression:
        return Expression("{t}.data.ptr", {})

    def stream(self, device_index: int) -> int:
        return int(get_current_stream(device_index).ptr)

    def current_stream(self, device_index: int) -> Expression:
        return Expression("{stream}({index}).ptr", {"stream": get_current_stream, "index": device_index})


@functools.cache
def _is_only_device() -> bool:
    """Whether there is one GPU, so that every array is on it and it is always the current one."""
    return int(runtime.getDeviceCount()) == 1


def device_empty(
    shape: tuple[int, ...], dtype: DType, device_index: int, stream: int | None = None
) -> cupy.ndarray:
    """An uninitialised array on a GPU, from CuPy's current allocator, safe to write on `stream` (None: the current).

    Raises InvalidTypeError for the 8-bit floats, of which CuPy has no arrays.
    """
    if dtype in _WITHOUT_ARRAYS:
        raise InvalidTypeError(f"CuPy has no arrays of {dtype}", hint="torch or JAX tensors")
    if runtime.getDevice() == device_index and stream is None:
        return cupy.ndarray(shape, dtype.numpy)
    with cupy.cuda.Device(device_index):
        if stream is None:
            return cupy.ndarray(shape, dtype.numpy)
        with ExternalStream(
            stream, device_index
        ):  # the pool reuses memory in the order of its current stream
            return cupy.ndarray(shape, dtype.numpy)


def synchronize(stream: int, device_index: int) -> None:
    """Block until all work on a stream is done."""
    with cupy.cuda.Device(device_index):
        runtime.streamSynchronize(stream)


def is_capturing(stream: int) -> bool:
    """Whether a stream records a graph (no waiting is allowed then).  Handles 0 and 1 cannot."""
    return stream > 1 and bool(runtime.streamIsCapturing(stream))


def order_after(consumer: int, producer: int, device_index: int) -> None:
    """Make stream `consumer` wait for the work that is now on stream `producer`; the host does not wait."""
    if max(consumer, 1) == max(producer, 1) or is_capturing(consumer) or is_capturing(producer):
        return
    with cupy.cuda.Device(device_index):
        event = cupy.cuda.Event(disable_timing=True)
        runtime.eventRecord(event.ptr, producer)
        runtime.streamWaitEvent(consumer, event.ptr)


#: cudaMemoryTypeUnregistered: plain memory of the host.
_UNREGISTERED = 0


def device_of_pointer(pointer: int) -> int:
    """The GPU on which an address lies (the current one for a null pointer).  InvalidTypeError for other memory."""
    try:
        if not pointer:
            return int(runtime.getDevice())
        attributes = runtime.pointerGetAttributes(pointer)
    except runtime.CUDARuntimeError as error:
        raise InvalidTypeError(f"no GPU knows address {pointer:#x}: {error}") from error
    if attributes.type == _UNREGISTERED:
        raise InvalidTypeError(
            f"address {pointer:#x} is no memory of a GPU", hint="memory that CUDA allocated"
        )
    return int(attributes.device)


class KeepAlive:
    """Holds objects until the work that was on a stream at the time is done, without waiting for it.

    For producers that free memory without regard to our stream.
    """

    def __init__(self) -> None:
        self._held: deque[tuple[Any, object]] = deque()
        self._lock = threading.Lock()

    def hold(self, owners: object, stream: int, device_index: int) -> None:
        """Keep `owners` until the stream has passed this point.  During capture the graph's user keeps them."""
        if is_capturing(stream):  # asking events would break the capture
            return
        self.release()
        with cupy.cuda.Device(device_index):
            event = cupy.cuda.Event(disable_timing=True)
            runtime.eventRecord(event.ptr, stream)
        self._held.append((event, owners))

    def release(self) -> None:
        """Let go of what is no longer needed."""
        with self._lock:
            while self._held and self._held[0][0].done:
                self._held.popleft()


def adapter_for(cls: type, name: str) -> Adapter:
    """The adapter for `cupy.ndarray` and its subclasses (sparse matrices are another type, and refused)."""
    if not issubclass(cls, cupy.ndarray):
        raise InvalidTypeError(
            f"{name} is a {type_name(cls)}, not a cupy.ndarray", hint="a dense cupy.ndarray"
        )
    return _ADAPTER


_ADAPTER = CupyAdapter()
