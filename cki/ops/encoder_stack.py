"""All layers of an encoder as one operation, on weights that have an axis for the layers.

    for n in range(layers):
        x = encoder_layer(x, wq[n], wk[n], ...)
    y = LN(x)                                      if a last norm is given

It is what `cki.Encoder` does between embeddings and pooling, for frameworks in whose graphs an operation has a fixed
number of tensors: one call of theirs launches every kernel, and the layers take turns with one layer's memory.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from cki.device import DeviceInfo
from cki.operand import Operand
from cki.ops.call import call
from cki.ops.encoder import ENCODER_LAYER, as_batch, check_vectors, layer_blocks, validate_sequences
from cki.ops.encoder_blocks import tile_length
from cki.ops.encoder_layers import plan_stack
from cki.ops.linear import Activation, WeightLayout
from cki.ops.norm import plan_layer_norm
from cki.ops.pointwise_rules import check_floats
from cki.ops.spec import Input, OpSpec, OutputSpec, Problem
from cki.plan import Plan

#: Inputs of all layers alike; every other one has an axis for the layers in front.
_SHARED = ("x", "mask", "cu_seqlens", "final_gamma", "final_beta")


def encoder_layers(
    x: Any, wq: Any, wk: Any, wv: Any, wo: Any, w1: Any, w2: Any, *, attention_gamma: Any = None,
    attention_beta: Any = None, output_gamma: Any = None, output_beta: Any = None, bq: Any = None, bk: Any = None,
    bv: Any = None, bo: Any = None, b1: Any = None, b2: Any = None, final_gamma: Any = None, final_beta: Any = None,
    mask: Any = None, num_heads: int, head_dim: int, num_kv_heads: int | None = None, causal: bool = False,
    pre_ln: bool = True, activation: Activation | None = "gelu", epsilon: float = 1e-5, scale: float | None = None,
    weight_layout: WeightLayout = "in_out", cu_seqlens: Any = None, max_seqlen: int | None = None,
    folded: bool = False, out: Any = None, stream: Any = None,
) -> Any:  # fmt: skip
    """`encoder_layer` after `encoder_layer`: a whole transformer encoder, 7 launches a layer, folded 5.

    x, mask, cu_seqlens: as in `encoder_layer`, for all layers.
    Weights, norms and biases: as there, with an axis of the layers in front: wq [layers, hidden, num_heads * head_dim],
        attention_gamma [layers, hidden], ...; 1 to 4096 layers.  wk and wv None: wq holds all three.
    final_gamma, final_beta: [hidden], of a layer norm after the last layer, as pre-LN models have; None (both): none.
    Other arguments: as in `encoder_layer`, for all layers.
    out: where to write the result; apart from the inputs.

    Returns y of x's shape and type.  Temporary memory is that of one layer.
    Raises InvalidArgumentError or InvalidTypeError, before any launch, with every rule that is broken.
    """
    validate_sequences(x, cu_seqlens)
    return call(
        ENCODER_LAYERS,
        (
            x, wq, wk, wv, wo, w1, w2, attention_gamma, attention_beta, output_gamma, output_beta,
            bq, bk, bv, bo, b1, b2, mask, cu_seqlens, final_gamma, final_beta,
        ),
        (
            num_heads, head_dim, num_kv_heads, causal, pre_ln, activation, epsilon, scale, weight_layout,
            tile_length(max_seqlen), folded,
        ),
        (out,), stream,
    )  # fmt: skip


_MAX_LAYERS = 4096


def _stacked(problem: Problem) -> dict[str, Operand]:
    """The tensors that have an axis of layers."""
    return {
        item.name: problem[item.name]
        for item in ENCODER_LAYERS.inputs
        if item.name not in _SHARED and problem.get(item.name) is not None
    }


def _layer(problem: Problem, number: int) -> Problem:
    """One layer's call of `encoder_layer`."""
    operands = {name: problem.get(name) for name in _SHARED}
    for name, stack in _stacked(problem).items():
        step = number * stack.strides[0]
        operands[name] = stack.view(stack.shape[1:], stack.strides[1:], step)
    return Problem(operands, problem.attributes)


def _check(problem: Problem) -> None:
    stacked = _stacked(problem)
    flat = [name for name, operand in stacked.items() if not operand.ndim]
    layers = 0 if flat else stacked["wq"].shape[0]
    for name in flat:
        problem.reject(f"{name} has no axis of layers", f"{name} with an axis of the layers in front")
    for name, operand in stacked.items():
        if not flat and operand.shape[0] != layers:
            problem.reject(
                f"{name} has shape {operand.shape}: {operand.shape[0]} layers, wq has {layers}",
                f"{name} with {layers} as its first extent",
            )
    if not flat and not 1 <= layers <= _MAX_LAYERS:
        problem.reject(f"wq has shape {stacked['wq'].shape}: {layers} layers", f"1 to {_MAX_LAYERS} layers")
    x = problem["x"]
    check_vectors(problem, ("final_gamma", "final_beta"), x.shape[-1] if x.ndim > 1 else -1, x)
    if flat or not layers:
        check_floats(problem, "x")
        return
    layer = _layer(problem, 0)
    ENCODER_LAYER.check(layer)
    for violation in layer.violations:
        problem.reject(f"of a layer: {violation}" if violation.startswith(tuple(stacked)) else violation)
    problem.hints.extend(layer.hints)
    problem.has_wrong_type |= layer.has_wrong_type


def _infer(problem: Problem) -> Mapping[str, OutputSpec]:
    return {"out": OutputSpec(problem["x"].shape, problem["x"].dtype)}


def _plan(problem: Problem, outputs: Mapping[str, Operand], device: DeviceInfo) -> Plan:
    x, y = as_batch(problem["x"]), as_batch(outputs["out"])
    layers = [layer_blocks(_layer(problem, number)) for number in range(problem["wq"].shape[0])]
    plan = plan_stack(x, layers, y, device)
    steps = plan.steps
    gamma, beta = problem.get("final_gamma"), problem.get("final_beta")
    if gamma is not None or beta is not None:
        steps += plan_layer_norm(y, gamma, beta, y, device, eps=problem.attribute("epsilon"))
    return Plan(steps, plan.workspace)


ENCODER_LAYERS: OpSpec = replace(
    ENCODER_LAYER,
    name="encoder_layers",
    inputs=(*ENCODER_LAYER.inputs, Input("final_gamma", True), Input("final_beta", True)),
    check=_check,
    infer=_infer,
    plan=_plan,
)
