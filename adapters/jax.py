"""JAX arrays, eagerly: DLPack and a host synchronisation.

JAX computes on streams of its own that nobody can be told of, so `begin` waits until the inputs are computed and
`finish` until our kernels are.  Outputs are made outside JAX, because a JAX array must never be written to, and
adopted by it without a copy: on the CPU from 64-byte aligned NumPy memory, on a GPU from CuPy memory by DLPack.
Inside `jax.jit` arrays are tracers without memory: refused by name.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

from cki import dtypes
from cki.adapter import Adapter, IndirectAdapter, type_name
from cki.adapters.numpy import aligned_empty
from cki.dlpack import DLPackExport, from_capsule
from cki.dtypes import DType
from cki.errors import InvalidTypeError
from cki.tensor import DeviceId, TensorView, contiguous_strides

# Output memory that JAX has let go of, which its compute stream may still be reading.  Deleting a JAX array runs
# the deleter at once; the memory goes back to CuPy's pool only after the next synchronisation.
_released: list[object] = []


class _Loan:
    """Memory lent to JAX; see `_released`."""

    def __init__(self, memory: Any) -> None:
        self._memory = memory

    def __del__(self) -> None:
        if _released is not None:  # None while the interpreter shuts down
            _released.append(self._memory)


class _DeviceOutput(NamedTuple):
    """An output on a GPU before JAX adopts it: bytes, because CuPy has no arrays of 8-bit floats."""

    memory: Any
    shape: tuple[int, ...]
    dtype: DType


class JaxAdapter(IndirectAdapter):
    """Arrays on one device, of any dtype that has kernels.  They are immutable: no `out=`."""

    name = "jax"

    def check(self, tensor: Any, name: str = "tensor", output: bool = False) -> list[str]:
        if output:
            return [
                f"{name} is a JAX array, which is immutable; leave {name}= out and use the returned array"
            ]
        if tensor.is_deleted():
            return [f"{name} has been deleted or donated to a jitted function; it has no memory any more"]
        problems = []
        try:
            dtypes.from_numpy(tensor.dtype)
        except (InvalidTypeError, TypeError):
            problems.append(
                f"{name} is of dtype {tensor.dtype}, which has no kernels; one of {dtypes.known_names()}"
            )
        devices = tensor.devices()
        if len(devices) > 1:
            problems.append(
                f"{name} is spread over {len(devices)} devices; pass one of {name}.addressable_shards' data, or "
                f"jax.device_put({name}, jax.devices()[0])"
            )
        for platform in sorted({device.platform for device in devices} - {"cpu", "gpu", "cuda"}):
            problems.append(
                f"{name} is on platform {platform}; CUDA arrays, or CPU arrays for the simulated device"
            )
        return problems

    def view(self, tensor: Any) -> TensorView:
        tensor.block_until_ready()
        view = from_capsule(tensor.__dlpack__(), tensor)
        view.readonly = True
        return view

    def begin(self, names: Sequence[str], tensors: Sequence[Any], stream: int | None = None) -> list[Any]:
        held = []
        with contextlib.suppress(IndexError):  # another thread may have taken the rest
            while _released:
                held.append(_released.pop())
        if held:
            _synchronize_devices(held)
        del held
        return super().begin(names, tensors, stream)

    def empty(self, shape: tuple[int, ...], dtype: DType, like: Any, stream: int | None = None) -> Any:
        device = (like if type(like) is TensorView else self.view(like)).device
        if device.kind == "cpu":
            return aligned_empty(shape, dtype)
        from cki.adapters.cupy import device_empty

        nbytes = math.prod(shape) * dtype.itemsize
        return _DeviceOutput(device_empty((nbytes,), dtypes.u8, device.index, stream), shape, dtype)

    def pointer(self, output: Any) -> int:
        if isinstance(output, np.ndarray):
            return int(output.__array_interface__["data"][0])
        return int(output.memory.data.ptr)

    def stream(self, device_index: int) -> int:
        from cki.adapters.cupy import get_current_stream

        return int(get_current_stream(device_index).ptr)

    def finish(
        self, outputs: Sequence[Any], inputs: Sequence[Any], stream: int, device: DeviceId
    ) -> list[Any]:
        if device.kind == "cpu":
            source = next(view.owner[1] for view in inputs if view is not None)
            (target,) = source.devices()
            return [jax.device_put(output, target, may_alias=True) for output in outputs]
        from cki.adapters.cupy import synchronize

        synchronize(stream, device.index)
        return [jax.dlpack.from_dlpack(DLPackExport(_lent(output, device))) for output in outputs]


def _lent(output: _DeviceOutput, device: DeviceId) -> TensorView:
    memory, shape, dtype = output
    return TensorView(memory.data.ptr, shape, contiguous_strides(shape), dtype, device, owner=_Loan(memory))


def _synchronize_devices(arrays: Sequence[Any]) -> None:
    import cupy

    for index in {array.data.device_id for array in arrays}:
        with cupy.cuda.Device(index) as device:
            device.synchronize()


def adapter_for(cls: type, name: str) -> Adapter:
    """The adapter for concrete JAX arrays; tracers and extended dtypes (PRNG keys) are refused."""
    if issubclass(cls, jax.core.Tracer):
        raise InvalidTypeError(
            f"{name} is a JAX tracer ({type_name(cls)}): CKI was called inside jax.jit, jax.vmap, jax.grad or a scan",
            hint="call it outside, on concrete arrays; calls inside jax.jit need CKI's XLA FFI registration, which is "
            "not part of this version",
        )
    if not issubclass(cls, jax.Array) or "prng" in cls.__module__:
        raise InvalidTypeError(
            f"{name} is a {type_name(cls)}, not a JAX array of numbers",
            hint="a jax.Array; of a PRNG key, jax.random.key_data",
        )
    return _ADAPTER


_ADAPTER = JaxAdapter()
