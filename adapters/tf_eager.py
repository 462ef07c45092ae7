"""CKI's operations in eager mode: TensorFlow executes one at once, on the device of its tensors.

A call costs what TensorFlow takes for an operation with as many inputs, and little more.  The first call with tensors
of certain types and shapes checks all rules and makes an `EagerCall`; later ones are recognised by one generated
function (`_steady`), which `cki.ops.call` tries first.  The kernel, which runs in the same thread, takes shapes and
launch from the `EagerCall`.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import tensorflow as tf
from tensorflow.python import pywrap_tfe
from tensorflow.python.eager import context, core

from cki import capture_state
from cki.adapters import tf_xla
from cki.adapters.tf_kernels import EagerCall, Kernels
from cki.adapters.tf_ops import node, op_name, register, results_of
from cki.adapters.tf_types import FROM_TF, HOST_KEPT, TO_CODE, EagerTensor, as_tensor_or_variable
from cki.device import _current, current
from cki.generated import define
from cki.ops.call import attribute_kinds
from cki.ops.recent import SteadyCall
from cki.ops.spec import OpSpec
from cki.ops.steady import attribute_tests

#: Kinds of calls that are remembered, and of shapes of each.
_LIMIT, _SHAPES_LIMIT = 4096, 256
_INT32 = TO_CODE["i32"]
#: Operations of which the number of results depends on shapes.
_SHAPED = ("append_kv",)


class _Known(NamedTuple):
    """What is remembered of calls with the same operation, attributes and types on the same device.

    types: TF_DataType of each result.  held: objects that a key tells by their identity.  calls: by shapes.
    """

    name: str
    text: bytes
    types: list[int]
    held: tuple[Any, ...]
    calls: dict[tuple[tuple[int, ...], ...], EagerCall]


_known: dict[Any, _Known] = {}


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
    key: list[Any] = [id(spec), id(choice), recompute_gradient, attributes, attribute_kinds(attributes)]
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
        # TensorFlow keeps these in host memory, and copies them to the device of the operation.
        in_host_memory = code == _INT32 or (code in HOST_KEPT and wanted not in device)
        if device != place and (wanted == "CPU" or not in_host_memory):
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
    return _execute(known, tensors, _eager_call(known, tuple(shapes), inputs, attributes, place), place)


def _describe(
    spec: OpSpec, inputs: Sequence[Any], attributes: Sequence[Any], recompute: bool, choice: Any
) -> _Known | None:
    """What is remembered of a call, after all its rules were checked; None where a type has no kernels."""
    given = [(item.name, as_tensor_or_variable(t)) for item, t in zip(spec.inputs, inputs) if t is not None]
    if any(tensor.dtype not in FROM_TF for _, tensor in given):
        return None
    own = node(spec, [name for name, _ in given], attributes, recompute)
    types = [FROM_TF[tensor.dtype].name for _, tensor in given]
    call = own.with_tensors(types, [tuple(tensor.shape) for _, tensor in given]).checked()
    text = replace(own, attributes=call.attributes).text()
    codes = [TO_CODE[element] for element, _ in results_of(call)]
    return _Known(op_name(spec), text, codes, (spec, choice, recompute), {})


def _eager_call(
    known: _Known, shapes: tuple[tuple[int, ...], ...], inputs: Sequence[Any], attributes: Sequence[Any], place: str
) -> EagerCall:  # fmt: skip
    """What the kernel need not find out, and the next call like this one recognised, if that can be."""
    found = known.calls.get(shapes)
    if found is None:
        if len(known.calls) >= _SHAPES_LIMIT:
            known.calls.clear()
        found = known.calls[shapes] = EagerCall(known.text, shapes)
    spec, _, recompute = known.held
    if not recompute:  # such a call does not come by `cki.ops.call`
        if found.steady is None:
            found.steady = _steady(known, found, inputs, attributes, place)
        if found.steady is not None and found.steady not in spec.recent:
            spec.recent.add(found.steady)
    return found


def _execute(known: _Known, tensors: list[Any], call: EagerCall, place: str) -> Any:
    kernels = register()
    session = context.context()
    session.ensure_initialized()
    scope = session.device_name
    thread = kernels.thread
    thread.call = call
    try:
        if scope == place or (not scope and place == _default_device()):
            return pywrap_tfe.TFE_Py_FastPathExecute(
                session, known.name, None, tensors, "Tout", known.types, "call", known.text
            )
        with tf.device(place):
            return pywrap_tfe.TFE_Py_FastPathExecute(
                session, known.name, None, tensors, "Tout", known.types, "call", known.text
            )
    except Exception as error:
        raise _own_error(kernels, error) from None
    finally:
        thread.call = None


def _own_error(kernels: Kernels, error: Exception) -> Exception:
    """What the kernel raised, where TensorFlow's error is about that."""
    own = kernels.thread.error
    kernels.thread.error = None
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


# ---------------------------------------------------------------------------------------------------------------------
# a known call


def _steady(
    known: _Known, call: EagerCall, inputs: Sequence[Any], attributes: Sequence[Any], place: str
) -> SteadyCall | None:
    """Calls like this one, for `cki.ops.call`; None where tensors or attributes cannot be compared safely."""
    kernels, session = register(), context.context()
    names: dict[str, Any] = {
        "EagerTensor": EagerTensor, "choice": _current.get(), "chosen": _current.get, "capture": capture_state,
        "context": context.context, "session": session, "is_eager": session.executing_eagerly,
        "scopes": (place, "") if place == _default_device() else (place,), "thread": kernels.thread, "call": call,
        "execute": pywrap_tfe.TFE_Py_FastPathExecute, "name": known.name, "types": known.types, "text": known.text,
        "own_error": functools.partial(_own_error, kernels),
    }  # fmt: skip
    tests = attribute_tests(tuple(tuple(v) if v.__class__ is list else v for v in attributes), names)
    if tests is None:
        return None
    tests += ["chosen() is choice", "context() is session", "is_eager()", "not capture.active"]
    tests.append("session.device_name in scopes")
    for index, tensor in enumerate(inputs):
        test = "t{i} is None" if tensor is None else _tensor_test(tensor, str(index), names)
        if test is None:
            return None
        tests.append(test.format(i=index))
    if place not in names["scopes"]:
        return None
    given = ", ".join(f"t{index}" for index, tensor in enumerate(inputs) if tensor is not None)
    body = [
        "for out in outs:",
        "    if out is not None: return None",
        "try:",
        f"    {''.join(f't{index}, ' for index in range(len(inputs)))}= inputs",
        *(
            [f"    {''.join(f'a{index}, ' for index in range(len(attributes)))}= attributes"]
            if attributes
            else []
        ),
        f"    if not ({' and '.join(tests)}): return None",
        "except (AttributeError, ValueError):  # other tensors, or as many others",
        "    return None",
        "thread.call = call",
        "try:",
        f"    results = execute(session, name, None, [{given}], 'Tout', types, 'call', text)",
        "except Exception as error:",
        "    raise own_error(error) from None",
        "finally:",
        "    thread.call = None",
        "return results[0] if len(results) == 1 else tuple(results)",
    ]
    found: SteadyCall = define("steady", "inputs, attributes, outs", body, names)
    return found


def _tensor_test(tensor: Any, index: str, names: dict[str, Any]) -> str | None:
    """A condition under which `t{i}` may stand in a tensor's place."""
    if tensor.__class__ is EagerTensor:
        names |= {f"code{index}": tensor._datatype_enum(), f"shape{index}": tensor._shape_tuple()}
        names[f"device{index}"] = tensor.device
        return (
            "t{i}.__class__ is EagerTensor and t{i}._datatype_enum() == code{i} and t{i}._shape_tuple() == shape{i} "
            "and t{i}.device == device{i}"
        )
    if isinstance(tensor, tf.Variable) and tensor.shape.is_fully_defined():
        # Type, shape and device of a variable are fixed, whatever is assigned to it.
        names[f"same{index}"] = weakref.ref(tensor)
        return "t{i} is not None and t{i} is same{i}()"  # gone, it is None
    return None
