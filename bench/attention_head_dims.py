"""Head dimensions between the usual ones: 32, 80, 96, 160, 192, at 16384 tokens of width about 2048, bf16.

    python bench/attention_head_dims.py                              # 60 cells, about 2 minutes on an H200
    python bench/attention_head_dims.py --tokens 512 2048 --dims 80 192

heads = round(2048 / head_dim).  A peer (cuDNN in torch, FA3 where `flash_attn_interface` imports) is timed at the same
head dimension, or at the next larger one of PEER_DIMS that it takes, on tensors of that size; the `implementation`
column names it.  Each of our calls is compared with float64 first.  All are replayed in turn; the last lines are the
best peer's time over ours of each cell, and the geometric mean.  Writes results/attention_head_dims.csv.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import attention
import attention_hopper
import common
import numpy as np
from attention import Shape

from cki import cache, dtypes
from cki.device import sim_device
from cki.kernel import KernelSpec
from cki.operand import dense
from cki.ops.attention import plan_attention

DIMS = (32, 80, 96, 160, 192)
TOKENS = (512, 1024, 2048, 4096, 8192, 16384)
#: What peers are compiled for.
PEER_DIMS = (64, 96, 128, 192, 256)


def cells(dims: Sequence[int], tokens: Sequence[int]) -> list[Shape]:
    """Full and causal: 16384 tokens of width about 2048."""
    return [
        Shape(16384 // n, n, round(2048 / d), d, causal, "bf16")
        for d in dims
        for causal in (False, True)
        for n in tokens
    ]


def compile_ahead(shapes: Sequence[Shape]) -> None:
    """Fills the cache with the kernels, several at a time."""
    device = sim_device("sm_90a")  # an H200's sizes
    kernels: dict[KernelSpec, None] = {}
    for shape in shapes:
        size = (shape.batch, shape.tokens, shape.heads, shape.dim)
        q, k, v, out = (dense(name, size, dtypes.bf16) for name in ("q", "k", "v", "out"))
        for step in plan_attention(q, k, v, out, device=device, causal=shape.causal):
            kernels[step.kernel] = None
    with ThreadPoolExecutor() as pool:
        list(pool.map(lambda kernel: cache.get(kernel, "sm_90a"), kernels))


def supported(run: Callable[..., Any], shape: Shape) -> int | None:
    """The head dimension at which a peer takes this shape: its own or the least larger one; None: it takes none."""
    for dim in (shape.dim, *(d for d in PEER_DIMS if d > shape.dim)):
        try:
            run(*attention.make_inputs(shape._replace(batch=1, tokens=128, dim=dim), 0))
        except Exception:  # whatever a peer raises for what it does not take
            continue
        return dim
    return None


def peers(shape: Shape) -> dict[str, tuple[int, Callable[..., Any]]]:
    """(head dimension, function) of each peer that is there."""
    runs = {"cudnn": attention.torch_call(shape, "cudnn"), "fa3": attention_hopper.fa3_call(shape)}
    found = {name: (supported(run, shape), run) for name, run in runs.items() if run is not None}
    return {name: (dim, run) for name, (dim, run) in found.items() if dim is not None}


def measure(shape: Shape, rounds: int) -> list[dict[str, object]]:
    """Rows of one shape, cki first."""
    others = peers(shape)
    wider = sorted({dim for dim, _ in others.values()} - {shape.dim})

    def make(seed: int) -> tuple[Any, ...]:
        own = attention.make_inputs(shape, seed)
        return own, {shape.dim: own} | {
            dim: attention.make_inputs(shape._replace(dim=dim), seed) for dim in wider
        }

    inputs = common.rotated(make, shape.nbytes, limit=8)
    run = attention.cki_call(shape)
    attention.check(shape, run, inputs[0][0], "cki")
    variants: dict[str, Callable[..., Any]] = {"cki": lambda own, by_dim: run(*own)}
    for name, (dim, peer) in others.items():
        variants[f"{name} at {dim}"] = lambda own, by_dim, peer=peer, dim=dim: peer(*by_dim[dim])
    times = common.graph_times_in_turn(variants, inputs, rounds=rounds)
    ours = times["cki"].median_us
    return [
        common.row(
            "attention", str(shape), shape.dtype, name, timing, nbytes=shape.nbytes, flops=shape.flops,
            over_cki=round(timing.median_us / ours, 3),
        )
        for name, timing in times.items()
    ]  # fmt: skip


def summary(rows: Sequence[dict[str, Any]]) -> list[str]:
    """The best peer's time over ours of each problem, and their geometric mean."""
    best: dict[str, float] = {}
    for row in rows:
        if row["implementation"] != "cki":
            best[row["problem"]] = min(best.get(row["problem"], math.inf), row["over_cki"])
    lines = [f"{ratio:.3f}  {problem}" for problem, ratio in best.items()]
    if best:
        mean = math.exp(float(np.mean(np.log(list(best.values())))))
        lines.append(f"{mean:.3f}  geometric mean of {len(best)} shapes, least {min(best.values()):.3f}")
    return lines


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--dims", type=int, nargs="+", default=DIMS)
    parser.add_argument("--tokens", type=int, nargs="+", default=TOKENS)
    parser.add_argument("--rounds", type=int, default=20)
    options = parser.parse_args(argv)
    common.require_gpu()
    shapes = cells(options.dims, options.tokens)
    compile_ahead(shapes)
    rows: list[dict[str, object]] = []
    for shape in shapes:
        found = measure(shape, options.rounds)
        rows += found
        print("\n".join(summary(found)[:1]), flush=True)
    common.write_csv("attention_head_dims", rows)
    print("\n".join(summary(rows)))


if __name__ == "__main__":
    main()
