"""CKI's operations as operations of TensorFlow's: `CkiLayerNorm` and the rest, made from the table, and calls of them.

All take a list of tensors (those that are given, in the order of the OpSpec) and a text that says the rest
(`cki.adapters.tf_node`).  Registration needs no compiler and no device; importing cki does it (`tf_import`), so that
saved models that hold such nodes load.

Calls in eager mode are in `tf_eager`, those while TensorFlow builds a graph in `tf_graph`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from cki.adapters import gradient, gradient_tensorflow, known_operations, tf_c_api, tf_probe, tf_xla
from cki.adapters.once import once
from cki.adapters.tf_kernels import Kernels
from cki.adapters.tf_node import NodeCall
from cki.adapters.tf_types import EagerTensor
from cki.adapters.xla_calls import XlaCall
from cki.device import current
from cki.errors import CkiError
from cki.ops.spec import OpSpec
from cki.ops.table import public_specs

#: The operation that runs what is not in the table: kernels of `cki.load`.
LOCAL = "CkiLocal"


def op_name(spec: OpSpec) -> str:
    """The name of an operation among TensorFlow's: layer_norm is CkiLayerNorm."""
    if not known_operations.is_public(spec):
        return LOCAL
    return "Cki" + "".join(part.capitalize() for part in spec.name.split("_"))


@once  # type: ignore[untyped-decorator]
def register() -> Kernels:
    """Register all operations and their kernels, once.  UnsupportedError says what this TensorFlow lacks."""
    from tensorflow.python.framework import ops

    api = tf_c_api.load()
    kernels = Kernels(api, tf_xla.place)
    for name in [*(op_name(spec) for spec in public_specs().values()), LOCAL]:
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


@once  # type: ignore[untyped-decorator]
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
# what calls of either kind need


def node(spec: OpSpec, names: Sequence[str], attributes: Sequence[Any], recompute_gradient: bool) -> NodeCall:
    """A call on the current device.  names: of the tensors that are given."""
    if recompute_gradient:
        gradient.expression(spec.name)
    device = current()
    choice = f"sim:{device.arch}" if device.kind == "sim" else "cuda"
    values = tuple(tuple(value) if isinstance(value, list) else value for value in attributes)
    return NodeCall(known_operations.name_of(spec), tuple(names), values, choice, recompute_gradient)


def results_of(call: XlaCall) -> list[tuple[str, tuple[int, ...]]]:
    """Element type and shape of each output, then of the new value of each tensor that the operation writes."""
    results = [(output.dtype.name, tuple(output.shape)) for _, output in call.outputs()]
    return results + [call.tensors[index][1:] for index in call.written()]


def is_eager(tensor: Any) -> bool:
    """Whether a tensor has memory now: an eager tensor or a variable."""
    return isinstance(tensor, (EagerTensor, tf.Variable))


# ---------------------------------------------------------------------------------------------------------------------
# gradients


def _gradient(op: Any, *output_gradients: Any) -> list[Any]:
    """TensorFlow's gradient function of every operation."""
    own = NodeCall.from_text(op.get_attr("call"))
    if not own.recompute_gradient:
        raise gradient.refusal(own.spec.name, "tensorflow", gradient_tensorflow.MEANT)
    by_name = dict(zip(own.inputs, op.inputs))
    arranged = [by_name.get(item.name) for item in own.spec.inputs]
    found = gradient_tensorflow.gradients(own.spec, arranged, own.attributes, output_gradients)
    return [value for item, value in zip(own.spec.inputs, found) if item.name in by_name]
