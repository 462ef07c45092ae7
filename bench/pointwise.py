"""Pointwise operations: bandwidth of CKI's kernels, of other configurations of them, and of PyTorch.

    python bench/pointwise.py                                   # the choices and torch, usual shapes
    python bench/pointwise.py --shape 16384x4096 --op swiglu --sweep
    python bench/pointwise.py --shape 16384x4096 --op swiglu --try vectors_per_thread=1,min_blocks=6

Each must read its inputs and write its outputs once: GB/s counts those bytes, and `of_copy` is the ratio to the rate of
a device-to-device copy measured in the same run.  `vs_torch` is torch's time over ours; torch runs eagerly, so what it
has no kernel for takes it several.  Every variant is compared with the float64 reference before it is timed; one that
is wrong ends the program.  Method: CUDA graph replays over inputs that together exceed the L2 cache three times
(bench/common.py).  A shape is rows x width of the output.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import common
import ml_dtypes
import numpy as np

from cki import reference
from cki.device import cuda_device
from cki.heuristics.norm import RowConfig, RowShape, candidates
from cki.heuristics.pointwise import TileConfig, tile_config
from cki.ops.call import call
from cki.ops.norm_quantize import RMS_NORM_QUANTIZE, plan_norm_quantize
from cki.ops.pointwise import BIAS_ACTIVATION, GATED_ACTIVATION, plan_bias_activation, plan_gated_activation
from cki.ops.pointwise_dropout import DROPOUT_ADD, plan_dropout_add
from cki.ops.pointwise_quantize import QUANTIZE_FP8, plan_quantize_fp8
from cki.ops.pointwise_softmax import SOFTMAX, plan_softmax
from cki.ops.spec import OpSpec
from cki.plan import Plan

SHAPES = ((16384, 1024), (16384, 4096), (16384, 14336), (64, 4096))
NUMPY = {"bf16": np.dtype(ml_dtypes.bfloat16), "f16": np.dtype(np.float16), "f32": np.dtype(np.float32)}
TORCH = {"bf16": "bfloat16", "f16": "float16", "f32": "float32"}
_P = 0.1

Inputs = Sequence[Any]


class Op(NamedTuple):
    """One operation to measure.

    spec, attributes: how CKI is called, with the tensors that `make` gives, then the outputs.
    inputs: of what kind each tensor is: x, wide (twice the width), vector, bits (seed, offset), one (a scale), None.
    outputs: of what kind: y, codes, rows (a scale each), blocks.
    torch: the same, on the inputs.  expected: outputs in float64 of chosen rows.
    plan: the steps of one problem with a given configuration.
    """

    spec: OpSpec
    attributes: tuple[Any, ...]
    inputs: tuple[str | None, ...]
    outputs: tuple[str, ...]
    torch: Callable[..., object]
    expected: Callable[..., Any]
    plan: Callable[..., Any]


def _functional() -> Any:
    import torch

    return torch.nn.functional


def _torch_gated(x: Any, activation: str, layout: str) -> object:
    gate, up = (x[..., ::2], x[..., 1::2]) if layout == "interleaved" else x.chunk(2, -1)
    return getattr(_functional(), activation)(gate) * up


def _torch_quantize(x: Any, block: int) -> object:
    import torch

    blocks = x.float().view(x.shape[0], -1, block)
    scale = blocks.abs().amax(-1, keepdim=True) / 448.0
    return (blocks / scale).clamp(-448, 448).to(torch.float8_e4m3fn), scale


def _torch_quantize_tensor(x: Any, scale: Any) -> object:
    import torch

    return (x.float() / scale).clamp(-448, 448).to(torch.float8_e4m3fn)


def _torch_add_rms_norm_quantize(x: Any, weight: Any, residual: Any) -> object:
    total = x + residual
    return _torch_quantize(_functional().rms_norm(total, total.shape[-1:], weight, 1e-6), x.shape[-1]), total


def _gated(activation: str, layout: str) -> Op:
    options: dict[str, Any] = {"activation": activation, "layout": layout}
    return Op(
        GATED_ACTIVATION, (activation, layout), ("wide", None), ("y",),
        lambda x, _: _torch_gated(x, **options),
        lambda x, _: (reference.gated_activation(x, **options),),
        lambda p, o, d, c: plan_gated_activation(p["x"], p.get("bias"), o["out"], d, **options, config=c),
    )  # fmt: skip


def _quantize(granularity: str, scale: str) -> Op:
    def plan(problem: Any, outputs: Any, device: Any, config: Any) -> Any:
        scales = outputs["scale_out"] if granularity != "tensor" else problem["scale"]
        return plan_quantize_fp8(
            problem["x"], outputs["out"], scales, device, granularity=granularity, config=config
        )

    def expected(x: Any, given: Any) -> Any:
        found = reference.quantize_fp8(x, scale=given, granularity=granularity)
        return found if isinstance(found, tuple) else (found,)

    tensor = granularity == "tensor"
    torch_calls: dict[str, Callable[..., object]] = {
        "row": lambda x, _: _torch_quantize(x, x.shape[-1]), "block128": lambda x, _: _torch_quantize(x, 128),
        "tensor": _torch_quantize_tensor,
    }  # fmt: skip
    return Op(
        QUANTIZE_FP8, (granularity, "e4m3"), ("x", "one" if tensor else None),
        ("codes",) if tensor else ("codes", scale), torch_calls[granularity], expected, plan,
    )  # fmt: skip


OPS: dict[str, Op] = {
    "swiglu": _gated("silu", "gate_first"),
    "swiglu_interleaved": _gated("silu", "interleaved"),
    "geglu": _gated("gelu", "gate_first"),
    "bias_gelu": Op(
        BIAS_ACTIVATION, ("gelu",), ("x", "vector", None), ("y",), lambda x, bias, _: _functional().gelu(x + bias),
        lambda x, bias, _: (reference.bias_activation(x, bias),),
        lambda p, o, d, c: plan_bias_activation(p["x"], p["bias"], o["out"], d, config=c),
    ),
    "silu_multiply": Op(
        BIAS_ACTIVATION, ("silu",), ("x", None, "x"), ("y",), lambda x, _, up: _functional().silu(x) * up,
        lambda x, _, up: (reference.bias_activation(x, activation="silu", multiplier=up),),
        lambda p, o, d, c: plan_bias_activation(
            p["x"], None, o["out"], d, activation="silu", multiplier=p["multiplier"], config=c
        ),
    ),
    "softmax": Op(
        SOFTMAX, (1.0,), ("x", None), ("y",), lambda x, _: _functional().softmax(x, -1),
        lambda x, _: (reference.softmax(x),), lambda p, o, d, c: plan_softmax(p["x"], None, o["out"], d, config=c),
    ),
    "quantize_row": _quantize("row", "rows"),
    "quantize_block128": _quantize("block128", "blocks"),
    "quantize_tensor": _quantize("tensor", ""),
    "add_rms_norm_quantize": Op(
        RMS_NORM_QUANTIZE, ("row", "e4m3", 1e-6, "unrounded", 0.0), ("x", "vector", "x"), ("codes", "rows", "y"),
        _torch_add_rms_norm_quantize, lambda x, w, residual: reference.rms_norm_quantize(x, w, residual=residual),
        lambda p, o, d, c: plan_norm_quantize(
            p["x"], (p["weight"], None), o["out"], o["scale_out"], d, centred=False, residual=p["residual"],
            residual_out=o["residual_out"], normalize="unrounded", config=c,
        ),
    ),
    "dropout_add": Op(
        DROPOUT_ADD, (_P,), ("x", "x", "bits", "bits"), ("y",),
        lambda x, residual, *_: _functional().dropout(x, _P) + residual,
        lambda x, residual, seed, offset: (reference.dropout_add(x, residual, _P, seed, offset),),
        lambda p, o, d, c: plan_dropout_add(
            p["x"], p["residual"], p["seed"], p["offset"], o["out"], d, p=_P, config=c
        ),
    ),
}  # fmt: skip


class Problem(NamedTuple):
    """What is measured.  op: of OPS.  width: of the output."""

    op: str
    rows: int
    width: int
    dtype: str

    @property
    def nbytes(self) -> int:
        """Bytes that must move: inputs and outputs once."""
        itemsize, blocks = NUMPY[self.dtype].itemsize, -(-self.width // 128)
        a_row: dict[str, int] = {
            "x": self.width * itemsize, "wide": 2 * self.width * itemsize, "y": self.width * itemsize,
            "codes": self.width, "rows": 4, "blocks": 4 * blocks,
        }  # fmt: skip
        op = OPS[self.op]
        return self.rows * sum(a_row.get(kind or "", 0) for kind in (*op.inputs, *op.outputs))

    @property
    def in_rows(self) -> bool:
        """Whether the kernel holds whole rows (a RowConfig), not tiles of them (a TileConfig)."""
        return self.op in ("softmax", "quantize_row", "add_rms_norm_quantize")


def configurations(problem: Problem, device: Any) -> list[RowConfig | TileConfig]:
    """The choice for dense rows, then what else may be worth measuring."""
    itemsize = NUMPY[problem.dtype].itemsize
    size = 16 // itemsize
    while problem.width % size:
        size //= 2
    op = OPS[problem.op]
    if problem.in_rows:
        norm = "vector" in op.inputs
        shape = RowShape(
            problem.rows,
            problem.width,
            size,
            itemsize,
            inputs=op.inputs.count("x"),
            weights=int(norm),
            centred=norm,
        )
        return [config for config in candidates(shape, device) if not config.prefetch]
    inputs = 2 if "wide" in op.inputs or op.inputs.count("x") == 2 else 1
    few = 4 if "vector" in op.inputs or op.spec in (QUANTIZE_FP8, DROPOUT_ADD) else 5
    lanes = 128 // size if problem.op == "quantize_block128" else 1
    chosen = tile_config(problem.rows, problem.width, size, inputs, device, min_blocks=few, min_lanes=lanes)
    found: list[RowConfig | TileConfig] = [chosen]
    for per_thread in (1, 2, 4, 8):
        for blocks in (3, 4, 5, 6, 8):
            config = dataclasses.replace(chosen, vectors_per_thread=per_thread, min_blocks=blocks)
            if config.threads_per_row * per_thread * size <= problem.width:
                found.append(filled(config, problem.width))
    return list(dict.fromkeys(found))


def filled(config: RowConfig | TileConfig, width: int) -> RowConfig | TileConfig:
    """The configuration with its statement about full rows or tiles made true."""
    reach = config.threads_per_row * config.vectors_per_thread * config.size
    if isinstance(config, TileConfig):
        return dataclasses.replace(config, full_tiles=width % reach == 0)
    if config.vectors_per_thread and reach < width:
        raise SystemExit(f"--try: covers {reach} of {width} columns")
    return dataclasses.replace(config, full_row=reach == width)


def overridden(config: RowConfig | TileConfig, width: int, text: str) -> RowConfig | TileConfig:
    """`config` with fields replaced: "vectors_per_thread=2,min_blocks=6"."""
    known = {field.name for field in dataclasses.fields(config)} - {"name", "full_row", "full_tiles"}
    changes: dict[str, Any] = {}
    for item in text.split(","):
        name, _, value = item.partition("=")
        if name not in known:
            raise SystemExit(f"--try: no field {name!r}; there are: {', '.join(sorted(known))}")
        changes[name] = int(value)
    return filled(dataclasses.replace(config, **changes), width)


def described(config: RowConfig | TileConfig) -> str:
    """The fields that differ between variants."""
    return (
        f"{config.threads_per_row}x{config.rows_per_block} threads, {config.vectors_per_thread} vectors, "
        f"{config.min_blocks} blocks"
    )


def cki_call(problem: Problem, config: RowConfig | TileConfig | None) -> Callable[..., object]:
    """`f(*inputs, *outputs)` by CKI; config None is the heuristic's choice."""
    op = OPS[problem.op]
    spec = op.spec
    if config is not None:

        def plan(found: Any, outputs: Any, device: Any) -> Plan:
            return Plan(op.plan(found, outputs, device, config))

        spec = dataclasses.replace(spec, plan=plan)

    def run(*tensors: Any) -> object:
        inputs, outs = tensors[: len(op.inputs)], tensors[len(op.inputs) :]
        missing = (None,) * (len(spec.outputs) - len(outs))
        return call(spec, inputs, op.attributes, (*outs, *missing))

    return run


def torch_call(problem: Problem) -> Callable[..., object]:
    """The same by PyTorch, on the inputs; its outputs are new."""
    op = OPS[problem.op]
    return lambda *tensors: op.torch(*tensors[: len(op.inputs)])


def make_inputs(problem: Problem, seed: int) -> tuple[Any, ...]:
    """Inputs, then outputs, as torch tensors on the GPU."""
    import torch

    generator = torch.Generator(device="cuda").manual_seed(seed)
    dtype = getattr(torch, TORCH[problem.dtype])
    rows, width = problem.rows, problem.width

    def normal(*size: int) -> Any:
        return torch.randn(*size, generator=generator, device="cuda", dtype=torch.float32).to(dtype)

    def empty(columns: int, kind: Any) -> Any:
        return torch.empty((rows, columns), device="cuda", dtype=kind)

    makers: dict[str | None, Callable[[], Any]] = {
        None: lambda: None, "x": lambda: normal(rows, width), "wide": lambda: normal(rows, 2 * width),
        "vector": lambda: normal(width), "bits": lambda: torch.tensor([seed], device="cuda"),
        "one": lambda: torch.tensor([0.01], device="cuda"), "y": lambda: empty(width, dtype),
        "codes": lambda: empty(width, torch.float8_e4m3fn), "rows": lambda: empty(1, torch.float32),
        "blocks": lambda: empty(-(-width // 128), torch.float32),
    }  # fmt: skip
    op = OPS[problem.op]
    return tuple(makers[kind]() for kind in (*op.inputs, *op.outputs))


def check(problem: Problem, run: Callable[..., object], tensors: Inputs, what: str) -> float:
    """Runs once; the largest error in the first rows, relative to the largest value.  Ends when too large.

    The first rows, because dropout's choice goes by an element's index.
    """
    import torch

    op = OPS[problem.op]
    outputs = tensors[len(op.inputs) :]
    for output in outputs:
        output.view(torch.uint8).fill_(0xFF)
    run(*tensors)
    picked = min(128, problem.rows)

    def host(tensor: Any, kind: str | None) -> Any:
        if tensor is None:
            return None
        if kind in ("x", "wide", "y", "codes", "rows", "blocks"):
            tensor = tensor[:picked]
        if kind == "bits":
            return tensor.cpu().numpy()
        return tensor.float().cpu().numpy().astype(np.float64)

    given = [host(tensor, kind) for tensor, kind in zip(tensors, op.inputs)]
    limits = {"bf16": 2.0**-8, "f16": 2.0**-11, "f32": 1e-5}
    worst = 0.0
    for output, kind, expected in zip(outputs, op.outputs, op.expected(*given)):
        scale = float(np.abs(expected).max())
        error = float(np.abs(host(output, kind) - expected).max()) / scale
        # A code may be the neighbour's where x / scale lies on a border: 32 of 448 at most.
        limit = {"codes": 0.08, "rows": 1e-6, "blocks": 1e-6}.get(kind, limits[problem.dtype])
        if not error <= limit:
            raise SystemExit(f"{what}: {kind} has relative error {error:.2e}, at most {limit:.2e} is right")
        worst = max(worst, error)
    return worst


@functools.cache
def copy_gb_per_s() -> float:
    return common.copy_rate()


def measure(problem: Problem, tries: Sequence[str], sweep: bool) -> list[dict[str, object]]:
    """One row a variant: torch, the choice, other configurations."""
    import cupy

    tensors = common.rotated(functools.partial(make_inputs, problem), problem.nbytes)
    known = configurations(problem, cuda_device(cupy.cuda.Device().id))
    others = [*(known[1:] if sweep else []), *(overridden(known[0], problem.width, text) for text in tries)]
    variants = [("torch", torch_call(problem)), ("cki", cki_call(problem, None))]
    variants += [(f"cki {described(config)}", cki_call(problem, config)) for config in others]
    rows, torch_us = [], 0.0
    for name, run in variants:
        error = check(problem, run, tensors[0], f"{problem.op} {name}") if name != "torch" else 0.0
        timing = common.graph_time(run, tensors, framework="torch")
        if name == "torch":
            torch_us = timing.median_us
        rows.append(common.row(
            problem.op, f"rows={problem.rows} width={problem.width}", problem.dtype, name, timing,
            nbytes=problem.nbytes, of_copy=round(problem.nbytes / timing.median_us / 1e3 / copy_gb_per_s(), 3),
            vs_torch=round(torch_us / timing.median_us, 2), error=f"{error:.1e}",
            copy_gb_per_s=round(copy_gb_per_s(), 1),
        ))  # fmt: skip
    return rows


def _shape(text: str) -> tuple[int, int]:
    rows, _, width = text.partition("x")
    return int(rows), int(width)


def main() -> None:
    """Measures and writes pointwise.csv."""
    parser = argparse.ArgumentParser(description="bandwidth of the pointwise operations")
    parser.add_argument("--shape", type=_shape, action="append", help="ROWSxWIDTH of the output; repeatable")
    parser.add_argument("--op", choices=tuple(OPS), action="append", help="may be repeated")
    parser.add_argument("--dtype", choices=sorted(NUMPY), action="append", help="repeatable; default bf16")
    parser.add_argument("--sweep", action="store_true", help="measure other configurations too")
    parser.add_argument(
        "--try", dest="tries", action="append", default=[], metavar="FIELD=VALUE,...",
        help="another configuration: the choice with fields replaced",
    )  # fmt: skip
    arguments = parser.parse_args()
    common.require_gpu()
    rows = []
    for dtype in arguments.dtype or ["bf16"]:
        for shape in arguments.shape or SHAPES:
            for op in arguments.op or OPS:
                rows += measure(Problem(op, shape[0], shape[1], dtype), arguments.tries, arguments.sweep)
    common.write_csv("pointwise", rows)


if __name__ == "__main__":
    main()
