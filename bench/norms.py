"""Layer norm and RMS norm: bandwidth of the chosen configuration, of every other candidate, and of PyTorch.

    python bench/norms.py                                   # the choice, candidates and torch, usual shapes
    python bench/norms.py --shape 16384x4096 --op rms_norm --choice-only
    python bench/norms.py --shape 16384x4096 --try threads_per_row=256,vectors_per_thread=2,min_blocks=6

A norm must read its input and write its output once: GB/s counts those bytes (four streams where a residual is added,
two else), and `of_copy` is the ratio to the rate of a device-to-device copy measured in the same run.  `vs_torch` is
torch's time over ours.  Every variant is compared with the float64 reference before it is timed; one that is wrong ends
the program.  Method: CUDA graph replays over inputs that together exceed the L2 cache three times (bench/common.py).
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

import cki
from cki import reference
from cki.device import cuda_device
from cki.heuristics.norm import RowConfig, RowShape, candidates
from cki.ops.call import call
from cki.ops.norm import LAYER_NORM, RMS_NORM, plan_layer_norm, plan_rms_norm
from cki.ops.spec import OpSpec
from cki.plan import Plan

SHAPES = ((16384, 1024), (16384, 4096), (16384, 8192), (65536, 384), (64, 4096))
OPS = ("rms_norm", "layer_norm", "add_rms_norm", "add_layer_norm")
NUMPY = {"bf16": np.dtype(ml_dtypes.bfloat16), "f16": np.dtype(np.float16), "f32": np.dtype(np.float32)}
TORCH = {"bf16": "bfloat16", "f16": "float16", "f32": "float32"}


class Problem(NamedTuple):
    """What is measured.  op: of OPS; those with `add_` add a residual."""

    op: str
    rows: int
    width: int
    dtype: str

    @property
    def norm(self) -> str:
        return self.op.removeprefix("add_")

    @property
    def adds(self) -> bool:
        return self.op.startswith("add_")

    @property
    def nbytes(self) -> int:
        """Bytes that must move: inputs and outputs once."""
        itemsize: int = NUMPY[self.dtype].itemsize
        return self.rows * self.width * itemsize * (4 if self.adds else 2)

    def row_shape(self) -> RowShape:
        """For the heuristic: dense rows, aligned to 16 bytes."""
        itemsize = NUMPY[self.dtype].itemsize
        size = 16 // itemsize
        while self.width % size:
            size //= 2
        centred = self.norm == "layer_norm"
        return RowShape(
            self.rows,
            self.width,
            size,
            itemsize,
            itemsize,
            2 if self.adds else 1,
            2 if centred else 1,
            centred,
        )


def overridden(config: RowConfig, width: int, text: str) -> RowConfig:
    """`config` with fields replaced: "threads_per_row=256,vectors_per_thread=2,prefetch=1"."""
    fields = {field.name: field.type for field in dataclasses.fields(RowConfig)}
    changes: dict[str, Any] = {"name": f"try {text}"}
    for item in text.split(","):
        name, _, value = item.partition("=")
        if name not in fields or name in ("name", "full_row"):
            known = ", ".join(sorted(set(fields) - {"name", "full_row"}))
            raise SystemExit(f"--try: no field {name!r}; there are: {known}")
        changes[name] = bool(int(value)) if fields[name] == "bool" else int(value)
    changed = dataclasses.replace(config, **changes)
    reach = changed.threads_per_row * changed.vectors_per_thread * changed.size
    if changed.vectors_per_thread and reach < width:
        raise SystemExit(f"--try {text}: covers {reach} of {width} columns")
    return dataclasses.replace(changed, full_row=reach == width)


def configured_spec(norm: str, config: RowConfig) -> OpSpec:
    """The operation, always planned with one configuration."""

    def plan(problem: Any, outputs: Any, device: Any) -> Plan:
        common_arguments = {
            "residual": problem.get("residual"),
            "residual_out": outputs.get("residual_out"),
            "config": config,
        }
        if norm == "layer_norm":
            affine = (problem.get("weight"), problem.get("bias"))
            return Plan(plan_layer_norm(problem["x"], *affine, outputs["out"], device, **common_arguments))
        return Plan(
            plan_rms_norm(problem["x"], problem.get("weight"), outputs["out"], device, **common_arguments)
        )

    return dataclasses.replace(LAYER_NORM if norm == "layer_norm" else RMS_NORM, plan=plan)


def cki_call(problem: Problem, config: RowConfig | None) -> Callable[..., object]:
    """`f(x, residual, weight, y, s)` by CKI; config None is the public function with the heuristic's choice."""
    layer = problem.norm == "layer_norm"
    if config is None:

        def public(x: Any, residual: Any, weight: Any, y: Any, s: Any) -> object:
            affine = (weight, weight) if layer else (weight,)
            if problem.adds:
                return getattr(cki, problem.norm)(x, *affine, residual=residual, out=y, residual_out=s)
            return getattr(cki, problem.norm)(x, *affine, out=y)

        return public
    spec = configured_spec(problem.norm, config)
    attributes = (1e-5, "rounded") if layer else (1e-6, 0.0, "rounded")

    def configured(x: Any, residual: Any, weight: Any, y: Any, s: Any) -> object:
        affine = (weight, weight) if layer else (weight,)
        added = (residual,) if problem.adds else (None,)
        return call(spec, (x, *affine, *added), attributes, (y, s if problem.adds else None))

    return configured


def torch_call(problem: Problem) -> Callable[..., object]:
    """The same by PyTorch, the addition as an operation of its own."""
    import torch

    def run(x: Any, residual: Any, weight: Any, y: Any, s: Any) -> object:
        if problem.adds:
            x = torch.add(x, residual, out=s)
        if problem.norm == "layer_norm":
            return torch.nn.functional.layer_norm(x, (problem.width,), weight, weight, 1e-5)
        return torch.nn.functional.rms_norm(x, (problem.width,), weight, 1e-6)

    return run


def make_inputs(problem: Problem, seed: int) -> tuple[Any, ...]:
    """(x, residual, weight, y, s) as torch tensors on the GPU; the outputs hold NaN."""
    import torch

    generator = torch.Generator(device="cuda").manual_seed(seed)
    dtype = getattr(torch, TORCH[problem.dtype])
    shape = (problem.rows, problem.width)

    def normal(*size: int) -> Any:
        return torch.randn(*size, generator=generator, device="cuda", dtype=torch.float32).to(dtype)

    def poison() -> Any:
        return torch.full(shape, float("nan"), device="cuda", dtype=dtype)

    added = (normal(*shape), poison()) if problem.adds else (None, None)
    return normal(*shape), added[0], normal(problem.width), poison(), added[1]


def check(problem: Problem, run: Callable[..., object], inputs: Sequence[Any], what: str) -> float:
    """Runs once; the largest error in the first and last rows, relative to the largest value.  Ends when too large."""
    x, residual, weight, y, s = inputs
    y.fill_(float("nan"))
    run(*inputs)
    picked = [*range(min(64, problem.rows)), *range(max(0, problem.rows - 64), problem.rows)]

    def host(tensor: Any) -> np.ndarray[Any, Any]:
        return np.asarray(tensor.float().cpu().numpy().astype(NUMPY[problem.dtype]))

    affine = (host(weight),) * (2 if problem.norm == "layer_norm" else 1)
    added = {"residual": host(residual[picked])} if problem.adds else {}
    expected = getattr(reference, problem.norm)(host(x[picked]), *affine, **added)
    if problem.adds:
        expected, stored = expected
        if not np.array_equal(host(s[picked]).astype(np.float64), stored):
            raise SystemExit(f"{what}: x + residual is wrong")
    scale = float(np.abs(expected).max())
    error = float(np.abs(host(y[picked]).astype(np.float64) - expected).max()) / scale
    limit = {"bf16": 2.0**-8, "f16": 2.0**-11, "f32": 1e-5}[problem.dtype]
    if not error <= limit:
        raise SystemExit(
            f"{what}: relative error {error:.2e} against the reference, at most {limit:.2e} is right"
        )
    return error


def measure(problem: Problem, tries: Sequence[str], choice_only: bool) -> list[dict[str, object]]:
    """One row a variant: torch, the choice, the other candidates, the overrides."""
    import cupy

    inputs = common.rotated(functools.partial(make_inputs, problem), problem.nbytes)
    known = candidates(problem.row_shape(), cuda_device(cupy.cuda.Device().id))
    variants: list[tuple[str, Callable[..., object]]] = [
        ("torch", torch_call(problem)),
        ("cki", cki_call(problem, None)),
    ]
    others = [] if choice_only else known[1:]
    others = [*others, *(overridden(known[0], problem.width, text) for text in tries)]
    for config in others:
        variants.append((f"cki {config.name} {config.threads}", cki_call(problem, config)))
    return rowwise.measured(problem, variants, inputs, lambda run, what: check(problem, run, inputs[0], what))


def main() -> None:
    """Measures and writes norms.csv."""
    parser = argparse.ArgumentParser(description="bandwidth of layer norm and RMS norm")
    parser.add_argument("--shape", type=rowwise.shape, action="append", help="ROWSxWIDTH; may be repeated")
    parser.add_argument("--op", choices=OPS, action="append", help="may be repeated")
    parser.add_argument(
        "--dtype", choices=sorted(NUMPY), action="append", help="may be repeated; default bf16"
    )
    parser.add_argument("--choice-only", action="store_true", help="leave out the other candidates")
    parser.add_argument(
        "--try", dest="tries", action="append", default=[], metavar="FIELD=VALUE,...",
        help="another configuration: the choice with fields of cki.heuristics.norm.RowConfig replaced",
    )  # fmt: skip
    arguments = parser.parse_args()
    common.require_gpu()
    rows = []
    for dtype in arguments.dtype or ["bf16"]:
        for shape in arguments.shape or SHAPES:
            for op in arguments.op or OPS:
                rows += measure(
                    Problem(op, shape[0], shape[1], dtype), arguments.tries, arguments.choice_only
                )
    common.write_csv("norms", rows)


if __name__ == "__main__":
    main()
