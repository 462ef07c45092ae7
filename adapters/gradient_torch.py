"""Gradients of operations in PyTorch: operators `torch.ops.cki_recompute.<name>`, whose backward pass differentiates
the plain expression (`cki.adapters.gradient`).

Each is the operator of the same name in `torch.ops.cki`, with a gradient registered.  So `torch.compile` traces both
passes, and nothing but the inputs is kept between them.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch

from cki.adapters import gradient
from cki.adapters.torch import has_tangent
from cki.adapters.torch_ops import _fake, _run, run_operator, schema
from cki.errors import UnsupportedError
from cki.ops.call import Planned, PlanRequest, common_adapter_of
from cki.ops.spec import OpSpec
from cki.ops.table import public_specs


class TorchArrays(gradient.CommonArrays):  # type: ignore[misc]
    """`cki.adapters.gradient.Arrays` of PyTorch."""

    matmul = staticmethod(torch.matmul)
    exp = staticmethod(torch.exp)
    log = staticmethod(torch.log)
    tanh = staticmethod(torch.tanh)
    erf = staticmethod(torch.erf)
    rsqrt = staticmethod(torch.rsqrt)
    cos = staticmethod(torch.cos)
    sin = staticmethod(torch.sin)
    sigmoid = staticmethod(torch.sigmoid)
    abs = staticmethod(torch.abs)
    where = staticmethod(torch.where)
    maximum = staticmethod(torch.maximum)
    reshape = staticmethod(torch.reshape)
    transpose = staticmethod(torch.permute)
    concatenate = staticmethod(functools.partial(torch.cat, dim=-1))
    stack = staticmethod(functools.partial(torch.stack, dim=-1))
    constant = staticmethod(torch.Tensor.detach)

    @staticmethod
    def mean(x: Any) -> Any:
        return x.mean(-1, keepdim=True)

    @staticmethod
    def sum(x: Any) -> Any:
        return x.sum(-1, keepdim=True)

    @staticmethod
    def max(x: Any) -> Any:
        return x.amax(-1, keepdim=True)

    @staticmethod
    def arange(count: Any, like: Any) -> Any:
        return torch.arange(count, device=like.device)

    @staticmethod
    def wide(x: Any) -> Any:
        return x if x.dtype == torch.float64 else x.float()

    @staticmethod
    def widest(x: Any) -> Any:
        return x.double()

    @staticmethod
    def like(x: Any, other: Any) -> Any:
        return x.to(other.dtype)


ARRAYS = TorchArrays()


def _gradients(
    spec: OpSpec,
    inputs: Sequence[Any],
    attributes: dict[str, Any],
    needed: Sequence[bool],
    given: Sequence[Any],
) -> list[Any]:
    """Gradients of the needed inputs, None for others.  given: of the outputs, None where nothing depends on one."""
    # Where the gradient is itself differentiated, it depends on the inputs as they are; else on copies of their own.
    is_recorded = torch.is_grad_enabled()
    with torch.enable_grad():
        variables = [
            tensor
            if tensor is None or not is_needed
            else tensor.view_as(tensor)
            if is_recorded and tensor.requires_grad
            else tensor.detach().requires_grad_()
            for tensor, is_needed in zip(inputs, needed)
        ]
        named = {item.name: tensor for item, tensor in zip(spec.inputs, variables)}
        outputs = gradient.expression(spec.name)(ARRAYS, named, attributes)
        pairs = [(y, g) for y, g in zip(outputs, given) if g is not None and y.requires_grad]
        wanted = [tensor for tensor, is_needed in zip(variables, needed) if is_needed]
        found = iter(
            torch.autograd.grad(
                [y for y, _ in pairs],
                wanted,
                [g for _, g in pairs],
                create_graph=is_recorded,
                allow_unused=True,
            )
        )
    return [next(found) if is_needed else None for is_needed in needed]


def _register(library: torch.library.Library, spec: OpSpec) -> Any:
    name = f"cki_recompute::{spec.name}"
    library.define(schema(spec), tags=(torch.Tag.pt2_compliant_tag,))
    for key in ("CPU", "CUDA"):
        library.impl(spec.name, _run(spec), key)
    torch.library.register_fake(name, _fake(spec), lib=library)

    def setup_context(ctx: Any, inputs: Any, keyword_only_inputs: Any, output: Any) -> None:
        ctx.save_for_backward(*inputs)
        ctx.attributes = {
            key: tuple(value) if isinstance(value, list) else value
            for key, value in keyword_only_inputs.items()
        }
        ctx.set_materialize_grads(False)

    def backward(ctx: Any, *given: Any) -> Any:
        inputs = ctx.saved_tensors
        # The dispatcher leaves out the last arguments where they have their default.
        asked = [*ctx.needs_input_grad, *[False] * len(inputs)]
        needed = [
            is_needed and tensor is not None and tensor.is_floating_point()
            for is_needed, tensor in zip(asked, inputs)
        ]
        return tuple(_gradients(spec, inputs, ctx.attributes, needed, given))

    torch.library.register_autograd(name, backward, setup_context=setup_context, lib=library)
    return getattr(torch.ops.cki_recompute, spec.name).default


def _register_all() -> tuple[torch.library.Library, dict[str, Any]]:
    """The library must be kept: its operators vanish with it."""
    library = torch.library.Library("cki_recompute", "DEF")
    names = gradient.names()
    return library, {name: _register(library, spec) for name, spec in public_specs().items() if name in names}


_LIBRARY, OPERATORS = _register_all()


def call_recomputed(
    name: str, public: Callable[..., Any], args: Sequence[Any], kwargs: dict[str, Any]
) -> Any:
    """The public function's call by the operator with a gradient; traced by torch.compile itself."""
    gradient.expression(name)
    if kwargs.get("stream") is not None:
        raise UnsupportedError(
            f"{name}: stream is given beside recompute_gradient=True",
            hint="torch's current stream, no stream=",
        )
    kwargs = {**kwargs, "stream": _REQUEST}
    try:
        return public(*args, **kwargs)  # in traced code: see traced_call
    except Planned as planned:
        found = planned
    if any(out is not None for out in found.outs):
        raise UnsupportedError(
            f"{name}: an output tensor is given beside recompute_gradient=True", hint="use what is returned"
        )
    common_adapter_of(found.spec, found.inputs, found.outs)  # names what is no tensor of torch
    if any(tensor is not None and has_tangent(tensor) for tensor in found.inputs):
        raise _forward_mode(found.spec)  # which torch would drop: the result's tangent would be 0
    operator = OPERATORS[name]
    if torch._C._functorch.maybe_current_level() is not None:  # torch.func, whose transforms ask for more
        operator = functools.partial(_transformed, found.spec)
    results = run_operator(operator, found.spec, found.inputs, found.attributes)
    return results[0] if len(results) == 1 else tuple(results)


class _Transformed(torch.autograd.Function):  # type: ignore[misc]
    """The operator inside a transform of torch.func, for which what `register_autograd` makes is too little.

    apply(spec, attributes by name, *inputs): all outputs.
    """

    @staticmethod
    def forward(spec: OpSpec, attributes: dict[str, Any], *inputs: Any) -> Any:
        found = OPERATORS[spec.name](*inputs, **attributes)
        return found if isinstance(found, tuple) else (found,)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.spec, ctx.attributes, *tensors = inputs
        ctx.save_for_backward(*tensors)
        ctx.mark_non_differentiable(*(tensor for tensor in output if not tensor.is_floating_point()))
        ctx.set_materialize_grads(False)

    @staticmethod
    def backward(ctx: Any, *given: Any) -> Any:
        # What `torch.func.vjp` returns runs when its level has ended, of which nothing can be recorded any more.
        inputs = [t if t is None else torch._C._functorch.unwrap_if_dead(t) for t in ctx.saved_tensors]
        return None, None, *_gradients(ctx.spec, inputs, ctx.attributes, ctx.needs_input_grad[2:], given)

    @staticmethod
    def jvp(ctx: Any, *tangents: Any) -> Any:
        raise _forward_mode(ctx.spec)

    @staticmethod
    def vmap(info: Any, in_dims: Any, spec: OpSpec, attributes: dict[str, Any], *inputs: Any) -> Any:
        """One call for each element: what torch does with operators that have no rule of their own."""
        calls = [
            _Transformed.apply(
                spec, attributes,
                *(t if axis is None else t.select(axis, i) for t, axis in zip(inputs, in_dims[2:])),
            )
            for i in range(info.batch_size)
        ]  # fmt: skip
        outputs = tuple(torch.stack(parts) for parts in zip(*calls))
        return outputs, (0,) * len(outputs)


def _transformed(spec: OpSpec, *inputs: Any, **attributes: Any) -> Any:
    outputs = _Transformed.apply(spec, attributes, *inputs)
    return outputs[0] if len(outputs) == 1 else outputs


def _forward_mode(spec: OpSpec) -> UnsupportedError:
    return UnsupportedError(
        f"{spec.name}: forward-mode differentiation (torch.func.jvp) beside recompute_gradient=True",
        hint="reverse mode: torch.func.grad, torch.func.vjp, backward()",
    )


_REQUEST = PlanRequest()
