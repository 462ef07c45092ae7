"""The launches of a prepared encoder's layer on an H200, from its plan, and what each should take.  Needs no GPU.

The layer is from the middle of the stack: of a pre-LN model's norms only the first layer's first is a launch.

bytes: what must move, every tensor once.  FLOPs: multiply-adds times two.  roof: the longer of bytes at 4.3 TB/s (a
device copy) and FLOPs at 788 TFLOP/s (cuBLAS, 8192^3).  predicted: for products the model that chooses their tiles
(`cki.heuristics.linear_hopper`, fitted to measured times); for norms and attention the rates measured at these widths
(bench/results/norms.csv, attention_hopper.csv).
"""

from __future__ import annotations

from typing import NamedTuple

from bert_model import EPSILON, Model, Problem

from cki import dtypes
from cki.device import DeviceInfo, sim_device
from cki.heuristics.linear_hopper import choose_hopper_tile, predicted_time
from cki.operand import dense
from cki.ops.encoder_stack import ENCODER_LAYERS
from cki.ops.spec import Problem as Call
from cki.plan import Step

COPY_TB_PER_S, GEMM_TFLOP_PER_S = 4.3, 788.0
_NORM_TB_PER_S = 3.45
#: From how many keys on: TFLOP/s at head dimension 64.
_ATTENTION_TFLOP_PER_S = {0: 363.0, 1024: 418.0, 2048: 449.0}


class Launch(NamedTuple):
    """nbytes, flops: of the work.  predicted_us: None for what is only a preparation."""

    name: str
    kernel: str
    nbytes: int
    flops: float
    predicted_us: float | None

    @property
    def roof_us(self) -> float:
        return max(self.nbytes / COPY_TB_PER_S, self.flops / GEMM_TFLOP_PER_S) / 1e6


def layer_steps(model: Model, problem: Problem, device: DeviceInfo | None = None) -> tuple[Step, ...]:
    """The plan of a prepared layer behind another: Q, K and V one weight, [out, in], f16.  device: default an H200."""
    first, third = (_stack_steps(model, problem, layers, device or sim_device("sm_90a")) for layers in (1, 3))
    return third[len(first) : (len(first) + len(third)) // 2]


def _stack_steps(model: Model, problem: Problem, layers: int, device: DeviceInfo) -> tuple[Step, ...]:
    """The plan of some layers."""
    h, inner, element = model.hidden, model.inner, dtypes.f16
    x = (problem.batch, problem.seq, h)
    shapes: dict[str, tuple[int, ...]] = {
        "wq": (3 * h, h), "wo": (h, h), "w1": (inner, h), "w2": (h, inner),
        "bq": (3 * h,), "bo": (h,), "b1": (inner,), "b2": (h,),
    }  # fmt: skip
    if not problem.pre_ln:  # else they are in the weights
        shapes |= {f"{which}_{part}": (h,) for which in ("attention", "output") for part in ("gamma", "beta")}
    attributes = {attribute.name: attribute.default for attribute in ENCODER_LAYERS.attributes}
    attributes |= {
        "num_heads": model.heads, "head_dim": h // model.heads, "pre_ln": problem.pre_ln, "activation": "gelu",
        "epsilon": EPSILON, "weight_layout": "out_in", "folded": problem.pre_ln,
    }  # fmt: skip
    operands = {
        name: dense(
            name, (layers, *shape), dtypes.f32 if problem.pre_ln and name in ("bq", "b1") else element
        )
        for name, shape in shapes.items()
    }
    call = Call({"x": dense("x", x, element), **operands}, attributes)
    return ENCODER_LAYERS.plan(call, {"out": dense("out", x, element)}, device).steps


def launches(model: Model, problem: Problem) -> list[Launch]:
    """A layer's launches in order.  ValueError when the plan has others than this knows."""
    steps = layer_steps(model, problem)
    work = _work(model, problem)
    main = [step for step in steps if step.kernel.entry != "reset_counter"]
    if len(main) != len(work):
        raise ValueError(
            f"a layer has the launches {', '.join(step.kernel.entry for step in main)}, not {len(work)}"
        )
    lines, todo = [], iter(work)
    for step in steps:
        if step.kernel.entry == "reset_counter":
            lines.append(Launch("counter of tiles", step.kernel.entry, 4, 0.0, None))
        else:
            name, nbytes, flops, predicted = next(todo)
            lines.append(Launch(name, step.kernel.entry, nbytes, flops, predicted))
    return lines


def _work(model: Model, problem: Problem) -> list[tuple[str, int, float, float]]:
    """(name, bytes, FLOPs, predicted microseconds), in the order of the layer."""
    rows, h, inner = problem.batch * problem.seq, model.hidden, model.inner
    device, item = sim_device("sm_90a"), dtypes.f16.itemsize

    def norm(name: str) -> tuple[str, int, float, float]:
        nbytes = item * (2 * rows * h + 2 * h)
        return name, nbytes, 0.0, nbytes / _NORM_TB_PER_S / 1e6

    def product(name: str, depth: int, columns: int, epilogue: str = "") -> tuple[str, int, float, float]:
        activation, residual = epilogue == "activation", epilogue == "residual"
        size = rows, columns, depth, device
        tile = choose_hopper_tile(*size, activation=activation, residual=residual)
        results = 2 if residual else 1
        nbytes = item * (rows * depth + depth * columns + columns + results * rows * columns)
        time = predicted_time(tile, *size, activation=activation, residual=residual)
        return name, nbytes, 2.0 * rows * depth * columns, time

    flops = 4.0 * problem.batch * problem.seq**2 * h
    rate = next(r for keys, r in sorted(_ATTENTION_TFLOP_PER_S.items(), reverse=True) if problem.seq >= keys)
    attention = [
        product("Q, K, V", h, 3 * h),
        ("attention", item * 4 * rows * h, flops, flops / rate / 1e6),
        product("heads to hidden, + x", h, h, "residual"),
    ]
    feed_forward = [
        product("hidden to inner, GELU", h, inner, "activation"),
        product("inner to hidden, + x", inner, h, "residual"),
    ]
    if problem.pre_ln:
        return [*attention, *feed_forward]
    return [*attention, norm("norm"), *feed_forward, norm("norm")]


def table(model: Model, problem: Problem) -> str:
    """The launches as a Markdown table, with a sum for the layer and for the model."""
    found = launches(model, problem)
    lines = [
        f"{problem}:", "",
        "| launch | kernel | MB | GFLOP | roof us | predicted us |", "| --- | --- | --- | --- | --- | --- |",
        *(
            f"| {one.name} | `{one.kernel}` | {one.nbytes / 1e6:.1f} | {one.flops / 1e9:.1f} | {one.roof_us:.1f} | "
            f"{'' if one.predicted_us is None else f'{one.predicted_us:.1f}'} |"
            for one in found
        ),
    ]  # fmt: skip
    nbytes, flops = sum(one.nbytes for one in found), sum(one.flops for one in found)
    roof, predicted = sum(one.roof_us for one in found), sum(one.predicted_us or 0.0 for one in found)
    lines.append(
        f"| layer, {len(found)} launches | | {nbytes / 1e6:.1f} | {flops / 1e9:.1f} | {roof:.1f} | {predicted:.1f} |"
    )
    lines.append(
        f"| {model.layers} layers | | {model.layers * nbytes / 1e6:.0f} | {model.layers * flops / 1e9:.0f} | "
        f"{model.layers * roof:.0f} | {model.layers * predicted:.0f} |"
    )
    return "\n".join([*lines, ""])
