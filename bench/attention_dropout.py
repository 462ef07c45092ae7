"""Attention with dropout of weights: the generic kernel, the Hopper one by its tiles, and PyTorch's flash kernel.

    python bench/attention_dropout.py
    python bench/attention_dropout.py --shape 4x4096x16x128:causal

Both of ours drop the same weights, so their outputs are compared before they are timed; `without` is our choice with
no dropout, the cost of the random numbers.  bf16, replays in turn; writes results/attention_dropout.csv.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import attention
import common
from attention import Shape

import cki
from cki.device import sim_device
from cki.heuristics.attention import AttentionTiles, choose_tiles, padded
from cki.heuristics.attention_hopper import HopperTiles
from cki.ops.attention import ATTENTION, plan_attention
from cki.ops.attention_dropout import dropout_of
from cki.ops.attention_hopper import workspace_of
from cki.ops.call import call
from cki.ops.spec import OpSpec
from cki.plan import Plan

SHAPES = tuple(
    f"{16384 // n}x{n}x{2048 // d}x{d}{c}" for d in (64, 128) for c in ("", ":causal") for n in (512, 4096)
)
P = 0.1


@functools.cache
def spec_with_tiles(tiles: AttentionTiles | HopperTiles) -> OpSpec:
    """cki.attention's operation with these tiles."""

    def plan(problem: Any, outputs: Any, device: Any) -> Plan:
        steps = plan_attention(
            problem["q"], problem["k"], problem["v"], outputs["out"], device=device, tiles=tiles,
            causal=problem.attribute("causal"), dropout=dropout_of(problem),
        )  # fmt: skip
        return Plan(steps, workspace_of(steps))

    return dataclasses.replace(ATTENTION, plan=plan)


def tiles_call(shape: Shape, tiles: AttentionTiles | HopperTiles) -> Callable[..., Any]:
    """A function of q, k, v, out, seed and offset."""
    given = {"causal": shape.causal, "dropout_p": P}
    attributes = tuple(given.get(item.name, item.default) for item in ATTENTION.attributes)
    spec = spec_with_tiles(tiles)

    def run(q: Any, k: Any, v: Any, out: Any, seed: Any, offset: Any) -> Any:
        return call(spec, (q, k, v, *(None,) * 4, seed, offset, *(None,) * 3), attributes, (out, None))

    return run


def flash_call(shape: Shape) -> Callable[..., Any]:
    """PyTorch's."""
    import torch
    from torch.nn.attention import SDPBackend, sdpa_kernel

    def run(q: Any, k: Any, v: Any, *_: Any) -> Any:
        with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
            swapped = (t.transpose(1, 2) for t in (q, k, v))
            return torch.nn.functional.scaled_dot_product_attention(
                *swapped, is_causal=shape.causal, dropout_p=P
            )

    return run


def hopper_tiles(shape: Shape) -> HopperTiles:
    """Two consumers: three spill with the random numbers' registers."""
    keys = 128 if shape.dim <= 128 else 96 if shape.dim <= 192 else 80
    return HopperTiles(2, keys, 3 if shape.dim <= 64 else 2, schedule="dynamic")


def measure(shape: Shape) -> list[dict[str, object]]:
    """Rows of one shape."""
    import torch

    def make(index: int) -> tuple[Any, ...]:
        counters = [torch.tensor([number], device="cuda") for number in (index, 7)]
        return (*attention.make_inputs(shape, index), *counters)

    inputs = common.rotated(make, shape.nbytes, limit=4)
    dim = padded(shape.dim)
    runs = {
        "hopper": tiles_call(shape, hopper_tiles(shape)),
        "generic": tiles_call(
            shape, choose_tiles(shape.tokens, dim, dim, 2, not shape.causal, sim_device("sm_90a"))
        ),
    }
    first, second = (runs[name](*inputs[0]).clone() for name in ("hopper", "generic"))
    error, largest = (first - second).abs().max().item(), second.abs().max().item()
    if not error <= 0.02 * largest:
        raise SystemExit(f"{shape}: the kernels differ by {error:.3g} of {largest:.3g}")
    runs["without"] = lambda q, k, v, out, *_: cki.attention(q, k, v, causal=shape.causal, out=out)
    runs["torch flash"] = flash_call(shape)
    times = common.graph_times_in_turn(runs, inputs, rounds=10)
    ours = times["hopper"].median_us
    return [
        common.row(
            "attention dropout", str(shape), "bf16", name, timing, flops=shape.flops,
            over_hopper=round(timing.median_us / ours, 3),
        )
        for name, timing in times.items()
    ]  # fmt: skip


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--shape", action="append", help="BATCHxTOKENSxHEADSxHEAD_DIM[:causal]")
    options = parser.parse_args(argv)
    common.require_gpu()
    rows: list[dict[str, object]] = []
    for text in options.shape or SHAPES:
        rows += measure(attention.parse(text, "bf16"))
        print(f"measured {text}", flush=True)
    common.write_csv("attention_dropout", rows)


if __name__ == "__main__":
    main()
