"""Gradients of operations in TensorFlow: those of the plain expression (`cki.adapters.gradient`)."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

from cki.adapters import gradient
from cki.adapters.tf_types import as_tensor_or_variable
from cki.ops.spec import OpSpec


class TensorFlowArrays:
    """`cki.adapters.gradient.Arrays` of TensorFlow."""

    matmul = staticmethod(tf.matmul)
    exp = staticmethod(tf.exp)
    log = staticmethod(tf.math.log)
    tanh = staticmethod(tf.tanh)
    erf = staticmethod(tf.math.erf)
    rsqrt = staticmethod(tf.math.rsqrt)
    cos = staticmethod(tf.cos)
    sin = staticmethod(tf.sin)
    sigmoid = staticmethod(tf.sigmoid)
    abs = staticmethod(tf.abs)
    where = staticmethod(tf.where)
    maximum = staticmethod(tf.maximum)
    reshape = staticmethod(tf.reshape)
    transpose = staticmethod(tf.transpose)
    concatenate = staticmethod(functools.partial(tf.concat, axis=-1))
    stack = staticmethod(functools.partial(tf.stack, axis=-1))
    constant = staticmethod(tf.stop_gradient)
    take = staticmethod(tf.gather)
    mean = staticmethod(functools.partial(tf.reduce_mean, axis=-1, keepdims=True))
    sum = staticmethod(functools.partial(tf.reduce_sum, axis=-1, keepdims=True))
    max = staticmethod(functools.partial(tf.reduce_max, axis=-1, keepdims=True))

    @staticmethod
    def shape(x: Any) -> tuple[Any, ...]:
        extents = x.shape.as_list()
        if None not in extents:
            return tuple(extents)
        found = tf.shape(x)
        return tuple(found[axis] if extent is None else extent for axis, extent in enumerate(extents))

    @staticmethod
    def arange(count: Any, like: Any) -> Any:
        return tf.range(count)

    @staticmethod
    def wide(x: Any) -> Any:
        return x if x.dtype == tf.float64 else tf.cast(x, tf.float32)

    @staticmethod
    def widest(x: Any) -> Any:
        return tf.cast(x, tf.float64)

    @staticmethod
    def like(x: Any, other: Any) -> Any:
        return tf.cast(x, other.dtype)

    @staticmethod
    def as_bool(x: Any) -> Any:
        return tf.cast(x, tf.bool)


ARRAYS = TensorFlowArrays()


def gradients(
    spec: OpSpec, inputs: Sequence[Any], attributes: Sequence[Any], given: Sequence[Any]
) -> list[Any]:
    """Gradients of the inputs, eager or symbolic; None for those that are left out or no floats.

    inputs, attributes: in the spec's order.  given: of the outputs that the call has.
    Raises UnsupportedError where the operation has no expression.
    """
    expression = gradient.expression(spec.name)
    named = dict(zip([attribute.name for attribute in spec.attributes], attributes))
    tensors = [None if tensor is None else tf.convert_to_tensor(tensor) for tensor in inputs]
    sources = [tensor for tensor in tensors if tensor is not None and tensor.dtype.is_floating]
    with tf.GradientTape(watch_accessed_variables=False) as tape:
        tape.watch(sources)
        arrays = dict(zip([item.name for item in spec.inputs], tensors))
        outputs = expression(ARRAYS, arrays, named)
    pairs = [(y, g) for y, g in zip(outputs, given) if g is not None]
    found = tape.gradient([y for y, _ in pairs], sources, [g for _, g in pairs])
    dense = (None if g is None else tf.convert_to_tensor(g) for g in found)  # a table's gradient is of slices
    return [next(dense) if tensor is not None and tensor.dtype.is_floating else None for tensor in tensors]


#: What to do where no gradient is meant.
MEANT = "tf.stop_gradient on the arguments says that none is meant"


def is_recorded(variables: Sequence[Any]) -> bool:
    """Whether a tape would have gradients of these trainable variables, had TensorFlow read them now."""
    from tensorflow.python import pywrap_tfe
    from tensorflow.python.eager import record, tape

    if not record.could_possibly_record():
        return False
    plain = [as_tensor_or_variable(variable) for variable in variables]
    for variable in plain:
        tape.variable_accessed(variable)
    return bool(pywrap_tfe.TFE_Py_TapeSetShouldRecordBackprop([variable.handle for variable in plain]))


def _is_saving() -> bool:
    """Whether TensorFlow traces gradients because it saves a model, as it does those of `tf.custom_gradient`."""
    try:
        from tensorflow.python.saved_model import save_context

        return bool(save_context.in_save_context())
    except (ImportError, AttributeError):
        return False


def _refused_when_run(spec: OpSpec, refusal: Exception, tensors: Sequence[Any]) -> list[Any]:
    """Gradients that are saved with a model: a node that cannot run, and says why by its text.

    XLA, which would leave out an assertion, compiles no program with it, and says its name.
    """
    from tensorflow.python.framework import op_def_library

    from cki.adapters import tf_node, tf_ops

    floats = [tensor for tensor in tensors if tensor.dtype.is_floating]
    _, _, op, _ = op_def_library._apply_op_helper(
        tf_ops.LOCAL, name=f"{spec.name}_has_no_gradient", tensors=floats, Tout=[tensor.dtype for tensor in floats],
        call=tf_node.refusal_text(str(refusal)),
    )  # fmt: skip
    for output, tensor in zip(op.outputs, floats):
        output.set_shape(tensor.shape)
    found = iter(op.outputs)
    return [next(found) if tensor.dtype.is_floating else None for tensor in tensors]


def with_gradient(
    spec: OpSpec,
    inputs: Sequence[Any],
    attributes: Sequence[Any],
    run: Callable[..., Any],
    *,
    recomputes: bool,
) -> Any:
    """`run(*inputs)` with the gradient of the expression, or with one that says by name that there is none.

    inputs: in the spec's order, None for those left out.  run: returns one tensor or a tuple.
    """
    if recomputes:
        gradient.expression(spec.name)
    present = [index for index, tensor in enumerate(inputs) if tensor is not None]

    @tf.custom_gradient  # type: ignore[untyped-decorator]
    def call(*tensors: Any) -> Any:
        arguments: list[Any] = [None] * len(inputs)
        for index, tensor in zip(present, tensors):
            arguments[index] = tensor

        def differentiate(*given: Any, variables: Any = None) -> Any:
            if not recomputes:
                refusal = gradient.refusal(spec.name, "tensorflow", MEANT)
                if not _is_saving():
                    raise refusal
                return _refused_when_run(spec, refusal, tensors)
            found = gradients(spec, arguments, attributes, given)
            kept = [found[index] for index in present]
            return kept if variables is None else (kept, [None] * len(variables))

        return run(*arguments), differentiate

    return call(*[tf.convert_to_tensor(inputs[index]) for index in present])
