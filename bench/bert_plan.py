"""The launches of a prepared encoder's layer on an H200, from its plan, and what each should take.  Needs no GPU.

The layer is from the middle of the stack: norms are in its products.

bytes: what must move, every tensor once.  FLOPs: multiply-adds times two.  roof: the longer of bytes at 4.3 TB/s (a
device copy) and FLOPs at 788 TFLOP/s (cuBLAS, 8192^3).  predicted: for products the model that chooses their tiles
(`cki.heuristics.linear_hopper`, fitted to measured times); for attention the rates measured at this width
(bench/results/attention_hopper.csv).
"""

from __future__ import annotations

from typing import NamedTuple

from bert_model import EPSILON, Model, Problem

from cki import dtypes
from cki.device import DeviceInfo, sim_device
from cki.heuristics.linear_hopper import choose_hopper_tile, predicted_time
from cki.operand import dense
from cki.ops.encoder_model import FUSED_WEIGHTS, encoder_spec
from cki.ops.spec import Problem as Call
from cki.plan import Step

COPY_TB_PER_S, GEMM_TFLOP_PER_S = 4.3, 788.0
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
    first, third = (
        model_steps(model._replace(layers=layers), problem, device or sim_device("sm_90a"))
        for layers in (1, 3)
    )
    start = len(first) - 1  # the last norm
    return third[start : start + (len(third) - len(first)) // 2]


def model_steps(model: Model, problem: Problem, device: DeviceInfo) -> tuple[Step, ...]:
    """The plan of a forward pass by `cki.Encoder`, prepared."""
    h, inner, pre_ln = model.hidden, model.inner, problem.pre_ln
    whole: dict[str, tuple[int, ...]] = {
        "words": (model.vocabulary, h), "positions": (model.positions, h), "types": (2, h),
        **{f"embedding_{part}": (h,) for part in ("gamma", "beta")},
        **{f"final_{part}": (h,) for part in ("gamma", "beta") if pre_ln},
    }  # fmt: skip
    products: dict[str, tuple[int, ...]] = {
        "wq": (3 * h, h), "wo": (h, h), "w1": (inner, h), "w2": (h, inner),
        "bq": (3 * h,), "bo": (h,), "b1": (inner,), "b2": (h,),
    }  # fmt: skip
    layer = dict(products)
    if not pre_ln:  # else they are in the weights
        layer |= {f"{which}_{part}": (h,) for which in ("attention", "output") for part in ("gamma", "beta")}
    shapes = whole | {
        f"layers.{n}.{name}": shape for n in range(model.layers) for name, shape in layer.items()
    }
    if not pre_ln:  # those with the norm in front in them: the embeddings' is not
        shapes |= {
            f"layers.{n}.{name}": products[name.removeprefix("fused_")]
            for n in range(model.layers)
            for name in FUSED_WEIGHTS[0 if n else 3 :]
        }
    wide = ("bq", "b1") if pre_ln else ("fused_bq", "fused_b1")
    operands = {
        name: dense(name, shape, dtypes.f32 if name.rpartition(".")[2] in wide else dtypes.f16)
        for name, shape in shapes.items()
    }
    spec = encoder_spec(model.layers)
    attributes = {attribute.name: attribute.default for attribute in spec.attributes}
    attributes |= {
        "num_heads": model.heads, "head_dim": h // model.heads, "pre_ln": pre_ln, "activation": "gelu",
        "epsilon": EPSILON, "weight_layout": "out_in", "folded": pre_ln,
    }  # fmt: skip
    ids = dense("input_ids", (problem.batch, problem.seq), dtypes.i64)
    out = dense("out", (problem.batch, problem.seq, h), dtypes.f16)
    return spec.plan(Call({"input_ids": ids, **operands}, attributes), {"out": out}, device).steps


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
    return [
        product("Q, K, V", h, 3 * h),
        ("attention", item * 4 * rows * h, flops, flops / rate / 1e6),
        product("heads to hidden, + x", h, h, "residual"),
        product("hidden to inner, GELU", h, inner, "activation"),
        product("inner to hidden, + x", inner, h, "residual"),
    ]


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
