"""What epilogues cost: our product alone, and with each of them, in turn with cuBLASLt's product alone.

    python bench/gemm_epilogue.py                                # half a minute on an H200
    python bench/gemm_epilogue.py --shape 8192x1024x4096         # ROWSxDEPTHxCOLUMNS
    python bench/gemm_epilogue.py --plain                        # products alone: large squares, and all of BERT-large

"plain" is `cki.linear` without bias, "torch" is `torch.matmul`.  "swiglu" is `cki.gated_linear`, whose y has half of
the columns: its product is the plain one's.  "statistics" are those of y's rows, stored for the next product's norm.
Before timing, rows of each result are compared with float64.

`of_plain`: an epilogue's time over that of our plain product.  `vs_torch`: the time of torch's product alone over this
one's.  Writes results/gemm_epilogue.csv, or gemm_plain.csv with the geometric mean of `vs_torch` printed.
"""

from __future__ import annotations

import argparse
import functools
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

import common
import gemm_norm
import numpy as np

import cki
import cki.reference
from cki.ops.call import call

SHAPES = ("8192x1024x4096", "8192x4096x1024", "4096x4096x4096", "2048x4096x6144", "2048x1024x3072")
#: Large squares, and BERT-large's products at 512 to 16384 tokens.
PLAIN_SHAPES = (
    "4096x4096x4096", "8192x8192x8192",
    *(f"{rows}x{shape}" for rows in (512, 2048, 8192, 16384)
      for shape in ("1024x3072", "1024x1024", "1024x4096", "4096x1024")),
)  # fmt: skip
ACTIVATIONS = ("relu", "silu", "gelu_tanh", "gelu")
ROUNDS = 20
_LIMIT = 2.0**-7


class Inputs(NamedTuple):
    """Of one call: torch tensors.  half: y of a gated layer."""

    x: Any
    w: Any
    bias: Any
    residual: Any
    y: Any
    half: Any
    statistics: Any


def make_inputs(rows: int, depth: int, columns: int, seed: int) -> Inputs:
    """bf16; results hold NaN."""
    import torch

    generator = torch.Generator(device="cuda").manual_seed(seed)

    def normal(*size: int, scale: float = 1.0) -> Any:
        return (torch.randn(*size, generator=generator, device="cuda") * scale).bfloat16()

    def empty(*size: int, of: Any = torch.bfloat16) -> Any:
        return torch.full(size, float("nan"), device="cuda", dtype=of)

    return Inputs(
        normal(rows, depth), normal(depth, columns, scale=depth**-0.5), normal(columns), normal(rows, columns),
        empty(rows, columns), empty(rows, columns // 2), empty(rows, columns // 64, 2, of=torch.float32),
    )  # fmt: skip


def implementations() -> dict[str, Callable[[Inputs], Any]]:
    """By name; each returns what it has written."""
    import torch

    stored = gemm_norm.norm_linear(gemm_norm.as_chosen)

    def activated(name: Any) -> Callable[[Inputs], Any]:
        return lambda i: cki.linear(i.x, i.w, i.bias, activation=name, out=i.y)

    def with_statistics(i: Inputs) -> Any:
        return call(stored, (i.x, i.w, i.bias, i.residual, None), (None, "in_out"), (i.y, i.statistics))[0]

    return {
        "torch": lambda i: torch.matmul(i.x, i.w, out=i.y),
        "plain": lambda i: cki.linear(i.x, i.w, out=i.y),
        "bias": lambda i: cki.linear(i.x, i.w, i.bias, out=i.y),
        **{f"bias, {name}": activated(name) for name in ACTIVATIONS},
        "bias, residual": lambda i: cki.linear(i.x, i.w, i.bias, residual=i.residual, out=i.y),
        "bias, residual, statistics": with_statistics,
        "swiglu": lambda i: cki.gated_linear(i.x, i.w, out=i.half),
    }  # fmt: skip


def expected(name: str, i: Inputs, rows: list[int]) -> Any:
    """Rows of what an implementation should return, in float64."""

    def host(tensor: Any) -> Any:
        return tensor.double().cpu().numpy()

    x, w = host(i.x[rows]), host(i.w)
    if name == "swiglu":
        return cki.reference.gated_linear(x, w)
    words = name.split(", ")
    return cki.reference.linear(
        x, w, host(i.bias) if "bias" in words else None,
        activation=next((word for word in words if word in ACTIVATIONS), None),
        residual=host(i.residual[rows]) if "residual" in words else None,
    )  # fmt: skip


def check(name: str, run: Callable[[Inputs], Any], i: Inputs) -> float:
    """The largest error of some rows, relative to the largest value; ends when it is too large."""
    found = run(i)
    rows = sorted({*range(8), *range(len(found) - 8, len(found))})
    truth = expected(name, i, rows)
    error = float(np.abs(found[rows].double().cpu().numpy() - truth).max() / np.abs(truth).max())
    if not error <= _LIMIT or bool(found.isnan().any()):
        raise SystemExit(f"{name}: relative error {error:.2e}, at most {_LIMIT:.2e} is right")
    return error


def measure(rows: int, depth: int, columns: int, plain: bool) -> list[dict[str, Any]]:
    """Rows of one shape, all in turn.  plain: only products alone."""
    import torch

    nbytes = 2 * (depth * (rows + columns) + (1 if plain else 2) * rows * columns)
    inputs = common.rotated(lambda seed: (make_inputs(rows, depth, columns, seed),), nbytes, limit=6)
    variants = implementations()
    if plain:
        variants = {name: variants[name] for name in ("torch", "plain")}
    # Compiles several at a time; a thread's first call of torch makes the GPU its own.
    with ThreadPoolExecutor(initializer=functools.partial(torch.cuda.set_device, 0)) as pool:
        list(pool.map(lambda run: run(*inputs[0]), variants.values()))
    errors = {name: check(name, run, *inputs[0]) for name, run in variants.items()}
    times = common.graph_times_in_turn(variants, inputs, rounds=ROUNDS)
    return [
        common.row(
            "linear", f"{rows}x{depth}x{columns}", "bf16", name, timing, flops=2.0 * rows * depth * columns,
            error=f"{errors[name]:.1e}", of_plain=round(timing.median_us / times["plain"].median_us, 3),
            vs_torch=round(times["torch"].median_us / timing.median_us, 3),
        )
        for name, timing in times.items()
    ]  # fmt: skip


def main() -> None:
    """Measures and writes gemm_epilogue.csv."""
    parser = argparse.ArgumentParser(description="time of epilogues of products")
    parser.add_argument("--shape", action="append", help="ROWSxDEPTHxCOLUMNS; may be repeated")
    parser.add_argument("--plain", action="store_true", help="products alone")
    arguments = parser.parse_args()
    common.require_gpu()
    rows: list[dict[str, Any]] = []
    for shape in arguments.shape or (PLAIN_SHAPES if arguments.plain else SHAPES):
        m, k, n = (int(extent) for extent in shape.split("x"))
        rows += measure(m, k, n, arguments.plain)
    common.write_csv("gemm_plain" if arguments.plain else "gemm_epilogue", rows)
    ratios = [row["vs_torch"] for row in rows if row["implementation"] == "plain"]
    mean = np.exp(np.mean(np.log(ratios)))
    print(f"plain: {mean:.3f} of torch in the mean of {len(ratios)} shapes, least {min(ratios):.3f}")


if __name__ == "__main__":
    main()
