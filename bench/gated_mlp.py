"""A gated MLP, W_down(SiLU(W_gate x) * W_up x), with and without fusion, with and without a CUDA graph, beside torch's.

    python bench/gated_mlp.py                                  # 1024 -> 4096 -> 1024, x [1, 128, 1024] f16, and others
    python bench/gated_mlp.py --tokens 1 128 --hidden 1024 --inner 4096 --without compile

`cki, unfused` is four launches (gate, up, SiLU times, down), `cki` two (gate, up and SiLU in one,
`cki.gated_linear`), three for few tokens; `torch eager` is torch's module as written, `torch.compile` is mode
reduce-overhead, which has graphs of its own.  Few tokens show what graphs save (the host cannot keep up with the
device), many what fusion saves (a large product hides it).  Each output is compared with float64: rtol and atol 1e-2,
and our error may be twice eager torch's.

A time is the wall clock of many calls enqueued one after the other and a wait for the device, divided by their number:
host or device, whichever takes longer; all take turns.  graph_mb: device memory that the graph holds, its output
included, and gives back when it is dropped.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import common

import cki

TOKENS = (1, 8, 128, 2048, 8192)
#: Microseconds that the calls of one time take together, about.
_SPAN_US = 10_000.0


class Weights(NamedTuple):
    """Of the layer, as torch stores them: [out, in].  gate_up: both, one behind the other."""

    gate_up: Any
    down: Any

    @property
    def inner(self) -> int:
        return int(self.down.shape[1])


def make_weights(hidden: int, inner: int, device: str, dtype: Any) -> Weights:
    """The same for the same sizes."""
    import torch

    generator = torch.Generator().manual_seed(0)

    def normal(*shape: int) -> Any:
        return (torch.randn(shape, generator=generator) / shape[1] ** 0.5).to(device, dtype)

    return Weights(normal(2 * inner, hidden), normal(hidden, inner))


def eager(weights: Weights) -> Callable[[Any], Any]:
    """The module as a user writes it, in torch."""
    from torch.nn import functional

    gate, up = weights.gate_up[: weights.inner], weights.gate_up[weights.inner :]

    def run(x: Any) -> Any:
        gated = functional.silu(functional.linear(x, gate)) * functional.linear(x, up)
        return functional.linear(gated, weights.down)

    return run


def unfused(weights: Weights) -> Callable[[Any], Any]:
    """One launch an operation, by CKI."""
    gate, up = weights.gate_up[: weights.inner], weights.gate_up[weights.inner :]

    def run(x: Any) -> Any:
        first = cki.linear(x, gate, weight_layout="out_in")
        gated = cki.bias_activation(
            first, multiplier=cki.linear(x, up, weight_layout="out_in"), activation="silu"
        )
        return cki.linear(gated, weights.down, weight_layout="out_in")

    return run


def fused(weights: Weights) -> Callable[[Any], Any]:
    """Gate, up and their product in one launch where that is faster."""

    def run(x: Any) -> Any:
        gated = cki.gated_linear(x, weights.gate_up, activation="silu", weight_layout="out_in")
        return cki.linear(gated, weights.down, weight_layout="out_in")

    return run


def check(functions: Mapping[str, Callable[[Any], Any]], weights: Weights, x: Any) -> dict[str, float]:
    """The largest error of each, of the largest value.  Raises SystemExit when one of ours is wrong."""
    exact = eager(Weights(weights.gate_up.double(), weights.down.double()))(x.double())
    scale = exact.abs().max().item()
    errors = {}
    for name, function in functions.items():
        error = (function(x).double() - exact).abs()
        errors[name] = error.max().item() / scale
        if not (error <= 1e-2 + 1e-2 * exact.abs()).all():
            raise SystemExit(f"{name}: largest error {errors[name]:.2e}, beyond rtol and atol 1e-2")
    for name in ("cki", "cki, unfused"):
        if not errors[name] <= 2 * errors["torch eager"] + 1e-5:
            raise SystemExit(f"{name}: error {errors[name]:.2e}, eager torch's {errors['torch eager']:.2e}")
    return errors


def in_turn(
    calls: Mapping[str, Callable[[], object]], rounds: int, synchronize: Callable[[], object]
) -> dict[str, common.Timing]:
    """Microseconds of a call in a row of them, each variant once a round."""

    def elapsed_us(call: Callable[[], object], count: int) -> float:
        synchronize()
        begin = time.perf_counter()
        for _ in range(count):
            call()
        synchronize()
        return (time.perf_counter() - begin) / count * 1e6

    counts = {}
    for name, call in calls.items():
        elapsed_us(call, 10)
        counts[name] = max(3, min(500, round(_SPAN_US / elapsed_us(call, 10))))
    samples: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(rounds):
        for name, call in calls.items():
            samples[name].append(elapsed_us(call, counts[name]))
    return {name: common.summary(values) for name, values in samples.items()}


def held_memory(function: Callable[[Any], Any], x: Any) -> tuple[Any, float]:
    """A captured graph, and the megabytes that it holds.  Raises SystemExit when a dropped one holds any."""
    import torch

    def allocated() -> int:
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
        return int(torch.cuda.memory_reserved())

    cki.capture(function, x).close()  # what the first call of all keeps
    before = allocated()
    graph = cki.capture(function, x)
    held = allocated() - before
    graph.close()
    del graph
    if allocated() > before:
        raise SystemExit(f"a dropped graph holds {allocated() - before} bytes")
    return cki.capture(function, x), held / 2**20


def measure(tokens: int, hidden: int, inner: int, rounds: int, with_compile: bool) -> list[dict[str, object]]:
    """A row for each way of computing it; vs_cki is its time over that of `cki, graph`."""
    import torch

    weights = make_weights(hidden, inner, "cuda", torch.float16)
    x = torch.randn(1, tokens, hidden, generator=torch.Generator().manual_seed(1)).to("cuda", torch.float16)
    plain = {"torch eager": eager(weights), "cki, unfused": unfused(weights), "cki": fused(weights)}
    functions = dict(plain)
    if with_compile:
        torch._dynamo.reset()
        functions["torch.compile"] = torch.compile(eager(weights), mode="reduce-overhead", fullgraph=True)
    with torch.inference_mode():
        errors = check(functions, weights, x)
        calls: dict[str, Callable[[], object]] = {
            name: lambda f=function: f(x)  # type: ignore[misc]
            for name, function in functions.items()
        }
        graphs, memory, launches = [], {}, {}
        for name, function in plain.items():
            graph, memory[f"{name}, graph"] = held_memory(function, x)
            graphs.append(graph)
            calls[f"{name}, graph"] = graph.replay
            launches[f"{name}, graph"] = graph.num_kernels
        timings = in_turn(calls, rounds, torch.cuda.synchronize)
        for graph in graphs:
            graph.close()
    ours, flops = timings["cki, graph"].median_us, 6.0 * tokens * hidden * inner
    return [
        common.row(
            "gated_mlp", f"tokens={tokens} hidden={hidden} inner={inner}", "f16", name, timing, flops=flops,
            vs_cki=round(timing.median_us / ours, 3), error=f"{errors[name.removesuffix(', graph')]:.1e}",
            launches=launches.get(name, ""), graph_mb=round(memory[name], 2) if name in memory else "",
        )
        for name, timing in timings.items()
    ]  # fmt: skip


def main(argv: Sequence[str] | None = None) -> None:
    """Measures and writes gated_mlp.csv."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--tokens", type=int, nargs="+", default=TOKENS)
    parser.add_argument("--hidden", type=int, default=1024)
    parser.add_argument("--inner", type=int, default=4096)
    parser.add_argument("--iters", type=int, default=15, help="timed rows of calls of each")
    parser.add_argument("--without", choices=("compile",), action="append", default=[])
    options = parser.parse_args(argv)
    if min(options.hidden, options.inner, options.iters, *options.tokens) < 1:
        parser.error("all sizes are 1 or more")
    common.require_gpu()
    rows = []
    for tokens in options.tokens:
        rows += measure(
            tokens, options.hidden, options.inner, options.iters, "compile" not in options.without
        )
        print(f"measured {tokens} tokens", flush=True)
    common.write_csv("gated_mlp", rows)


if __name__ == "__main__":
    main()
