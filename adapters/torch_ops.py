"""PyTorch operators `torch.ops.cki.*`, one for each public operation: what torch.compile and torch.export see.

Each operator is made from the operation's OpSpec: inputs and attributes give the schema, `infer` gives the outputs of
fake tensors, and on real tensors it makes the same call as the public function, which tracing replaces by it
(`traced_call`).

An operator always returns all outputs that the operation can have, as a schema has a fixed number; one that a call does
not have (the lse where it was not asked for) is an empty bool tensor, a dtype that no output has.
"""

from __future__ import annotations

import contextlib
import string
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.autograd import forward_ad

from cki import dtypes, own_operation
from cki.adapter import adapter_of
from cki.adapters.torch import _FROM_TORCH, _TO_TORCH, TracedAdapter, has_tangent
from cki.errors import InvalidTypeError, UnsupportedError
from cki.operand import Operand
from cki.ops.bind import attribute_values
from cki.ops.call import PlanRequest, call
from cki.ops.spec import Attribute, Input, OpSpec, Problem
from cki.ops.table import public_specs
from cki.ops.validate import readers

_KINDS = {bool: "bool", int: "int", float: "float", str: "str", tuple: "int[]"}
# A number that stands for "required" in the encoder's operations.
_REQUIRED = -(2**31)


def schema(spec: OpSpec) -> str:
    """The operator's schema: tensors by position or name, attributes by name."""
    inputs = [
        _input_schema(item, spec.inputs[index + 1 :], string.ascii_lowercase[index % 26])
        for index, item in enumerate(spec.inputs)
    ]
    attributes = [_attribute_schema(attribute) for attribute in spec.attributes]
    outputs = ", ".join("Tensor" for _ in spec.outputs)
    arguments = ", ".join([*inputs, "*", *attributes] if attributes else inputs)
    return f"{spec.name}({arguments}) -> {outputs if len(spec.outputs) == 1 else f'({outputs})'}"


def _input_schema(item: Input, later: Sequence[Input], alias: str) -> str:
    # Of what is written where it has so many axes, a schema can only say that it may be.
    kind = f"Tensor({alias}!)" if item.written or item.written_axes is not None else "Tensor"
    if not item.optional:
        return f"{kind} {item.name}"
    # In a schema, as in Python, nothing without a default follows a default.
    default = "=None" if all(other.optional for other in later) else ""
    return f"{kind}? {item.name}{default}"


def _attribute_schema(attribute: Attribute) -> str:
    kind, default = _KINDS[attribute.type], attribute.default
    if default is None:
        return f"{kind}? {attribute.name}=None"
    if default == _REQUIRED and attribute.type is int:
        return f"{kind} {attribute.name}"
    if attribute.type is str:
        return f'{kind} {attribute.name}="{default}"'
    shown = list(default) if attribute.type is tuple else default
    return f"{kind} {attribute.name}={shown}"


def _arguments(
    spec: OpSpec, args: Sequence[Any], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
    """Inputs and attributes in the spec's order: the dispatcher leaves out what has its default."""
    given = len(args)
    inputs = (*args, *(kwargs.get(item.name) for item in spec.inputs[given:]))
    values = [kwargs.get(attribute.name, attribute.default) for attribute in spec.attributes]
    return inputs, tuple(tuple(value) if isinstance(value, list) else value for value in values)


def _absent(like: torch.Tensor) -> torch.Tensor:
    return torch.empty(0, dtype=torch.bool, device=like.device)


def _run(spec: OpSpec) -> Callable[..., Any]:
    """The operator on real tensors."""

    def run(*args: Any, **kwargs: Any) -> Any:
        inputs, attributes = _arguments(spec, args, kwargs)
        results = call(spec, inputs, attributes)
        results = list(results) if isinstance(results, tuple) else [results]
        results += [_absent(inputs[0]) for _ in spec.outputs[len(results) :]]
        return results[0] if len(results) == 1 else tuple(results)

    return run


def _fake(spec: OpSpec) -> Callable[..., Any]:
    """The operator on tensors without data; sizes may be symbols."""
    from torch.fx.experimental.symbolic_shapes import GuardOnDataDependentSymNode

    def fake(*args: Any, **kwargs: Any) -> Any:
        inputs, attributes = _arguments(spec, args, kwargs)
        values, wrong_types, wrong_values = attribute_values(spec, attributes)
        operands = {item.name: _operand(item.name, t) for item, t in zip(spec.inputs, inputs)}
        problem = Problem(operands, values, wrong_types + wrong_values, has_wrong_type=bool(wrong_types))
        # A size may be known only when the operator runs, which checks again.
        with contextlib.suppress(GuardOnDataDependentSymNode):
            spec.check(problem)
        if problem.violations:
            raise problem.refusal(f"{spec.name}: invalid arguments")
        results = [
            inputs[0].new_empty(output.shape, dtype=_TO_TORCH[output.dtype.name])
            for output in spec.infer(problem).values()
        ]
        results += [_absent(inputs[0]) for _ in spec.outputs[len(results) :]]
        return results[0] if len(results) == 1 else tuple(results)

    return fake


def _operand(name: str, tensor: torch.Tensor | None) -> Operand | None:
    if tensor is None:
        return None
    if tensor.dtype not in _FROM_TORCH:
        raise InvalidTypeError(
            f"{name} is of dtype {tensor.dtype}, which has no kernels", hint=dtypes.usual_names()
        )
    return Operand(name, tuple(tensor.shape), tuple(tensor.stride()), _FROM_TORCH[tensor.dtype])


def _refuse_gradients(spec: OpSpec, operator: Callable[..., Any]) -> Callable[..., Any]:
    """The operator at autograd's place in the dispatcher: an error where it would have to record a gradient."""

    def below(*args: Any, **kwargs: Any) -> Any:
        if torch.is_grad_enabled():
            inputs, _ = _arguments(spec, args, kwargs)
            names = [item.name for item, t in zip(spec.inputs, inputs) if t is not None and t.requires_grad]
            if names:
                raise InvalidTypeError(
                    f"{spec.name}: unusable tensors",
                    [
                        f"{name} requires grad and gradients are being recorded, which CKI cannot do"
                        for name in names
                    ],
                    f"call under torch.no_grad() or torch.inference_mode(), or pass {names[0]}.detach()",
                )
        tangents = forward_ad._current_level >= 0
        for item, tensor in zip(spec.inputs, _arguments(spec, args, kwargs)[0] if tangents else ()):
            if tensor is not None and has_tangent(tensor):
                raise InvalidTypeError(
                    f"{spec.name}: unusable tensors", adapter_of(tensor).check(tensor, item.name)
                )
        with torch._C._AutoDispatchBelowAutograd():
            return operator(*args, **kwargs)

    return below


def _register() -> tuple[torch.library.Library, dict[str, Any]]:
    """The operators of namespace `cki`.  The library must be kept: they vanish with it."""
    library = torch.library.Library("cki", "DEF")
    return library, {name: _define(library, spec) for name, spec in public_specs().items()}


def _define(library: torch.library.Library, spec: OpSpec) -> Any:
    name = spec.name
    library.define(schema(spec), tags=(torch.Tag.pt2_compliant_tag,))
    for key in ("CPU", "CUDA"):
        library.impl(name, _run(spec), key)
    torch.library.register_fake(f"cki::{name}", _fake(spec), lib=library)
    operator = getattr(torch.ops.cki, name).default
    library.impl(name, _refuse_gradients(spec, operator), "Autograd")
    return operator


_LIBRARY, OPERATORS = _register()


def add(spec: OpSpec) -> None:
    """Make an operator of a user's operation, whose name no other has."""
    OPERATORS[spec.name] = _define(_LIBRARY, spec)


for _spec in own_operation.made:
    add(_spec)


def run_operator(
    operator: Callable[..., Any], spec: OpSpec, inputs: tuple[Any, ...], attributes: tuple[Any, ...]
) -> list[Any]:
    """The outputs that this call has."""
    named = dict(zip([attribute.name for attribute in spec.attributes], attributes))
    found = operator(*inputs, **named)
    found = [found] if len(spec.outputs) == 1 else found
    return [result for result in found if result.dtype != torch.bool]


def _call_outside_graphs(spec: OpSpec, inputs: Any, attributes: Any, outs: Any, stream: Any) -> Any:
    if any(isinstance(adapter_of(t), TracedAdapter) for t in inputs if t is not None):
        raise UnsupportedError(f"{spec.name}: {_OUTSIDE}")
    return call(spec, inputs, attributes, outs, stream)


_OUTSIDE = (
    "a call with stream=, of cki.Encoder, or without tensors of torch, or one whose out= is of another shape or dtype, "
    "cannot be part of a traced program"
)
# torch.compile ends its graph here and makes the call between two graphs, or says why where it may not.
_outside_graphs = torch.compiler.disable(_call_outside_graphs, reason=_OUTSIDE)


def _call(validate: Callable[..., None], *args: Any, **kwargs: Any) -> None:
    validate(*args, **kwargs)


# The same for what CKI_VALIDATE=1 looks at.
validate_outside_graphs = torch.compiler.disable(
    _call, reason="CKI_VALIDATE=1 reads values, which a program has only when it runs"
)


def _leave_alone(function: Callable[..., Any]) -> None:
    """Where a trace ends at an operation's call, Python makes it: torch.compile is to look for no graphs in there.

    No public interface (`torch.compiler.disable` makes another function, which the public ones do not call).
    """
    with contextlib.suppress(AttributeError, TypeError):
        frames = torch._C._dynamo.eval_frame
        skip = frames._FrameAction.SKIP
        frames.set_code_exec_strategy(function.__code__, frames._FrameExecStrategy(skip, skip))


for _function in (call, *readers):
    _leave_alone(_function)


# Of what writes into its inputs (`append_kv`): for each output the input that it may be written over, and so is like.
# By that it learns before it writes whether its result fits.  None where there is none.
_LIKE = {
    spec.name: tuple(
        next((index for index, item in enumerate(spec.inputs) if (name, item.name) in spec.in_place), None)
        for name in spec.outputs
    )
    for spec in public_specs().values()
    if any(item.written for item in spec.inputs)
}


def _fits(out: Any, result: torch.Tensor) -> bool:
    """A copy would convert and broadcast."""
    return isinstance(out, torch.Tensor) and out.shape == result.shape and out.dtype == result.dtype


def traced_call(
    spec: OpSpec,
    inputs: tuple[Any, ...],
    attributes: tuple[Any, ...],
    outs: tuple[Any, ...] = (),
    stream: Any = None,
) -> Any:
    """`cki.ops.call.call` while torch traces: the operator, and copies into the caller's `out=` tensors.

    Traced by torch.compile itself, so plain in what it does.
    """
    operators = OPERATORS
    if stream.__class__ is PlanRequest:  # of a function called with recompute_gradient=True
        from cki.adapters.gradient_torch import OPERATORS as WITH_GRADIENTS

        operators, stream = WITH_GRADIENTS, None
    if stream is not None or spec.name not in operators or not isinstance(inputs[0], torch.Tensor):
        return _outside_graphs(spec, inputs, attributes, outs, stream)
    for out, index in zip(outs, _LIKE.get(spec.name, ())):
        if out is not None and index is not None and (inputs[index] is None or not _fits(out, inputs[index])):
            return _outside_graphs(spec, inputs, attributes, outs, stream)
    results = run_operator(operators[spec.name], spec, inputs, attributes)
    for index, out in enumerate(outs):
        if out is not None and not (index < len(results) and _fits(out, results[index])):
            return _outside_graphs(
                spec, inputs, attributes, outs, stream
            )  # refused there, in the eager call's words
    for index, out in enumerate(outs):
        if out is not None:
            out.copy_(results[index])
            results[index] = out
    return results[0] if len(results) == 1 else tuple(results)
