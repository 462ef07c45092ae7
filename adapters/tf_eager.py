"""CKI's operations in eager mode: TensorFlow executes one at once, on the device of its tensors.

A call costs what TensorFlow takes for an operation with as many inputs, and one look-up: text and types of the outputs
are remembered by the operation, its attributes and the tensors' types.  Shapes are passed on to the kernel, which
runs in the same thread, and checked there.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import tensorflow as tf
from tensorflow.python import pywrap_tfe
from tensorflow.python.eager import context, core

from cki.adapters import tf_xla
from cki.adapters.tf_kernels import Kernels
from cki.adapters.tf_ops import node, op_name, register, results_of
from cki.adapters.tf_types import FROM_TF, TO_CODE, EagerTensor, as_tensor_or_variable
from cki.device import current
from cki.ops.spec import OpSpec

# (operation, device, attributes, gradient, types, place) -> name, text, types of the outputs.  The key's objects are
# kept, as some are told by their identity.
_known: dict[Any, tuple[str, bytes, list[int], tuple[Any, ...]]] = {}
_LIMIT = 4096
_INT32 = tf.int32.as_datatype_enum


def run(spec: OpSpec, inputs: Sequence[Any], attributes: tuple[Any, ...], recompute_gradient: bool) -> Any:
    """The operation on eager tensors and variables.

    inputs: in the order of the spec, None for those left out.  Returns a list of the outputs, then of the new values of
    inputs that the operation writes; NotImplemented where tensors lie elsewhere than on the current device or on
    several, or are of types without kernels.
    Raises InvalidArgumentError or InvalidTypeError that names every violated rule, before anything runs.
    """
    choice = current()
    wanted = "CPU" if choice.kind == "sim" else "GPU"
    place = ""
    tensors, shapes = [], []
    key: list[Any] = [id(spec), id(choice), recompute_gradient, attributes]
    for tensor in inputs:
        if tensor is None:
            key.append(None)
            continue
        if tensor.__class__ is EagerTensor:
            code = tensor._datatype_enum()
            shapes.append(tensor._shape_tuple())
        else:
            tensor = as_tensor_or_variable(tensor)
            code = tensor.dtype.as_datatype_enum
            shapes.append(tuple(tensor.shape))
        key.append(code)
        tensors.append(tensor)
        device = tensor.device
        if device != place and (code != _INT32 or wanted == "CPU"):
            # TensorFlow keeps int32 in host memory, and copies it to the device of the operation.
            if place or wanted not in device:
                return NotImplemented
            place = device
    if not place:
        return NotImplemented
    key.append(place)
    if spec.name in _SHAPED:
        key += shapes
    try:
        known = _known.get(tuple(key))
    except TypeError:  # an attribute of a wrong type: refused in `_describe`
        known = None
    if known is None:
        known = _describe(spec, inputs, attributes, recompute_gradient, choice)
        if known is None:
            return NotImplemented
        if len(_known) >= _LIMIT:
            _known.clear()
        _known[tuple(key)] = known
        if wanted == "GPU":
            tf_xla.place(int(place.rpartition(":")[2]))  # before the kernel asks
    return _execute(known, tensors, shapes, place)


#: Operations of which the number of results depends on shapes.
_SHAPED = ("append_kv",)


def _describe(
    spec: OpSpec, inputs: Sequence[Any], attributes: Sequence[Any], recompute: bool, choice: Any
) -> tuple[str, bytes, list[int], tuple[Any, ...]] | None:
    """What is remembered of a call, after all its rules were checked; None where a type has no kernels."""
    given = [(item.name, as_tensor_or_variable(t)) for item, t in zip(spec.inputs, inputs) if t is not None]
    if any(tensor.dtype not in FROM_TF for _, tensor in given):
        return None
    own = node(spec, [name for name, _ in given], attributes, recompute)
    types = [FROM_TF[tensor.dtype].name for _, tensor in given]
    call = own.with_tensors(types, [tuple(tensor.shape) for _, tensor in given]).checked()
    text = replace(own, attributes=call.attributes).text()
    return op_name(spec), text, [TO_CODE[element] for element, _ in results_of(call)], (spec, choice)


def _execute(known: Any, tensors: list[Any], shapes: list[tuple[int, ...]], place: str) -> Any:
    name, text, types, _ = known
    kernels = register()
    session = context.context()
    session.ensure_initialized()
    scope = session.device_name
    expected = kernels.expected
    expected.shapes = (text, tuple(shapes))
    try:
        if scope == place or (not scope and place == _default_device()):
            return pywrap_tfe.TFE_Py_FastPathExecute(
                session, name, None, tensors, "Tout", types, "call", text
            )
        with tf.device(place):
            return pywrap_tfe.TFE_Py_FastPathExecute(
                session, name, None, tensors, "Tout", types, "call", text
            )
    except Exception as error:
        raise _own_error(kernels, error) from None
    finally:
        expected.shapes = None


def _own_error(kernels: Kernels, error: Exception) -> Exception:
    """What the kernel raised, where TensorFlow's error is about that."""
    own: Exception | None = getattr(kernels.failed, "error", None)
    kernels.failed.error = None
    if isinstance(own, Exception) and str(own)[:200] in str(error):
        return own
    if isinstance(error, core._NotOkStatusException):
        found: Exception = core._status_to_exception(error)
        return found
    return error


@functools.cache
def _default_device() -> str:
    """Where TensorFlow runs an operation that has kernels for every device."""
    kind = "GPU" if tf.config.list_logical_devices("GPU") else "CPU"
    return f"/job:localhost/replica:0/task:0/device:{kind}:0"
