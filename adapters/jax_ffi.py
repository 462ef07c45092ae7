"""The JAX primitive behind every operation of CKI: tracing, lowering to an XLA call, batching, no differentiation.

One primitive, `cki`, serves all operations; which one it is, is a parameter.  Its outputs follow from the OpSpec's
`infer`, and its lowering is a custom call of XLA's FFI (`cki.adapters.xla_calls`) on the buffers and the stream that
XLA gives: the host never waits, and outputs and workspace are XLA's.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import math
import threading
from collections.abc import Sequence
from typing import Any, NamedTuple, NoReturn

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir

from cki import dtypes
from cki.adapters import gradient, known_operations, xla_calls, xla_ffi
from cki.adapters.immutable import refuse_in_program
from cki.adapters.xla_calls import XlaCall
from cki.device import current
from cki.errors import DeviceError, InvalidArgumentError, InvalidTypeError, UnsupportedError
from cki.ops.spec import OpSpec

_TARGET = "cki"
# Held for good: XLA may call a handler for as long as the process lives.
_handlers: list[Any] = []
_registration = threading.Lock()

primitive = Primitive("cki")
primitive.multiple_results = True


def bind(spec: OpSpec, inputs: Sequence[Any], attributes: Sequence[Any]) -> Any:
    """The operation on JAX arrays or tracers, as part of the program that JAX traces or at once.

    inputs: in the order of the spec, None for those left out.  Returns the outputs, then the new values of inputs that
    the operation writes: one array, or a tuple of several.
    Raises InvalidArgumentError or InvalidTypeError that names every violated rule.
    """
    given = [(item.name, tensor) for item, tensor in zip(spec.inputs, inputs) if tensor is not None]
    call = XlaCall(
        known_operations.name_of(spec),
        tuple((name, _element(name, tensor), _shape(spec, name, tensor)) for name, tensor in given),
        tuple(attributes),
        _device_choice(),
    ).checked()
    arrays = [tensor for _, tensor in given]
    parameters = _parameters(call)
    if any(isinstance(array, jax.core.Tracer) for array in arrays):
        results = primitive.bind(*arrays, **parameters)
    else:  # JAX's fast way of a compiled call, which there is not from inside `bind`
        try:
            results = _compiled(tuple(parameters.items()))(*arrays)
        except ValueError:
            _refuse_mixed_devices(spec, given)
            raise
    return results[0] if len(results) == 1 else tuple(results)


def _refuse_mixed_devices(spec: OpSpec, given: Sequence[tuple[str, Any]]) -> None:
    """Raise InvalidArgumentError, in the words of other frameworks, for arrays of different devices."""
    places = {name: ", ".join(sorted(_place(device) for device in array.devices())) for name, array in given}
    if len(set(places.values())) > 1:
        listed = ", ".join(f"{name} is on {place}" for name, place in places.items())
        raise InvalidArgumentError(
            f"{spec.name}: unusable tensors",
            [f"tensors on different devices: {listed}"],
            "all tensors on one device",
        ) from None


def _place(device: Any) -> str:
    return f"{'cpu' if device.platform == 'cpu' else 'cuda'}:{device.local_hardware_id or 0}"


def _element(name: str, tensor: Any) -> str:
    try:
        return dtypes.from_numpy(tensor.dtype).name
    except (InvalidTypeError, TypeError):
        raise InvalidTypeError(
            f"{name} is of dtype {tensor.dtype}, which has no kernels", hint=dtypes.usual_names()
        ) from None


def _shape(spec: OpSpec, name: str, tensor: Any) -> tuple[int, ...]:
    if not all(isinstance(extent, int) for extent in tensor.shape):
        raise UnsupportedError(
            f"{spec.name}: {name} has shape {tensor.shape} with symbolic dimensions",
            hint="export the function for concrete shapes",
        )
    return tuple(tensor.shape)


def _device_choice() -> str:
    device = current()
    return f"sim:{device.arch}" if device.kind == "sim" else "cuda"


def _parameters(call: XlaCall) -> dict[str, Any]:
    names = tuple(name for name, _, _ in call.tensors)
    return {"operation": call.operation, "names": names, "attributes": call.attributes, "device": call.device}


def _call_of(avals: Sequence[Any], parameters: dict[str, Any]) -> XlaCall:
    tensors = tuple(
        (name, dtypes.from_numpy(aval.dtype).name, tuple(aval.shape))
        for name, aval in zip(parameters["names"], avals)
    )
    return XlaCall(parameters["operation"], tensors, parameters["attributes"], parameters["device"])


# ---------------------------------------------------------------------------------------------------------------------
# what the primitive's results are


def _abstract_eval(*avals: Any, **parameters: Any) -> list[Any]:
    call = _call_of(avals, parameters)
    results = [(tuple(output.shape), output.dtype.numpy) for _, output in call.outputs()]
    results += [(tuple(avals[index].shape), avals[index].dtype) for index in call.written()]
    return [_result_like(avals, shape, dtype) for shape, dtype in results]


primitive.def_abstract_eval(_abstract_eval)


def _result_like(avals: Sequence[Any], shape: tuple[int, ...], dtype: Any) -> Any:
    """A result's type.  Inside shard_map it varies over every mesh axis over which an argument varies."""
    for aval in avals:
        kind = getattr(aval, "manual_axis_type", None)
        if kind is not None and not kind.empty:
            break
    else:
        return jax.core.ShapedArray(shape, dtype)
    plain = jax.core.ShapedArray(shape, dtype)
    varying = frozenset().union(*(a.manual_axis_type.varying for a in avals))
    spec = jax.sharding.PartitionSpec(*(None,) * len(shape))
    sharding = aval.sharding.update(spec=spec)
    return plain.update(sharding=sharding, manual_axis_type=type(kind)(varying=varying))


def _jvp(primals: Any, tangents: Any, **parameters: Any) -> NoReturn:
    raise gradient.refusal(
        parameters["operation"].partition("@")[0],
        "jax",
        "jax.lax.stop_gradient on the arguments says that none is meant",
    )


ad.primitive_jvps[primitive] = _jvp


# ---------------------------------------------------------------------------------------------------------------------
# outside jit


@functools.lru_cache(maxsize=4096)
def _compiled(parameters: tuple[tuple[str, Any], ...]) -> Any:
    return jax.jit(functools.partial(primitive.bind, **dict(parameters)))


def _impl(*arrays: Any, **parameters: Any) -> Any:
    """A call on concrete arrays: a program of this one call, compiled at the first."""
    function = _compiled(tuple(parameters.items()))
    if not jax.config.jax_disable_jit:
        return function(*arrays)
    with jax.disable_jit(False):
        return function(*arrays)


primitive.def_impl(_impl)


# ---------------------------------------------------------------------------------------------------------------------
# lowering


def _lower(context: Any, *operands: Any, kind: str, **parameters: Any) -> Any:
    call = _call_of(context.avals_in, parameters)
    _require_device(call, kind)
    register()
    indices = [0]
    if kind == "cuda":
        indices = [device.local_hardware_id for device in jax.local_devices(backend="cuda")]
    call = xla_calls.prepare_call(call, indices)
    results = list(context.avals_out)
    written = call.written()
    aliases = {index: len(results) - len(written) + n for n, index in enumerate(written)}
    if call.workspace:
        results.append(jax.core.ShapedArray((call.workspace,), np.dtype(np.uint8)))
    lower = jax.ffi.ffi_lowering(_TARGET, operand_output_aliases=aliases)
    return lower(context.replace(avals_out=results), *operands, call=call.text())[: len(context.avals_out)]


def _require_device(call: XlaCall, kind: str) -> None:
    if kind == "cuda" and call.device != "cuda":
        raise DeviceError(
            f"{call.operation}: the arrays lie on a GPU, but the current device is sim",
            hint='the simulated device takes CPU arrays; `with cki.device("cuda"):` runs on the GPU',
        )
    if kind == "cpu" and call.device == "cuda":
        raise DeviceError(
            f"{call.operation}: the arrays lie in memory of device cpu, but the current device is cuda",
            hint="move the arrays to a GPU, or run on the simulated device: "
            '`with cki.device("sim"):` or CKI_DEVICE=sim',
        )


def register() -> None:
    """Make the handlers known to XLA, once a process.

    Tracing an operation does this; a process that only runs a program of `jax.export` calls it first.
    """
    with _registration:
        if _handlers:
            return
        version = xla_ffi.header_version(jax.ffi.include_dir())
        for platform, has_stream in (("cpu", False), ("CUDA", True)):
            handler = xla_ffi.make_handler(xla_calls.run, version, has_stream=has_stream)
            jax.ffi.register_ffi_target(_TARGET, jax.ffi.pycapsule(handler), platform=platform)
            _handlers.append(handler)
        atexit.register(_finish)


def _finish() -> None:
    """Wait for the calls that XLA still has to make, before the interpreter goes.

    XLA runs programs behind the caller's back.  When the interpreter ends it destroys XLA's client, which waits for its
    threads while it holds Python's lock; a thread that is about to enter a handler waits for that lock for ever.
    """
    for platform in {"cpu", jax.default_backend()}:
        for array in jax.live_arrays(platform):
            with contextlib.suppress(
                Exception
            ):  # what a failed program left behind was reported to its reader
                array.block_until_ready()
    xla_ffi.activity.wait_quiet(0.25, patience=60.0)  # for results that nobody kept


mlir.register_lowering(primitive, functools.partial(_lower, kind="cpu"), platform="cpu")
mlir.register_lowering(primitive, functools.partial(_lower, kind="cuda"), platform="cuda")


# ---------------------------------------------------------------------------------------------------------------------
# vmap


def _batch(arrays: Sequence[Any], axes: Sequence[Any], **parameters: Any) -> Any:
    """One call where the operation takes leading axes, else one after another."""
    moved = [
        array if axis is None else jax.numpy.moveaxis(array, axis, 0) for array, axis in zip(arrays, axes)
    ]
    is_batched = [axis is not None for axis in axes]
    results = batch_leading(primitive, moved, is_batched, parameters)
    if results is None:
        fixed = [array for array, batched in zip(moved, is_batched) if not batched]

        def one(batched: Sequence[Any]) -> Any:
            varying, constant = iter(batched), iter(fixed)
            merged = [next(varying) if flag else next(constant) for flag in is_batched]
            return primitive.bind(*merged, **parameters)

        results = jax.lax.map(one, [array for array, batched in zip(moved, is_batched) if batched])
    return results, [0] * len(results)


batching.primitive_batchers[primitive] = _batch


def require_graph_arguments(spec: OpSpec, inputs: Sequence[Any], outs: Sequence[Any], stream: Any) -> None:
    """Raise InvalidArgumentError where a traced call is given what XLA decides itself."""
    constants = [
        (
            f"{item.name} is written, but it is a constant of the traced function",
            f"{item.name} as an argument of the jitted function, donated, and its new value returned",
        )
        for item, tensor in zip(spec.inputs, inputs)
        if tensor is not None and not isinstance(tensor, jax.core.Tracer) and item.is_written(tensor.ndim)
    ]
    call = f"{spec.name} inside a traced function"
    refuse_in_program(call, outs, stream, "XLA", "JAX arrays are immutable", constants)


# ---- `jax.vmap`: which operations take one more leading axis, and how ----


class _Rule(NamedTuple):
    """inputs: those that may carry the new axis; every other one must be shared by the batch.

    is_merged: the operation has one batch axis, so the new axis and that one become one; else it takes any number.
    """

    inputs: tuple[str, ...]
    is_merged: bool = False


_RULES = {
    "layer_norm": _Rule(("x", "residual")),
    "rms_norm": _Rule(("x", "residual")),
    "linear": _Rule(("x", "residual")),
    "gated_linear": _Rule(("x",)),
    "bias_activation": _Rule(("x", "multiplier")),
    "gated_activation": _Rule(("x",)),
    "softmax": _Rule(("x",)),
    "attention": _Rule(("q", "k", "v"), True),
    "fused_attention": _Rule(("x", "mask"), True),
    "fused_ffn": _Rule(("x",)),
    "encoder_layer": _Rule(("x", "mask"), True),
    "encoder_layers": _Rule(("x", "mask"), True),
    "mean_pool": _Rule(("x", "mask"), True),
    "apply_rope": _Rule(("x", "positions"), True),
}
#: With one of these given, the leading axes of the operation mean something else.
_EXCLUDED = {"attention": ("bias", "mask"), "softmax": ("mask",), "fused_attention": ("cu_seqlens",),
             "encoder_layer": ("cu_seqlens",), "encoder_layers": ("cu_seqlens",)}  # fmt: skip


def batch_leading(
    primitive: Any, arrays: Sequence[Any], is_batched: Sequence[bool], parameters: dict[str, Any]
) -> list[Any] | None:
    """The whole batch as one call, or None where the operation has no rule for these arguments.

    arrays: those that are batched have the batch as their first axis.
    """
    names = parameters["names"]
    rule = _RULES.get(parameters["operation"])
    if rule is None or set(_EXCLUDED.get(parameters["operation"], ())) & set(names):
        return None
    if any(batched and name not in rule.inputs for name, batched in zip(names, is_batched)):
        return None
    size = next(array.shape[0] for array, batched in zip(arrays, is_batched) if batched)
    carried = []
    for name, array, batched in zip(names, arrays, is_batched):
        if name in rule.inputs and not batched:
            array = jnp.broadcast_to(array, (size, *array.shape))
        if name in rule.inputs and rule.is_merged:
            array = array.reshape((math.prod(array.shape[:2]), *array.shape[2:]))
        carried.append(array)
    if rule.is_merged and len({a.shape[0] for name, a in zip(names, carried) if name in rule.inputs}) > 1:
        return None  # a mask of batch extent 1, which broadcasts only as it is
    results: list[Any] = primitive.bind(*carried, **parameters)
    if rule.is_merged:
        results = [
            result.reshape((size, result.shape[0] // size if size else 0, *result.shape[1:]))
            for result in results
        ]
    return results
