"""Where the time of a forward pass goes: each launch of a layer, measured inside the captured graph.

torch's profiler (CUPTI) times the kernels of a few replays; launches at the same place of all layers are one line,
beside what `bert_plan.py` expects of it.  A kernel that starts before the one before it has ended (programmatic
dependent launch) is charged from that one's end on, so that the lines add up; what no kernel fills is the line of gaps.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, NoReturn

import bert_plan
from bert_model import Model, Problem

REPLAYS = 5


class Kernel(NamedTuple):
    """One execution, in microseconds on the profiler's clock."""

    name: str
    start: float
    end: float


class Share(NamedTuple):
    """Microseconds a forward pass."""

    name: str
    kernel: str
    us: float


def trace(replay: Callable[[], object], replays: int) -> list[Kernel]:
    """The kernels of some replays, in the order in which they started."""
    import torch
    from torch.autograd import DeviceType

    # torch's profiler takes CUPTI down after each use, by default with CUDA 12.6 and later.  Graphs that it has traced
    # outlive that here, and their end then corrupted the heap at times (pytorch/pytorch#112507 is of that kind): see
    # `leave`.
    os.environ.setdefault("TEARDOWN_CUPTI", "0")
    activities = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
    with torch.profiler.profile(activities=activities) as profiler:
        for _ in range(replays):
            replay()
        torch.cuda.synchronize()
    kernels = [
        Kernel(event.name, event.time_range.start, event.time_range.end)
        for event in profiler.events()
        if event.device_type == DeviceType.CUDA and not event.name.startswith(("Memcpy", "Memset"))
    ]
    return sorted(kernels, key=lambda kernel: kernel.start)


def breakdown(
    kernels: Sequence[Kernel], model: Model, problem: Problem, launches: int, replays: int = REPLAYS
) -> list[Share]:
    """Time of the embeddings, of each launch of the layers (all layers together), of the last norm, and of gaps.

    launches: of a forward pass.  Raises SystemExit when the kernels are not those that the plan has.
    """
    if len(kernels) != launches * replays:
        raise SystemExit(f"{problem}: the profiler saw {len(kernels)} kernels, not {replays} x {launches}")
    layer = bert_plan.launches(model, problem)
    last = 1  # norm: the pre-LN model's, or the post-LN model's last layer's, which no product has
    # The embeddings, and in pre-LN models the first layer's first norm.
    first = launches - model.layers * len(layer) - last
    places = [
        *(("embeddings", "") for _ in range(first)),
        *((one.name, one.kernel) for _ in range(model.layers) for one in layer),
        *(("last norm", "layer_norm") for _ in range(last)),
    ]
    # Two norms of a layer have one name: they are told apart by their place.
    number = [-1] * first + [i for _ in range(model.layers) for i in range(len(layer))] + [-2] * last
    times: dict[tuple[int, str, str], float] = {}
    gaps = 0.0
    for replay in range(replays):
        until = kernels[replay * launches].start
        for index, (name, expected) in enumerate(places):
            kernel = kernels[replay * launches + index]
            if expected and expected not in kernel.name:
                raise SystemExit(
                    f"{problem}: launch {index} ran {kernel.name}, the plan has {expected} ({name})"
                )
            key = (number[index], name, expected or kernel.name)
            gaps += max(0.0, kernel.start - until)
            times[key] = times.get(key, 0.0) + max(0.0, kernel.end - max(kernel.start, until))
            until = max(until, kernel.end)
    shares = [Share(name, kernel, us / replays) for (_, name, kernel), us in times.items()]
    return [*shares, Share("gaps", "", gaps / replays)]


def table(shares: Sequence[Share], model: Model, problem: Problem) -> str:
    """As Markdown: microseconds a layer (for a layer's launches) and a pass, share, and the plan's expectation."""
    expected = iter(bert_plan.launches(model, problem))
    total = sum(share.us for share in shares)
    lines = [
        f"{problem}:", "", "| launch | kernel | us a layer | us a pass | share | predicted us | roof us |",
        "| --- | --- | --- | --- | --- | --- | --- |",
    ]  # fmt: skip
    for share in shares:
        kernel = f"`{share.kernel}`" if share.kernel else ""
        own = predicted = roof = ""
        if share.name not in ("embeddings", "last norm", "gaps"):
            one = next(expected)
            own, roof = f"{share.us / model.layers:.1f}", f"{one.roof_us:.1f}"
            predicted = "" if one.predicted_us is None else f"{one.predicted_us:.1f}"
        lines.append(
            f"| {share.name} | {kernel} | {own} | {share.us:.0f} | {share.us / total:.1%} | {predicted} | {roof} |"
        )
    return "\n".join([*lines, f"| all | | | {total:.0f} | | | |", ""])


def leave() -> NoReturn:
    """Ends the process at once: with graphs that were traced, an orderly end aborts at times, all results being out."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)


def profile(implementation: Any, model: Model, problem: Problem) -> str:
    """The table of a prepared `bert_large.Cki`."""
    implementation.prepare(problem)
    # The first replay pays for the profiler's start.
    kernels = trace(implementation.replay, REPLAYS + 1)[implementation.launches :]
    shares = breakdown(kernels, model, problem, implementation.launches)
    implementation.close()
    return table(shares, model, problem)
