"""The feed-forward block of a transformer as one operation: two products with an activation between, norm and residual.

The first product's launch applies bias and activation, the second's bias and residual; a norm is a launch of its own
(`encoder_layer` with weights of `cki.prepare` has it inside the products).  Gated blocks: `gated_linear` and `linear`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from cki.device import DeviceInfo
from cki.heuristics.linear import ACTIVATIONS
from cki.operand import Operand, dense
from cki.ops.call import call
from cki.ops.encoder import check_vectors
from cki.ops.linear import Activation, WeightLayout, check_linear, check_type_and_layout, plan_linear
from cki.ops.norm import plan_layer_norm
from cki.ops.spec import Attribute, Input, OpSpec, OutputSpec, Problem
from cki.plan import Plan, Step


def fused_ffn(
    x: Any, w1: Any, w2: Any, gamma: Any = None, beta: Any = None, b1: Any = None, b2: Any = None, *,
    activation: Activation | None = "gelu", pre_ln: bool = True, residual: bool = True, epsilon: float = 1e-5,
    weight_layout: WeightLayout = "in_out", out: Any = None, stream: Any = None,
) -> Any:  # fmt: skip
    """The feed-forward block of a transformer, with F(u) = activation(u w1 + b1) w2 + b2:

        pre_ln=True     y = F(LN(x)) + x        (GPT-2, ViT)
        pre_ln=False    y = LN(F(x) + x)        (BERT)

    residual=False leaves out "+ x".  Without a norm it is two calls of `linear`.

    x: [..., hidden], f32, f16 or bf16, any strides.
    w1: [hidden, inner].  w2: [inner, hidden].  Of x's type, any strides; for weight_layout "out_in" the two axes change
        places, as torch's `nn.Linear` stores them.
    gamma, beta: [hidden], weight and bias of the norm; None is 1 and 0.  b1: [inner].  b2: [hidden].  f32 or x's type.
    activation: None, "gelu", "gelu_tanh", "silu" or "relu": see `linear`.  epsilon: added to the norm's variance.
    out: where to write y; apart from the inputs.

    Returns y of x's shape and type.  What lies between the steps has x's type.
    Raises InvalidArgumentError or InvalidTypeError, before any launch, with every rule that is broken.
    """
    attributes = (activation, pre_ln, residual, epsilon, weight_layout)
    return call(FUSED_FFN, (x, w1, w2, gamma, beta, b1, b2), attributes, (out,), stream)


def _check(problem: Problem) -> None:
    x, w1 = problem["x"], problem["w1"]
    layout = check_type_and_layout(problem)
    if problem.attribute("activation") not in ACTIVATIONS:
        known = ", ".join(repr(name) for name in ACTIVATIONS if name) + " or None"
        problem.reject(f"activation is {problem.attribute('activation')!r}", f"activation {known}")
    if problem.attribute("epsilon") < 0:
        problem.reject(f"epsilon is {problem.attribute('epsilon')}", "epsilon of 0 or more")
    if x.ndim == 0 or x.shape[-1] < 1:
        problem.reject(f"x has shape {x.shape}", "x of shape [..., hidden], hidden 1 or more")
    hidden = x.shape[-1] if x.ndim and x.shape[-1] else -1
    check_linear(problem, hidden, -1, ("x", "w1", "b1"), layout)
    inner = w1.shape[1 if layout == "in_out" else 0] if w1.ndim == 2 else -1
    check_linear(problem, inner, hidden, ("x", "w2", "b2"), layout)
    check_vectors(problem, ("gamma", "beta"), hidden, x)


def _infer(problem: Problem) -> dict[str, OutputSpec]:
    return {"out": OutputSpec(problem["x"].shape, problem["x"].dtype)}


def _plan(problem: Problem, outputs: Mapping[str, Operand], device: DeviceInfo) -> Plan:
    x, w1, y, layout = problem["x"], problem["w1"], outputs["out"], problem.attribute("weight_layout")
    pre_ln = problem.attribute("pre_ln")
    columns = w1.shape[1 if layout == "in_out" else 0]
    inner = dense("inner", (*x.shape[:-1], columns), x.dtype)

    def norm(source: Operand) -> tuple[Step, ...]:
        return plan_layer_norm(
            source, problem.get("gamma"), problem.get("beta"), y, device, eps=problem.attribute("epsilon")
        )

    steps = norm(x) if pre_ln else ()  # in the result's memory
    steps += plan_linear(
        y if pre_ln else x, w1, problem.get("b1"), None, inner, device, activation=problem.attribute("activation"),
        weight_layout=layout,
    )  # fmt: skip
    steps += plan_linear(
        inner, problem["w2"], problem.get("b2"), x if problem.attribute("residual") else None, y, device,
        weight_layout=layout,
    )  # fmt: skip
    return Plan(steps + (() if pre_ln else norm(y)), (("inner", inner.nbytes),))


FUSED_FFN = OpSpec(
    name="fused_ffn",
    inputs=(
        Input("x"), Input("w1"), Input("w2"), Input("gamma", True), Input("beta", True), Input("b1", True),
        Input("b2", True),
    ),
    attributes=(
        Attribute("activation", str), Attribute("pre_ln", bool, True), Attribute("residual", bool, True),
        Attribute("epsilon", float, 1e-5), Attribute("weight_layout", str, "in_out"),
    ),
    outputs=("out",),
    check=_check,
    infer=_infer,
    plan=_plan,
)  # fmt: skip
