"""CKI's operations while TensorFlow builds a graph: nodes whose output shapes come from the operation's own shape rule.

Where dimensions are not known the rule is evaluated for several sizes of them; what differs is not known of the outputs
either.  A rule of the operation that every one of these sizes breaks is refused at once, the others when the node runs.
Inside a function with jit_compile=True the call is XLA's (`cki.adapters.tf_xla`).
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from cki import dtypes
from cki.adapters import gradient_tensorflow, tf_xla
from cki.adapters.tf_node import NodeCall
from cki.adapters.tf_ops import node, op_name, results_of
from cki.adapters.tf_types import FROM_TF, TO_CODE, as_tensor_or_variable
from cki.adapters.tf_xla import Tensor
from cki.errors import InvalidArgumentError, InvalidTypeError, UnsupportedError
from cki.ops.bind import attribute_values
from cki.ops.spec import OpSpec

#: What a violation is about: "weight has shape (95,)" of "weight has shape (95,), x has shape (?, 96)".
_SUBJECT = re.compile(r"(?:[^,(]|\([^)]*\))*")
#: Sizes that stand for an unknown dimension, beside those that the known ones have: odd ones, to be told from these.
_PROBES = (1072, 2096, 1)
_MOST_PROBES = 12


def add_node(
    spec: OpSpec, inputs: Sequence[Any], attributes: Sequence[Any], recompute_gradient: bool
) -> tuple[Any, ...]:
    """The call as a node of the graph that is being built.

    inputs: in the order of the spec, None for those left out.  Returns the outputs, then the new values of inputs that
    the operation writes.  Raises InvalidArgumentError or InvalidTypeError with what is wrong whatever the unknown
    dimensions are.
    """
    given = [
        (item.name, as_tensor_or_variable(tensor))
        for item, tensor in zip(spec.inputs, inputs)
        if tensor is not None
    ]
    for name, tensor in given:
        if tensor.dtype not in FROM_TF:
            raise InvalidTypeError(
                f"{spec.name}: {name} is of dtype {tensor.dtype.name}, which has no kernels",
                hint=dtypes.usual_names(),
            )
        if tensor.shape.rank is None:
            raise InvalidArgumentError(
                f"{spec.name}: {name} is of unknown rank",
                hint=f"tf.ensure_shape({name}, [None, ..., width]), or a tf.TensorSpec with that many axes",
            )
    own = node(spec, [name for name, _ in given], attributes, recompute_gradient)
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
        return list(results_of(call)), call.attributes
    found: list[list[tuple[str, tuple[int, ...]]]] = []
    refusals: list[InvalidArgumentError | InvalidTypeError] = []
    always: set[str] | None = None  # rules broken whatever the unknown sizes are; these are "?"
    values, _, _ = attribute_values(own.spec, own.attributes)
    known = {extent for shape in shapes for extent in shape if extent}
    for probe in [*_PROBES, *sorted(known - {*_PROBES})][:_MOST_PROBES]:
        filled = [tuple(probe if extent is None else extent for extent in shape) for shape in shapes]
        call = own.with_tensors(types, filled)
        problems: tuple[str, ...] = ()
        try:
            call.checked()
        except (InvalidArgumentError, InvalidTypeError) as error:
            refusals.append(error)
            problems = error.problems
        if always is None:
            rules = {re.sub(rf"\b{probe}\b", "?", problem) for problem in problems}
            always = {rule for rule in rules if "?" not in _SUBJECT.match(rule)[0]}  # type: ignore[index]
        always = {rule for rule in always if any(_is_about(rule, problem) for problem in problems)}
        try:
            found.append(results_of(call))
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
    ], tuple(values.values())


def _is_about(rule: str, problem: str) -> bool:
    """Whether a problem is a rule with sizes in place of each "?"."""
    return re.fullmatch(re.escape(rule).replace(r"\?", r"\d+"), problem) is not None


def _add_xla_call(
    spec: OpSpec, own: NodeCall, types: Sequence[str], shapes: Sequence[Any], tensors: Sequence[Any]
) -> tuple[Any, ...]:
    by_name = dict(zip(own.inputs, tensors))
    if any(None in shape for shape in shapes):
        _, values = _shape_rule(own, types, shapes)  # refuses what no size can keep
        own = replace(own, attributes=values)
        results, written = _open_results(own, types, shapes)
        arguments = list(zip(types, shapes))

        def compiled(given: list[Any]) -> Sequence[Any]:
            found: Sequence[Any] = tf_xla.call_open(own, arguments, results, written, given)
            return found
    else:
        call = own.with_tensors(types, shapes).checked()
        own = replace(own, attributes=call.attributes)

        def compiled(given: list[Any]) -> Sequence[Any]:
            found: Sequence[Any] = tf_xla.call(call, given)
            return found

    def run(*arranged: Any) -> tuple[Any, ...]:
        return tuple(compiled([tensor for tensor in arranged if tensor is not None]))

    inputs = [by_name.get(item.name) for item in spec.inputs]
    return tuple(gradient_tensorflow.with_gradient(
        spec, inputs, own.attributes, run, recomputes=own.recompute_gradient
    ))  # fmt: skip


def _open_results(
    own: NodeCall, types: Sequence[str], shapes: Sequence[tuple[int | None, ...]]
) -> tuple[list[Tensor], tuple[int, ...]]:
    """Element type and dimensions of each result, and the arguments that the last ones are the new values of.

    A dimension that is not known is that of an argument; UnsupportedError where it is none.
    """
    filled, found, written = [], [], ()
    for first, step in ((1072, 16), (4000, 48)):  # each unknown dimension gets a size of its own, twice
        sizes = itertools.count(first, step)
        filled.append([tuple(next(sizes) if e is None else e for e in shape) for shape in shapes])
        call = own.with_tensors(types, filled[-1])
        found.append(results_of(call))
        written = call.written()
    places = {
        (filled[0][position][axis], filled[1][position][axis]): (position, axis)
        for position, shape in enumerate(shapes)
        for axis, extent in enumerate(shape)
        if extent is None
    }
    results: list[Tensor] = []
    for (element, one), (_, other) in zip(*found):
        extents = [a if a == b else places.get((a, b)) for a, b in zip(one, other)]
        if None in extents:
            raise UnsupportedError(
                f"{own.spec.name}: sizes of its outputs follow from unknown ones of its inputs, but are none of them, "
                "which XLA cannot be told",
                [f"{name} has shape {shape}" for name, shape in zip(own.inputs, shapes) if None in shape],
                "known sizes, or jit_compile=False, where any size is taken",
            )
        results.append((element, extents))
    return results, written
