"""JAX arrays and tracers; `cki.adapters.jax.layer_norm` and so on: every public operation as a function of JAX.

A public operation that sees a tracer (inside `jax.jit`, `jax.vmap`, ...) becomes a call in JAX's program
(`cki.adapters.jax_ffi`), and so does one on concrete arrays on a GPU, or that writes to its arguments, which JAX arrays
do not allow: XLA runs it on its own stream, on its own memory.

What remains (the simulated device outside jit, a user's own kernels, `cki.Encoder`, `stream=`) reads arrays by DLPack.
JAX computes on streams of its own that nobody can be told of, so `begin` waits until the inputs are computed and
`finish` until our kernels are.  Outputs are made outside JAX, because a JAX array must never be written to, and
adopted by it without a copy: on the CPU from 64-byte aligned NumPy memory, on a GPU from CuPy memory by DLPack.

The functions here, unlike those of `cki`, always go through XLA, take NumPy arrays beside JAX's, and return the new
values of what an operation writes (`append_kv`: the caches) behind its outputs.  With `recompute_gradient=True`
`jax.grad` differentiates the plain expression of the operation (`cki.adapters.gradient_jax`).
"""

from __future__ import annotations

import contextlib
import functools
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

import cki
from cki import capture_state, dtypes
from cki.adapter import Adapter, IndirectAdapter, require_valid, type_name
from cki.adapters import jax_ffi, known_operations
from cki.adapters.gradient import require_bool
from cki.adapters.immutable import framework_tensors, immutable_output
from cki.adapters.jax_attention import dot_product_attention as dot_product_attention
from cki.adapters.jax_ffi import register as register
from cki.adapters.numpy import aligned_empty
from cki.dlpack import DLPackExport, from_capsule
from cki.dtypes import DType
from cki.errors import DeviceError, InvalidArgumentError, InvalidTypeError, UnsupportedError
from cki.ops.bind import out_arguments, require_inputs
from cki.ops.cache_arguments import is_cache_memory
from cki.ops.call import Planned, PlanRequest
from cki.ops.spec import OpSpec
from cki.ops.table import public_specs
from cki.own_operation import OwnSpec
from cki.tensor import DeviceId, TensorView, contiguous_strides

#: Platforms on which calls outside jit go through XLA too.
_THROUGH_XLA = ("gpu", "cuda")

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
            return [immutable_output(name, "JAX array")]
        if isinstance(tensor, jax.core.Tracer):
            return [
                f"{name} is a JAX tracer ({type_name(type(tensor))}), which has no memory; inside jax.jit, jax.vmap "
                "and the like only CKI's public operations can be called"
            ]
        if tensor.is_deleted():
            return [f"{name} has been deleted or donated to a jitted function; it has no memory any more"]
        problems = []
        try:
            dtypes.from_numpy(tensor.dtype)
        except (InvalidTypeError, TypeError):
            problems.append(
                f"{name} is of dtype {tensor.dtype}, which has no kernels; {dtypes.usual_names()}"
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

    def is_symbolic(self, tensor: Any) -> bool:
        return isinstance(tensor, jax.core.Tracer)

    def view(self, tensor: Any) -> TensorView:
        if self.is_symbolic(tensor):
            raise InvalidTypeError("values were asked for inside a traced function", self.check(tensor))
        tensor.block_until_ready()
        view = from_capsule(tensor.__dlpack__(), tensor)
        view.readonly = not is_cache_memory(tensor)
        return view

    def own_call(
        self,
        spec: OpSpec,
        inputs: tuple[Any, ...],
        attributes: tuple[Any, ...],
        outs: tuple[Any, ...],
        stream: Any,
    ) -> Any:
        present = [tensor for tensor in inputs if tensor is not None]
        is_listed = known_operations.is_public(spec) or isinstance(spec, OwnSpec)
        if any(isinstance(tensor, jax.core.Tracer) for tensor in present):
            if not is_listed:
                raise UnsupportedError(
                    f"{spec.name} cannot be called inside jax.jit, jax.vmap and the like",
                    hint="call it outside, or the public operations that it is made of inside",
                )
            return _in_program(spec, inputs, attributes, outs, stream)
        written = [tensor for item, tensor in zip(spec.inputs, inputs) if item.written and tensor is not None]
        if (
            not is_listed
            or stream is not None
            or capture_state.active
            or any(out is not None for out in outs)
            or any(is_cache_memory(tensor) for tensor in written)
        ):
            return NotImplemented
        require_valid(self, [item.name for item in spec.inputs], inputs)
        _require_one_device(spec, inputs)
        devices = {device for tensor in present for device in tensor.devices()}
        if written or (len(devices) == 1 and devices.pop().platform in _THROUGH_XLA):
            return jax_ffi.bind(spec, inputs, attributes)
        return NotImplemented

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


def _in_program(
    spec: OpSpec, inputs: Sequence[Any], attributes: Sequence[Any], outs: Sequence[Any], stream: Any
) -> Any:
    """The call in JAX's program; concrete arrays among the inputs become constants of it."""
    if any(isinstance(tensor, jax.core.Tracer) for tensor in inputs):
        jax_ffi.require_graph_arguments(spec, inputs, outs, stream)
    return jax_ffi.bind(spec, inputs, attributes)


def adapter_for(cls: type, name: str) -> Adapter:
    """The adapter for JAX arrays and tracers; extended dtypes (PRNG keys) are refused."""
    if issubclass(cls, jax.core.Tracer):
        return _ADAPTER
    if not issubclass(cls, jax.Array) or "prng" in cls.__module__:
        raise InvalidTypeError(
            f"{name} is a {type_name(cls)}, not a JAX array of numbers",
            hint="a jax.Array; of a PRNG key, jax.random.key_data",
        )
    return _ADAPTER


_ADAPTER = JaxAdapter()


# ---------------------------------------------------------------------------------------------------------------------
# the public operations as functions of JAX


@functools.cache
def _function(name: str) -> Callable[..., Any]:
    public = getattr(cki, name)

    @functools.wraps(public)
    def function(*args: Any, **kwargs: Any) -> Any:
        recomputes = kwargs.pop("recompute_gradient", False)
        require_bool(name, recomputes)
        if kwargs.pop("stream", None) is not None:
            raise InvalidArgumentError(
                f"{name}: stream is given, but XLA launches on its own", hint="no stream="
            )
        arguments = [_as_array(name, value) for value in args]
        named = {key: _as_array(name, value) for key, value in kwargs.items()}
        try:
            public(*arguments, **named, stream=PlanRequest())
        except Planned as planned:
            call = planned
        require_inputs(call.spec, call.inputs)
        outs = [out for out, tensor in zip(out_arguments(call.spec), call.outs) if tensor is not None]
        if outs:
            raise InvalidArgumentError(
                f"{name}: {', '.join(outs)} is given, but JAX arrays are immutable",
                hint=f"no {outs[0]}=; use what is returned",
            )
        given = [
            (item.name, tensor) for item, tensor in zip(call.spec.inputs, call.inputs) if tensor is not None
        ]
        for argument, tensor in given:
            if not isinstance(tensor, (jax.Array, jax.core.Tracer)):
                raise InvalidTypeError(
                    f"{name}: {argument} is of type {type_name(type(tensor))}", hint="JAX or NumPy arrays"
                )
        require_valid(
            _ADAPTER, [n for n, _ in given], [None if isinstance(t, jax.core.Tracer) else t for _, t in given]
        )
        if recomputes:
            from cki.adapters.gradient_jax import bind_recomputed

            return bind_recomputed(call.spec, call.inputs, call.attributes)
        return _in_program(call.spec, call.inputs, call.attributes, call.outs, None)

    return function


def _require_one_device(spec: OpSpec, inputs: tuple[Any, ...]) -> None:
    """Arrays that were put on devices lie on one: JAX's devices of the CPU share memory, which hides it."""
    places = {
        item.name: next(iter(tensor.devices()))
        for item, tensor in zip(spec.inputs, inputs)
        if tensor is not None and tensor.committed
    }
    if len(set(places.values())) > 1:
        listed = ", ".join(
            f"{name} is on {f'cpu:{at.id}' if at.platform == 'cpu' else f'cuda:{at.local_hardware_id}'}"
            for name, at in places.items()
        )
        raise DeviceError(
            f"{spec.name}: unusable tensors",
            [f"tensors on different devices: {listed}"],
            "all tensors on one device",
        )


def _as_array(operation: str, value: Any) -> Any:
    """NumPy arrays as JAX's, also inside a cache's tuple."""
    hint = "(k_cache, v_cache) of JAX arrays, donated to the jitted function"
    return framework_tensors(operation, value, jax.numpy.asarray, "JAX arrays", hint)


def __getattr__(name: str) -> Callable[..., Any]:
    if name not in public_specs():
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return _function(name)


def __dir__() -> list[str]:
    return sorted({*globals(), *public_specs()})
