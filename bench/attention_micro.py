"""Attention alone: CKI's kernel against torch's unfused one (matmul, softmax, matmul) and its fused one, in turn.

    python bench/attention_micro.py                               # BERT-large's heads, 4 x 128 to 4 x 4096, fp16
    python bench/attention_micro.py --seq-lens 512 2048 --batch 4 --heads 16 --head-dim 64 --causal --dtype bf16

The unfused one writes all scores to memory, as a framework without a fused kernel does; SDPA is torch's own choice of
backend.  Inputs are [batch, tokens, heads, head_dim], as a projection leaves them.  Ours is compared with float64 on
some rows first (bench/attention.py); one that is wrong ends the program.  Method: CUDA graphs replayed in turn over
inputs that together exceed the L2 cache three times (bench/common.py).
"""

from __future__ import annotations

import argparse
import functools
from collections.abc import Callable, Sequence
from typing import Any

import attention
import common
from attention import Shape

SEQ_LENS = (128, 512, 1024, 2048, 4096)


def unfused(shape: Shape) -> Callable[..., Any]:
    """`f(q, k, v, out)` as four operations of torch (scale, matmul, softmax, matmul), five where causal."""
    import torch

    scale = shape.dim**-0.5

    @functools.cache
    def hidden(device: Any) -> Any:
        """Made by the first call, which no graph holds."""
        return torch.ones(shape.tokens, shape.tokens, dtype=torch.bool, device=device).triu(1)

    def run(q: Any, k: Any, v: Any, out: Any) -> Any:
        q, k, v = (tensor.transpose(1, 2) for tensor in (q, k, v))
        scores = torch.matmul(q * scale, k.transpose(2, 3))
        if shape.causal:
            scores.masked_fill_(hidden(q.device), float("-inf"))
        return torch.matmul(torch.softmax(scores, dim=-1), v).transpose(1, 2)

    return run


def sdpa(shape: Shape) -> Callable[..., Any]:
    """`f(q, k, v, out)` by torch's fused attention, whichever kernel it takes."""
    import torch

    def run(q: Any, k: Any, v: Any, out: Any) -> Any:
        swapped = (tensor.transpose(1, 2) for tensor in (q, k, v))
        fused = torch.nn.functional.scaled_dot_product_attention
        return fused(*swapped, is_causal=shape.causal).transpose(1, 2)

    return run


def measure(shape: Shape, rounds: int) -> list[dict[str, object]]:
    """Three rows; vs_unfused and vs_sdpa are those times over ours."""
    inputs = common.rotated(lambda seed: attention.make_inputs(shape, seed), shape.nbytes, limit=16)
    variants = {
        "cki": attention.cki_call(shape),
        "torch unfused": unfused(shape),
        "torch SDPA": sdpa(shape),
    }
    attention.check(shape, variants["cki"], inputs[0], "cki")
    timings = common.graph_times_in_turn(variants, inputs, rounds=rounds)
    ours = timings["cki"].median_us
    ratios = {
        "vs_unfused": round(timings["torch unfused"].median_us / ours, 3),
        "vs_sdpa": round(timings["torch SDPA"].median_us / ours, 3),
    }
    return [
        common.row(
            "attention_micro", str(shape), shape.dtype, name, timing, nbytes=shape.nbytes, flops=shape.flops,
            **(ratios if name == "cki" else {}),
        )
        for name, timing in timings.items()
    ]  # fmt: skip


def main(argv: Sequence[str] | None = None) -> None:
    """Measures and writes attention_micro.csv."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seq-lens", type=int, nargs="+", default=SEQ_LENS, help="tokens of a sequence")
    parser.add_argument("--batch", type=int, default=4)
    parser.add_argument("--heads", type=int, default=16)
    parser.add_argument("--head-dim", type=int, default=64)
    parser.add_argument("--causal", action="store_true")
    parser.add_argument("--dtype", choices=sorted(attention.TORCH), default="f16")
    parser.add_argument("--iters", type=int, default=20, help="timed replays of each graph")
    options = parser.parse_args(argv)
    if min(options.batch, options.heads, options.head_dim, options.iters, *options.seq_lens) < 1:
        parser.error("all sizes are 1 or more")
    common.require_gpu()
    rows = []
    for seq in options.seq_lens:
        shape = Shape(options.batch, seq, options.heads, options.head_dim, options.causal, options.dtype)
        rows += measure(shape, options.iters)
        print(f"measured {shape}", flush=True)
    common.write_csv("attention_micro", rows)


if __name__ == "__main__":
    main()
