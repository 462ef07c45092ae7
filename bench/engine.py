"""The engine: time of a decode step, on the shapes of Qwen3-8B and SmolLM2 with random weights.

    python bench/engine.py                                         # both models, batches 1, 4, 16 and 64
    python bench/engine.py --models qwen3-8b --batches 1 4 --budget 55
    python bench/engine.py --compile-only                          # fill the kernel cache, measure nothing
    python bench/engine.py --transformers eager compiled           # rows of transformers beside

Kernels are compiled first, by all cores at once.  Every row is preceded by its gates (`engine_gates`): the graph does
what its launches do, and two layers of the same shapes have the logits of torch's fp32.  A row that fails them is not
measured.  Rows come in the order of importance; with `--budget` those are left out for which the time does not suffice.

    device   the step's graph alone, replayed between two events
    step     wall clock of chained steps, host work and tables included, median over steps
    of_copy  bytes that the step must read (weights once, keys and values) a second, over the rate of a device copy;
             roof_us is the time at that rate
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import common
import engine_gates
import engine_models

from cki import cache, driver
from cki.device import cuda_device
from cki.engine.model import DecoderModel, StepRow

STEPS = 48
GATE_LAYERS = 2
#: How much farther from fp32 a step may be than torch's own in the same type.
_MOST_DISTANCE = 2.0

Row = dict[str, object]


class Clock:
    """Seconds since the start, printed with every line; what is left of the budget."""

    def __init__(self, budget: float | None) -> None:
        self._start, self._budget = time.perf_counter(), budget
        self._last = 0.0

    def say(self, text: str) -> None:
        """Print a line with the time."""
        print(f"[{time.perf_counter() - self._start:6.1f} s] {text}", flush=True)

    def allows(self, like_before: float) -> bool:
        """Whether something that takes so many seconds still fits in."""
        return self._budget is None or time.perf_counter() - self._start + like_before < self._budget


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    names = list(engine_models.SHAPES)
    parser.add_argument("--models", nargs="+", choices=names, default=names)
    parser.add_argument("--batches", nargs="+", type=int, default=[1, 4, 16, 64])
    parser.add_argument("--context", type=int, default=1024, help="tokens of each sequence, from 1 on")
    parser.add_argument("--layers", type=int, help="fewer than the model has, for a quick look")
    parser.add_argument("--budget", type=float, help="seconds after which no other row is begun")
    parser.add_argument("--compile-only", action="store_true", help="compile the kernels of all rows and end")
    parser.add_argument(
        "--variants", nargs="+", choices=list(engine_models.VARIANTS), default=["default"],
        help="plain: norms and gates are launches; decode: inside `linear_decode`; "
        "fp8: e4m3 weights; fp8_kv: and an e4m3 cache",
    )  # fmt: skip
    parser.add_argument("--transformers", nargs="*", choices=("eager", "compiled"), default=[])
    arguments = parser.parse_args(argv)
    clock = Clock(arguments.budget)
    device = cuda_device(0)
    configs = {name: engine_models.config_of(name, arguments.layers) for name in arguments.models}
    kernels = [
        kernel for config in configs.values() for variant in arguments.variants
        for kernel in engine_models.step_kernels(config, arguments.batches, device, **engine_models.VARIANTS[variant])
    ]  # fmt: skip
    seconds = engine_models.compile_ahead(kernels, driver.native_arch(0))
    clock.say(f"{len(set(kernels))} kernels compiled or found in {seconds:.1f} s")
    if arguments.compile_only:
        return
    common.require_gpu()
    copy = copy_rate()
    clock.say(f"a copy moves {copy:.0f} GB/s")
    rows: list[Row] = []
    try:
        for name in arguments.models:
            for variant in arguments.variants:
                rows += model_rows(name, variant, arguments, copy, clock)
        rows += peer_rows(arguments, clock)
    finally:
        if rows:
            common.write_csv("engine", rows)


def copy_rate(nbytes: int = 1 << 30) -> float:
    """GB/s of a device copy, bytes read and written: the best of torch's copy and an element kernel."""
    import torch

    source = torch.ones(nbytes // 4, device="cuda")
    target = torch.empty_like(source)

    def rate(call: Callable[[], object]) -> float:
        times = []
        for _ in range(8):
            start, stop = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            start.record()
            call()
            stop.record()
            stop.synchronize()
            times.append(start.elapsed_time(stop))
        return float(2 * nbytes / sorted(times[2:])[2] / 1e6)

    return max(rate(lambda: target.copy_(source)), rate(lambda: torch.add(source, 1.0, out=target)))


def model_rows(
    name: str, variant: str, arguments: argparse.Namespace, copy: float, clock: Clock
) -> Iterator[Row]:
    """Rows of one model, batch after batch."""
    device, context = cuda_device(0), arguments.context
    most = max(arguments.batches)
    sizes: dict[str, Any] = {
        "context": context + STEPS + 64,
        "sequences": most,
        **engine_models.VARIANTS[variant],
    }
    short = engine_models.make_model(engine_models.config_of(name, GATE_LAYERS), device, **sizes)
    model = engine_models.make_model(engine_models.config_of(name, arguments.layers), device, **sizes)
    clock.say(f"{name}: weights of {model.weight_nbytes / 1e9:.2f} GB are there")
    took = 0.0
    for batch in arguments.batches:
        if not clock.allows(took):
            clock.say(f"{name} batch {batch} and what follows is left out")
            return
        start = time.perf_counter()
        if passes(name, short, model, batch, context, clock):
            for row in decode_rows(name, model, batch, context, copy):
                yield {**row, "variant": variant}
                clock.say(
                    f"{name} {variant} batch {batch}: "
                    f"{row['op']} {row['median_us']} us, {row['tokens_per_s']} tokens/s, "
                    f"{row['of_copy']} of a copy ({row['roof_us']} us), {row['launches']} launches"
                )
        took = time.perf_counter() - start
    clock.say(f"kernels compiled on the way: {cache.statistics().compiled}")


def passes(
    name: str, short: DecoderModel, model: DecoderModel, batch: int, context: int, clock: Clock
) -> bool:
    """Whether a batch's steps are right; says how far they are from torch's."""
    sequences = engine_models.sequences_of(short, batch, context)
    ours, theirs = engine_gates.distance_from_torch(short, sequences)
    same = engine_gates.replay_equals_launches(short, sequences)
    for sequence in sequences:
        short.cache.free_sequence(sequence)
    right = ours <= _MOST_DISTANCE * theirs + 1e-5
    clock.say(
        f"{name} batch {batch}: logits {ours:.2e} of their spread from torch's fp32, torch's own {theirs:.2e}; "
        f"graph and launches agree: {same}; {'measured' if right and same else 'NOT MEASURED'}"
    )
    return right and same


def decode_rows(name: str, model: DecoderModel, batch: int, context: int, copy: float) -> Iterator[Row]:
    """A step of `batch` sequences of `context` tokens: on the device, and with the host's work."""
    sequences = engine_models.sequences_of(model, batch, context)
    rows = [StepRow(sequence, [7]) for sequence in sequences]
    result = model.decode(rows)
    samples = []
    for _ in range(STEPS):
        start = time.perf_counter()
        following = model.decode(rows, chained=True)
        result.wait()  # one step behind, as the engine reads
        result = following
        samples.append((time.perf_counter() - start) * 1e6)
    result.wait()
    program = model.program(model.decode_shape(batch))
    device = replay_time(model, lambda: program.launch(model.stream))
    c = model.config
    codes = model.cache.dtype.name == "e4m3"
    cached = batch * (context + STEPS) * engine_models.token_bytes(c, model.dtype, codes=codes)
    table = c.vocab_size * c.hidden_size * model.dtype.itemsize  # of an untied embedding only a row is read
    nbytes = model.weight_nbytes - (0 if c.tie_word_embeddings else table) + cached
    types = f"weights {'e4m3' if model.weights.fp8 else model.dtype}, cache {model.cache.dtype}"
    for kind, timing in (("device", device), ("step", common.summary(samples[8:]))):
        yield common.row(
            f"decode_{kind}", f"{name} batch={batch} context={context}", types, "cki", timing, nbytes=nbytes,
            tokens_per_s=round(batch / timing.median_us * 1e6, 1), launches=program.num_kernels,
            of_copy=round(nbytes / timing.median_us / 1e3 / copy, 3), roof_us=round(nbytes / copy / 1e3, 1),
            copy_gb_per_s=round(copy, 1),
        )  # fmt: skip
    for sequence in sequences:
        model.cache.free_sequence(sequence)


def replay_time(model: DecoderModel, launch: Callable[[], None], replays: int = 24) -> common.Timing:
    """Of a compiled step over the tables of the last one, between events on the model's stream."""
    import torch

    stream = torch.cuda.ExternalStream(model.stream)
    samples = []
    for _ in range(replays):
        start, stop = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record(stream)
        launch()
        stop.record(stream)
        stop.synchronize()
        samples.append(start.elapsed_time(stop) * 1e3)
    return common.summary(samples[4:])


def peer_rows(arguments: argparse.Namespace, clock: Clock) -> Iterator[Row]:
    """The same steps by transformers, where that is asked for."""
    if not arguments.transformers:
        return
    import engine_peers

    for name in arguments.models:
        peer = engine_peers.make(engine_models.config_of(name, arguments.layers))
        took = 0.0
        for mode in arguments.transformers:
            for batch in arguments.batches:
                if not clock.allows(took):
                    clock.say(f"transformers {mode} batch {batch} and what follows is left out")
                    return
                start = time.perf_counter()
                timing = engine_peers.step_time(peer, batch, arguments.context, compiled=mode == "compiled")
                took = time.perf_counter() - start
                yield common.row(
                    "decode_step", f"{name} batch={batch} context={arguments.context}", "bf16", f"transformers_{mode}",
                    timing, tokens_per_s=round(batch / timing.median_us * 1e6, 1),
                )  # fmt: skip
                clock.say(f"transformers {mode} batch {batch}: {timing.median_us:.0f} us a step")


if __name__ == "__main__":
    main()
