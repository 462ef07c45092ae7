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
import rowwise
from pointwise_ops import HEAD_DIM, OPS

from cki.device import cuda_device
from cki.heuristics.norm import RowConfig, RowShape, candidates
from cki.heuristics.pointwise import TileConfig, tile_config
from cki.ops.call import call
from cki.ops.pointwise_dropout import DROPOUT_ADD
from cki.ops.pointwise_quantize import QUANTIZE_FP8
from cki.plan import Plan

SHAPES = ((16384, 1024), (16384, 4096), (16384, 14336), (64, 4096))
NUMPY = {"bf16": np.dtype(ml_dtypes.bfloat16), "f16": np.dtype(np.float16), "f32": np.dtype(np.float32)}
TORCH = {"bf16": "bfloat16", "f16": "float16", "f32": "float32"}

Inputs = Sequence[Any]


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
            "heads": self.width * itemsize, "heads_out": self.width * itemsize, "positions": 8,
            "codes": self.width, "rows": 4, "blocks": 4 * blocks,
        }  # fmt: skip
        op = OPS[self.op]
        return self.rows * sum(a_row.get(kind or "", 0) for kind in (*op.inputs, *op.outputs))

    @property
    def in_rows(self) -> bool:
        """Whether the kernel holds whole rows (a RowConfig), not tiles of them (a TileConfig)."""
        return self.op in ("softmax", "quantize_row") or "norm" in self.op


def configurations(problem: Problem, device: Any) -> list[RowConfig | TileConfig]:
    """The choice for dense rows, then what else may be worth measuring; none where the operation has no others."""
    op = OPS[problem.op]
    if op.plan is None:
        return []
    itemsize = NUMPY[problem.dtype].itemsize
    size = 16 // itemsize
    while problem.width % size:
        size //= 2
    if problem.in_rows:
        norm = "vector" in op.inputs
        shape = RowShape(
            problem.rows,
            problem.width,
            size,
            itemsize,
            inputs=op.inputs.count("x"),
            weights=op.inputs.count("vector"),
            centred=norm,
        )
        least = 32 if "blocks" in op.outputs else 1
        return [c for c in candidates(shape, device) if not c.prefetch and c.threads_per_row >= least]
    inputs = 2 if "wide" in op.inputs or op.inputs.count("x") == 2 else 1
    biased = "vector" in op.inputs or "wide_vector" in op.inputs
    few = 4 if biased or op.spec in (QUANTIZE_FP8, DROPOUT_ADD) else 5
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
        planned = op.plan
        if planned is None:
            raise ValueError(f"{problem.op} has no configurations")

        def plan(found: Any, outputs: Any, device: Any) -> Plan:
            return Plan(planned(found, outputs, device, config))

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
        "heads": lambda: normal(rows, width // HEAD_DIM, HEAD_DIM),
        "heads_out": lambda: empty(width, dtype).view(rows, -1, HEAD_DIM),
        "positions": lambda: torch.arange(rows, device="cuda"),
        "vector": lambda: normal(width), "wide_vector": lambda: normal(2 * width),
        "bits": lambda: torch.tensor([seed], device="cuda"),
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
        if kind not in ("vector", "wide_vector", "one", "bits"):
            tensor = tensor[:picked]
        if kind in ("bits", "positions"):
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


def measure(problem: Problem, tries: Sequence[str], sweep: bool) -> list[dict[str, object]]:
    """One row a variant: torch, the choice, other configurations."""
    import cupy

    tensors = common.rotated(functools.partial(make_inputs, problem), problem.nbytes)
    known = configurations(problem, cuda_device(cupy.cuda.Device().id))
    others = [
        *(known[1:] if sweep else []),
        *(overridden(c, problem.width, t) for c in known[:1] for t in tries),
    ]
    variants = [("torch", torch_call(problem)), ("cki", cki_call(problem, None))]
    variants += [(f"cki {described(config)}", cki_call(problem, config)) for config in others]
    return rowwise.measured(
        problem, variants, tensors, lambda run, what: check(problem, run, tensors[0], what)
    )


def main() -> None:
    """Measures and writes pointwise.csv."""
    parser = argparse.ArgumentParser(description="bandwidth of the pointwise operations")
    parser.add_argument(
        "--shape", type=rowwise.shape, action="append", help="ROWSxWIDTH of the output; repeatable"
    )
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
