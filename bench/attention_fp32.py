"""Attention of fp32 tensors: ours, and torch's SDPA by each backend that takes fp32, in one run.

    python bench/attention_fp32.py                                   # 22 cells, about 30 s on an H200
    python bench/attention_fp32.py --dims 64 --tokens 512 2048

16384 tokens of width 2048, full and causal, and few tokens.  `cki` is the public function, `generic` the kernel on
mma.sync, `wgmma` the Hopper kernel where it is not the choice.  torch's `math` (TF32 off) writes the matrix of logits;
flash and cuDNN refuse fp32.  Each result is compared with float64 on some rows: `error` is the largest difference over
the largest value.  Ours must keep the tests' bound.  All but `math` are replayed in turn; `over_cki` is a time over
ours.

The last row is a product of fp32 matrices by `cki.linear`, 3xTF32 by wgmma: the rate at which tensor cores compute
in fp32's accuracy where operands lie as tf32 wgmma wants them.  Writes results/attention_fp32.csv.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import attention
import common
import gemm
from attention import Shape

from cki.device import cuda_device
from cki.heuristics.attention import choose_tiles
from cki.heuristics.attention_fp32 import MIN_QUERIES, choose_fp32_tiles
from cki.ops.linear_fp32 import Fp32Tile

DIMS, TOKENS = (64, 128), (128, 256, 512, 2048, 8192)
#: Tiles for less than one round of an H200's SMs, and for few.
SMALL = (Shape(4, 256, 16, 64, False, "f32"), Shape(1, 2048, 16, 128, True, "f32"))
BACKENDS = ("efficient", "math")
#: Rows, depth and columns of the product: a projection of the same tokens.
PRODUCT = gemm.LinearProblem(16384, 2048, 2048, "", "f32", "out_in")


def cells(dims: Sequence[int], tokens: Sequence[int]) -> list[Shape]:
    """Full and causal, 16384 tokens of width 2048."""
    return [
        Shape(16384 // n, n, 2048 // d, d, causal, "f32")
        for d in dims
        for causal in (False, True)
        for n in tokens
    ]


def our_calls(shape: Shape) -> dict[str, Callable[..., Any]]:
    """The choice, and each of our kernels."""
    import cupy

    device = cuda_device(cupy.cuda.Device().id)
    generic = choose_tiles(shape.tokens, shape.dim, shape.dim, 4, True, device)
    calls = {"cki": attention.cki_call(shape), "generic": attention.cki_call(shape, generic)}
    if shape.tokens < MIN_QUERIES:
        tiles = choose_fp32_tiles(shape.tokens, shape.batch * shape.heads, shape.dim, True, device)
        calls["wgmma"] = attention.cki_call(shape, tiles)
    return calls


def torch_call(shape: Shape, backend: str) -> Callable[..., Any]:
    """`f(q, k, v, out)` by torch's SDPA; `out` is left alone."""
    import torch
    from torch.nn.attention import SDPBackend, sdpa_kernel

    chosen = SDPBackend.MATH if backend == "math" else SDPBackend.EFFICIENT_ATTENTION

    def run(q: Any, k: Any, v: Any, out: Any) -> Any:
        with sdpa_kernel(chosen):
            swapped = (t.transpose(1, 2) for t in (q, k, v))
            result = torch.nn.functional.scaled_dot_product_attention(*swapped, is_causal=shape.causal)
        return result.transpose(1, 2)

    return run


def error_of(shape: Shape, run: Callable[..., Any], inputs: Sequence[Any]) -> float:
    """The largest error of some rows over the largest value, against float64."""
    import torch

    last = shape.tokens
    rows = sorted({*range(4), 63, 64, 100, last // 2, *range(last - 4, last)})
    q, k, v, out = inputs
    truth = attention.attend_rows(q, k, v, rows, shape.causal, torch.float64)
    result = run(q, k, v, out)[:, rows]
    return float((result - truth).abs().max() / truth.abs().max())


def measure(shape: Shape, ours: Mapping[str, Callable[..., Any]], rounds: int) -> list[dict[str, object]]:
    """Rows of one shape.  ours: implementations held to the tests' bound, "cki" first."""
    import torch

    inputs = common.rotated(lambda seed: attention.make_inputs(shape, seed), shape.nbytes, limit=2)
    variants = dict(ours)
    for name, run in ours.items():
        attention.check(shape, run, inputs[0], name)
    for backend in BACKENDS:
        variants[f"torch {backend}"] = torch_call(shape, backend)
    errors = {name: error_of(shape, run, inputs[0]) for name, run in variants.items()}
    math = variants.pop("torch math")  # by itself, in one graph: two would hold 100 GB of logits
    times = common.graph_times_in_turn(variants, inputs, rounds=rounds)
    torch.cuda.empty_cache()
    times["torch math"] = common.graph_time(math, inputs[:1], framework="torch", calls=1, replays=rounds)
    return [
        common.row(
            "attention", str(shape), "f32", name, timing, nbytes=shape.nbytes, flops=shape.flops,
            over_cki=round(timing.median_us / times["cki"].median_us, 3), error=f"{errors[name]:.1e}",
        )
        for name, timing in times.items()
    ]  # fmt: skip


def measure_product() -> list[dict[str, object]]:
    """The row of `PRODUCT`."""
    inputs = common.rotated(lambda seed: gemm.make_inputs(PRODUCT, seed), PRODUCT.nbytes, limit=2)
    run = gemm.cki_call(PRODUCT, Fp32Tile(3))
    error = gemm.check(PRODUCT, run, inputs[0], "linear")
    timing = common.graph_time(run, inputs, framework="torch", replays=10)
    problem = f"{PRODUCT.rows}x{PRODUCT.depth}x{PRODUCT.columns}"
    return [
        common.row(
            "linear", problem, "f32", "cki wgmma", timing, nbytes=PRODUCT.nbytes, flops=PRODUCT.flops,
            error=f"{error:.1e}",
        )
    ]  # fmt: skip


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--dims", type=int, nargs="+", default=DIMS)
    parser.add_argument("--tokens", type=int, nargs="+", default=TOKENS)
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args(argv)
    common.require_gpu()
    import torch

    torch.backends.cuda.matmul.allow_tf32 = False
    rows: list[dict[str, object]] = []
    few = SMALL if options.tokens == TOKENS else ()
    for shape in (*cells(options.dims, options.tokens), *few):
        rows += measure(shape, our_calls(shape), options.rounds)
        print(f"measured {shape}", flush=True)
    common.write_csv("attention_fp32", rows + measure_product())


if __name__ == "__main__":
    main()
