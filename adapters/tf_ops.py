"""CKI's operations as operations of TensorFlow's: `CkiLayerNorm` and the rest, made from the table, and calls of them.

All take a list of tensors (those that are given, in the order of the OpSpec) and a text that says the rest
(`cki.adapters.tf_kernels`).  Registration needs no compiler and no device; importing cki does it (`tf_import`), so that
saved models that hold such nodes load.

A call in eager mode executes the operation.  A call while TensorFlow builds a graph adds a node whose output shapes
come from the operation's own shape rule: it is evaluated for several sizes of the dimensions that are not known, and
what differs is not known of the outputs either.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import tensorflow as tf

from cki.adapters import gradient, gradient_tensorflow, known_operations, tf_c_api, tf_probe, tf_xla
from cki.adapters.tf_kernels import Kernels, NodeCall
from cki.adapters.tf_types import FROM_TF, TO_CODE, EagerTensor, as_tensor_or_variable
from cki.adapters.xla_calls import XlaCall
from cki.device import current
from cki.errors import CkiError, InvalidArgumentError, InvalidTypeError, UnsupportedError
from cki.ops.spec import OpSpec
from cki.ops.table import public_specs

#: The operation that runs what is not in the table: `cki.Encoder`, kernels of `cki.load`.
_LOCAL = "CkiLocal"
_MEANT = "tf.stop_gradient on the arguments says that none is meant"
#: Sizes that stand for an unknown dimension, beside those that the known ones have: odd ones, to be told from these.
_PROBES = (1072, 2096, 1)
_MOST_PROBES = 12


def op_name(spec: OpSpec) -> str:
    """The name of an operation among TensorFlow's: layer_norm is CkiLayerNorm."""
    if not known_operations.is_public(spec):
        return _LOCAL
    return "Cki" + "".join(part.capitalize() for part in spec.name.split("_"))


@functools.cache
def register() -> Kernels:
    """Register all operations and their kernels, once.  UnsupportedError says what this TensorFlow lacks."""
    from tensorflow.python.framework import ops

    api = tf_c_api.load()
    kernels = Kernels(api, tf_xla.place)
    for name in [*(op_name(spec) for spec in public_specs().values()), _LOCAL]:
        api.define_op(
            name,
            "tensors: T",
            "outputs: Tout",
            ("T: list(type) >= 1", "Tout: list(type) >= 0", "call: string"),
        )
        for device, compute in kernels.compute.items():
            api.define_kernel(name, device, kernels.create, compute)
        ops.RegisterGradient(name)(_gradient)
    _leave_as_written()
    return kernels


def _leave_as_written() -> None:
    """Keep AutoGraph from rewriting CKI's own code, which branches on what is known while a function is traced, and
    from turning errors of CKI's into its own class."""
    try:
        from tensorflow.python.autograph.core import config
        from tensorflow.python.autograph.pyct import error_utils

        config.CONVERSION_RULES = (config.DoNotConvert("cki"), *config.CONVERSION_RULES)
        known = error_utils.KNOWN_STRING_CONSTRUCTOR_ERRORS
        error_utils.KNOWN_STRING_CONSTRUCTOR_ERRORS = (*known, CkiError, *CkiError.__subclasses__())
    except (ImportError, AttributeError):  # then it warns, leaves what it cannot rewrite, and wraps errors
        pass


@functools.cache
def missing() -> str:
    """Why TensorFlow cannot be given operations of CKI's own; empty where it can."""
    try:
        register()
        tf_probe.verify()
        if tf_xla.num_gpus():
            tf_xla.place(0)
    except CkiError as error:
        return str(error)
    return ""


# ---------------------------------------------------------------------------------------------------------------------
# calls


def bind(
    spec: OpSpec, inputs: Sequence[Any], attributes: Sequence[Any], recompute_gradient: bool = False
) -> Any:
    """The operation on TensorFlow's tensors, run now or as part of the graph that is being built.

    inputs: in the order of the spec, None for those left out.  Returns the outputs, then the new values of inputs that
    the operation writes: one tensor, or a tuple of several; NotImplemented for eager tensors that lie elsewhere than
    the current device, or are of types without kernels.
    Raises InvalidArgumentError or InvalidTypeError that names every violated rule, before anything runs.
    """
    given = [
        (item.name, as_tensor_or_variable(tensor))
        for item, tensor in zip(spec.inputs, inputs)
        if tensor is not None
    ]
    if recompute_gradient:
        gradient.expression(spec.name)
    if tf.executing_eagerly():
        results = _run(spec, given, attributes, recompute_gradient)
    else:
        results = _add_node(spec, given, attributes, recompute_gradient)
    if results is NotImplemented or len(results) != 1:
        return results
    return results[0]


def node(spec: OpSpec, names: Sequence[str], attributes: Sequence[Any], recompute_gradient: bool) -> NodeCall:
    """A call on the current device.  names: of the tensors that are given."""
    values = tuple(tuple(value) if isinstance(value, list) else value for value in attributes)
    return NodeCall(known_operations.name_of(spec), tuple(names), values, device_choice(), recompute_gradient)


def device_choice() -> str:
    """The current device as a node's text says it."""
    device = current()
    return f"sim:{device.arch}" if device.kind == "sim" else "cuda"


# Of eager calls: (operation, attributes, names and types, device, gradient) -> text and types of the outputs.
_eager: dict[Any, tuple[bytes, list[int]]] = {}
_EAGER_LIMIT = 4096


def _run(
    spec: OpSpec, given: Sequence[tuple[str, Any]], attributes: Sequence[Any], recompute_gradient: bool
) -> Any:
    from tensorflow.python import pywrap_tfe
    from tensorflow.python.eager import context

    kernels = register()
    choice = device_choice()
    tensors = [tensor for _, tensor in given]
    device = _place_of(tensors, choice)
    if device is None:
        return NotImplemented
    parts: list[Any] = [id(spec), choice, recompute_gradient, tuple(attributes)]
    is_shaped = any(item.written for item in spec.inputs)  # of the shapes of scales depends whether they are
    for name, tensor in given:
        parts += [name, tensor.dtype, tuple(tensor.shape) if is_shaped else None]
    try:
        key = tuple(parts)
        found = _eager.get(key)
    except TypeError:  # an attribute of a wrong type: refused in `_describe`
        found = None
    if found is None:
        described = _describe(spec, given, attributes, recompute_gradient)
        if described is NotImplemented:
            return NotImplemented
        if len(_eager) >= _EAGER_LIMIT:
            _eager.clear()
        found = _eager[key] = described
    text, types = found
    if choice == "cuda":
        tf_xla.place(int(device.rpartition(":")[2]))  # before the kernel asks
    session = context.context()
    session.ensure_initialized()
    name = op_name(spec)
    try:
        if session.device_name == device or (not session.device_name and device == _default_device()):
            results = pywrap_tfe.TFE_Py_FastPathExecute(
                session, name, None, tensors, "Tout", types, "call", text
            )
        else:
            with tf.device(device):
                results = pywrap_tfe.TFE_Py_FastPathExecute(
                    session, name, None, tensors, "Tout", types, "call", text
                )
    except Exception as error:
        raise _own_error(kernels, error) from None
    return tuple(results)


def _own_error(kernels: Kernels, error: Exception) -> Exception:
    """What the kernel raised, where TensorFlow's error is about that."""
    from tensorflow.python.eager import core
    from tensorflow.python.framework import errors

    own: Exception | None = getattr(kernels.failed, "error", None)
    kernels.failed.error = None
    if own is not None and isinstance(own, Exception) and str(own)[:200] in str(error):
        return own
    if isinstance(error, core._NotOkStatusException):
        return core._status_to_exception(error)  # type: ignore[no-any-return]
    return errors.InternalError(None, None, str(error)) if not isinstance(error, Exception) else error


@functools.cache
def _default_device() -> str:
    """Where TensorFlow runs an operation that has kernels for every device."""
    kind = "GPU" if tf.config.list_logical_devices("GPU") else "CPU"
    return f"/job:localhost/replica:0/task:0/device:{kind}:0"


def _place_of(tensors: Sequence[Any], choice: str) -> str | None:
    """The device of all tensors, None where they are of several or of another kind than the current one.

    TensorFlow keeps int32 in host memory, and copies it to the device of the operation.
    """
    device: str | None = None
    for tensor in tensors:
        place = tensor.device
        if device is None or place != device:
            if tensor.dtype == tf.int32 and choice == "cuda":
                continue
            if device is not None:
                return None
            device = place
    if device is None:
        device = tensors[0].device
    wanted = "GPU" if choice == "cuda" else "CPU"
    return device if wanted in device else None


def _describe(
    spec: OpSpec, given: Sequence[tuple[str, Any]], attributes: Sequence[Any], recompute: bool
) -> Any:
    """Text and output types of an eager call, after all its rules were checked."""
    if any(tensor.dtype not in FROM_TF for _, tensor in given):
        return NotImplemented
    own = node(spec, [name for name, _ in given], attributes, recompute)
    call = own.with_tensors(
        [FROM_TF[tensor.dtype].name for _, tensor in given], [tuple(tensor.shape) for _, tensor in given]
    ).checked()
    own = replace(own, attributes=call.attributes)
    return own.text(), [TO_CODE[element] for element, _ in _results(call)]


def _results(call: XlaCall) -> list[tuple[str, tuple[int, ...]]]:
    """Element type and shape of each output, then of the new value of each tensor that the operation writes."""
    results = [(output.dtype.name, tuple(output.shape)) for _, output in call.outputs()]
    return results + [call.tensors[index][1:] for index in call.written()]


# ---------------------------------------------------------------------------------------------------------------------
# graphs


def _add_node(
    spec: OpSpec, given: Sequence[tuple[str, Any]], attributes: Sequence[Any], recompute: bool
) -> tuple[Any, ...]:
    for name, tensor in given:
        if tensor.dtype not in FROM_TF:
            raise InvalidTypeError(
                f"{spec.name}: {name} is of dtype {tensor.dtype.name}, which has no kernels",
                hint=f"one of {', '.join(known.name for known in FROM_TF)}",
            )
        if tensor.shape.rank is None:
            raise InvalidArgumentError(
                f"{spec.name}: {name} is of unknown rank",
                hint=f"tf.ensure_shape({name}, [None, ..., width]), or a tf.TensorSpec with that many axes",
            )
    own = node(spec, [name for name, _ in given], attributes, recompute)
    types = [FROM_TF[tensor.dtype].name for _, tensor in given]
    shapes = [tuple(tensor.shape.as_list()) for _, tensor in given]
    tensors = [tensor for _, tensor in given]
    if tf_xla.is_compiling():
        return _add_xla_call(spec, own, types, shapes, tensors)
    results, values = _shape_rule(own, types, shapes)
    return _add_op(op_name(spec), tensors, results, replace(own, attributes=values).text())


def _add_op(
    name: str, tensors: Sequence[Any], results: Sequence[tuple[str, tuple[int | None, ...]]], text: bytes
) -> tuple[Any, ...]:
    from tensorflow.python.eager import execute
    from tensorflow.python.framework import op_def_library

    types = [TO_CODE[element] for element, _ in results]
    _, _, op, _ = op_def_library._apply_op_helper(name, tensors=list(tensors), Tout=types, call=text)
    for output, (_, shape) in zip(op.outputs, results):
        output.set_shape(shape)
    if execute.must_record_gradient():
        attributes = ("T", op.get_attr("T"), "Tout", op.get_attr("Tout"), "call", text)
        execute.record_gradient(name, list(op.inputs), attributes, list(op.outputs))
    return tuple(op.outputs)


def _shape_rule(
    own: NodeCall, types: Sequence[str], shapes: Sequence[tuple[int | None, ...]]
) -> tuple[list[tuple[str, tuple[int | None, ...]]], tuple[Any, ...]]:
    """Element type and shape (None: a dimension that is not known) of each result, and the checked attributes."""
    if all(extent is not None for shape in shapes for extent in shape):
        call = own.with_tensors(types, shapes).checked()
        return list(_results(call)), call.attributes
    found: list[list[tuple[str, tuple[int, ...]]]] = []
    refusals: list[InvalidArgumentError | InvalidTypeError] = []
    always: set[str] | None = None  # rules broken whatever the unknown sizes are; these are "?"
    values = own.attributes
    known = {extent for shape in shapes for extent in shape if extent}
    for probe in [*_PROBES, *sorted(known - {*_PROBES})][:_MOST_PROBES]:
        filled = [tuple(probe if extent is None else extent for extent in shape) for shape in shapes]
        call = own.with_tensors(types, filled)
        problems: tuple[str, ...] = ()
        try:
            values = call.checked().attributes
        except (InvalidArgumentError, InvalidTypeError) as error:
            refusals.append(error)
            problems = error.problems
        if always is None:
            always = {re.sub(rf"\b{probe}\b", "?", problem) for problem in problems}
        always = {rule for rule in always if any(_is_about(rule, problem) for problem in problems)}
        try:
            found.append(_results(call))
        except Exception:  # the rule may count on what was refused
            continue
    if always:
        raise type(refusals[0])(f"{own.spec.name}: invalid arguments", sorted(always), refusals[0].hint)
    if len(found) < 2 or len({len(results) for results in found}) > 1:
        if refusals:
            raise refusals[0]
        raise InvalidArgumentError(f"{own.spec.name}: the outputs cannot be told from shapes {shapes}")
    return [
        (
            same[0][0],
            tuple(extents[0] if len(set(extents)) == 1 else None for extents in zip(*(s for _, s in same))),
        )
        for same in zip(*found)
    ], values


def _is_about(rule: str, problem: str) -> bool:
    """Whether a problem is a rule with sizes in place of each "?"."""
    return re.fullmatch(re.escape(rule).replace(r"\?", r"\d+"), problem) is not None


def _add_xla_call(
    spec: OpSpec, own: NodeCall, types: Sequence[str], shapes: Sequence[Any], tensors: Sequence[Any]
) -> tuple[Any, ...]:
    if not known_operations.is_public(spec):
        raise UnsupportedError(
            f"{spec.name} cannot be called inside a function with jit_compile=True",
            hint="call it in a tf.function without jit_compile",
        )
    open_names = [name for name, shape in zip(own.inputs, shapes) if None in shape]
    if open_names:
        raise UnsupportedError(
            f"{spec.name}: {', '.join(open_names)} of unknown dimensions inside a function with jit_compile=True",
            [f"{name} has shape {shape}" for name, shape in zip(own.inputs, shapes) if None in shape],
            "XLA compiles for fixed shapes: no None in input_signature and no reduce_retracing, or jit_compile=False, "
            "where any size is taken",
        )
    call = own.with_tensors(types, shapes).checked()
    by_name = dict(zip(own.inputs, tensors))

    def run(*arranged: Any) -> tuple[Any, ...]:
        return tuple(tf_xla.call(call, [tensor for tensor in arranged if tensor is not None]))

    inputs = [by_name.get(item.name) for item in spec.inputs]
    return tuple(gradient_tensorflow.with_gradient(
        spec, inputs, call.attributes, run, recomputes=own.recompute_gradient
    ))  # fmt: skip


# ---------------------------------------------------------------------------------------------------------------------
# gradients


def _gradient(op: Any, *output_gradients: Any) -> list[Any]:
    """TensorFlow's gradient function of every operation."""
    own = NodeCall.from_text(op.get_attr("call"))
    if not own.recompute_gradient:
        raise gradient.refusal(own.spec.name, "tensorflow", _MEANT)
    by_name = dict(zip(own.inputs, op.inputs))
    arranged = [by_name.get(item.name) for item in own.spec.inputs]
    found = gradient_tensorflow.gradients(own.spec, arranged, own.attributes, output_gradients)
    return [value for item, value in zip(own.spec.inputs, found) if item.name in by_name]


def is_eager(tensor: Any) -> bool:
    """Whether a tensor has memory now: an eager tensor or a variable."""
    return isinstance(tensor, (EagerTensor, tf.Variable))
