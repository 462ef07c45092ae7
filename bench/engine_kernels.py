"""Where a decode step's time goes: each of its kernels alone, and their sum beside the step's.

    python bench/engine_kernels.py --variants default fp8 --batches 1 4 16 64 --layers 12

A layer's launch is timed as a graph of that launch of every layer, so that each reads a weight and keys that are not in
L2; launches outside the layers one by one.  Both as in the step: programmatic, over the step's own tables.  A variant
is timed only where its step passes the gates of `bench/engine.py`.

    decode_kernel   microseconds a launch, and the bytes of weights and cache that it reads a second
    decode_sum      what all launches take alone, over the replayed step: sum_over_step.  Where less than 1, launches
                    wait for each other; where more, they overlap.
"""

from __future__ import annotations

import argparse
import re
from collections.abc import Iterator, Sequence
from functools import partial

import common
import engine
import engine_models

from cki import driver
from cki.device import cuda_device
from cki.engine.model import DecoderModel, StepRow
from cki.operand import Operand
from cki.plan import Plan, Step, TensorMapArg

_LAYER = re.compile(r"layers\.\d+\.")

Row = dict[str, object]


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", choices=list(engine_models.SHAPES), default="qwen3-8b")
    parser.add_argument("--batches", nargs="+", type=int, default=[1, 4, 16, 64])
    parser.add_argument("--context", type=int, default=1024, help="tokens of each sequence, from 1 on")
    parser.add_argument("--layers", type=int, help="fewer than the model has")
    parser.add_argument("--budget", type=float, help="seconds after which no other row is begun")
    parser.add_argument("--variants", nargs="+", choices=list(engine_models.VARIANTS), default=["default"])
    parser.add_argument("--compile-only", action="store_true", help="compile the kernels of all rows and end")
    arguments = parser.parse_args(argv)
    clock = engine.Clock(arguments.budget)
    device = cuda_device(0)
    config = engine_models.config_of(arguments.model, arguments.layers)
    kernels = [
        kernel for variant in arguments.variants
        for kernel in engine_models.step_kernels(config, arguments.batches, device, **engine_models.VARIANTS[variant])
    ]  # fmt: skip
    engine_models.compile_ahead(kernels, driver.native_arch(0))
    clock.say(f"{len(set(kernels))} kernels are there")
    if arguments.compile_only:
        return
    common.require_gpu()
    rows: list[Row] = []
    try:
        for variant in arguments.variants:
            sizes = {
                "context": arguments.context + 192, "sequences": max(arguments.batches),
                **engine_models.VARIANTS[variant],
            }  # fmt: skip
            short = engine_models.make_model(
                engine_models.config_of(arguments.model, engine.GATE_LAYERS), device, **sizes
            )
            model = engine_models.make_model(config, device, **sizes)
            for batch in arguments.batches:
                if not clock.allows(0):
                    clock.say(f"{variant} batch {batch} and what follows is left out")
                    return
                if engine.passes(arguments.model, short, model, batch, arguments.context, clock):
                    rows += kernel_rows(arguments.model, variant, model, batch, arguments.context, clock)
            del short, model
    finally:
        if rows:
            common.write_csv("engine_kernels", rows)


def kernel_rows(
    name: str, variant: str, model: DecoderModel, batch: int, context: int, clock: engine.Clock
) -> Iterator[Row]:
    """Rows of one step, in the order of its launches."""
    sequences = engine_models.sequences_of(model, batch, context)
    model.decode([StepRow(sequence, [7]) for sequence in sequences]).wait()
    shape = model.decode_shape(batch)
    program = model.program(shape)
    problem = f"{name} layers={model.config.num_layers} batch={batch} context={context}"
    total, plan = 0.0, model.plan(shape)
    for place, steps in parts(plan):
        alone = model.compiled(Plan(tuple(steps), plan.workspace))
        alone.capture()
        times = engine.replay_time(model, partial(alone.launch, model.stream), replays=12)
        timing = common.Timing(*(value / len(steps) for value in times[:3]))
        total += timing.median_us * len(steps)
        nbytes, entry = read_bytes(steps[-1], batch * context, model), steps[-1].kernel.entry
        yield common.row(
            "decode_kernel", f"{problem}: {place} {entry}", model.dtype.name, "cki", timing, nbytes=nbytes,
            launches=len(steps), variant=variant,
        )  # fmt: skip
        clock.say(
            f"{variant} batch {batch} {place:>3} {entry:24} {timing.median_us:8.2f} us "
            f"{nbytes / timing.median_us / 1e6:6.3f} TB/s  {steps[-1].reason[:90]}"
        )
    # Behind the kernels: in front of them it was once read 1.4 times as long as `bench/engine.py` finds it.
    step = engine.replay_time(model, partial(program.launch, model.stream), replays=24)
    ratio = total / step.median_us
    yield common.row(
        "decode_sum", problem, model.dtype.name, "cki", total, launches=program.num_kernels, variant=variant,
        step_us=round(step.median_us, 2), sum_over_step=round(ratio, 3),
    )  # fmt: skip
    clock.say(
        f"{variant} batch {batch}: kernels alone {total:.0f} us, the step {step.median_us:.0f}: {ratio:.3f}"
    )
    for sequence in sequences:
        model.cache.free_sequence(sequence)


def parts(plan: Plan) -> Iterator[tuple[str, list[Step]]]:
    """A step's launches that are timed together, with their place: those of each layer's n-th launch, others alone."""
    of_layers = [number for number, step in enumerate(plan.steps) if any(map(_LAYER.match, slots(step)))]
    layers = len({_LAYER.match(slot)[0] for step in plan.steps for slot in slots(step) if _LAYER.match(slot)})  # type: ignore[index]
    first = of_layers[0]
    end = of_layers[-1] + 1
    count, rest = divmod(end - first, layers)
    first += rest  # what the first layer begins with
    entries = [step.kernel.entry for step in plan.steps]
    assert entries[first + count : end - count] == entries[first + 2 * count : end], (
        "layers differ in their launches"
    )
    for number in range(first):
        yield f"a{number}", [plan.steps[number]]
    for number in range(count):
        yield str(number), list(plan.steps[first + number : end : count])
    for number in range(end, len(plan.steps)):
        yield f"z{number - end}", [plan.steps[number]]


def slots(step: Step) -> list[str]:
    """Names of the tensors that a launch is given."""
    return [operand.slot for operand in operands(step)]


def operands(step: Step) -> Iterator[Operand]:
    """Tensors that a launch is given, each once."""
    seen = set()
    for argument in step.args:
        operand = argument.operand if isinstance(argument, TensorMapArg) else argument
        if isinstance(operand, Operand) and operand.slot not in seen:
            seen.add(operand.slot)
            yield operand


def read_bytes(step: Step, tokens: int, model: DecoderModel) -> int:
    """Of weights and of keys and values of so many tokens; activations are left out."""
    weights = dict(model.weights.items())
    total = 0
    for operand in operands(step):
        if (
            operand.slot in weights
            and operand.slot not in ("embed", "cos_sin")
            and "seq_lens" not in slots(step)
        ):
            total += operand.size * operand.dtype.itemsize
        elif operand.slot.endswith(("k_cache", "v_cache")) and "seq_lens" in slots(step):
            c = model.config
            codes = model.cache.dtype.name == "e4m3"
            total += tokens * engine_models.token_bytes(c, model.dtype, codes=codes) // c.num_layers // 2
    if "logits" in slots(step) and model.config.tie_word_embeddings and "embed" in slots(step):
        total += weights["embed"].view.size * model.dtype.itemsize
    return total


if __name__ == "__main__":
    main()
