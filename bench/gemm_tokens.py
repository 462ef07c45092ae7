"""A decoder's products of few tokens on Hopper, each alone, by `linear_decode`.

    python bench/gemm_tokens.py                              # Qwen3-8B's four products of a layer, 1 to 16 tokens
    python bench/gemm_tokens.py --tokens 8 --types e4m3 --shapes down

A time is that of a graph which walks through several weights that together do not fit L2.  Before it is taken, the
result must be as near to torch's in fp32, of what the codes stand for, as bf16 allows.
of_copy: bytes of the weight a second over the rate of a device copy.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import common
import engine
import engine_models
from engine_models import as_torch

from cki import driver, dtypes
from cki.device import DeviceInfo, cuda_device
from cki.engine.device_memory import DeviceTensors
from cki.engine.program import StepProgram, Workspace
from cki.errors import UnsupportedError
from cki.heuristics.linear_decode import MAX_TOKENS
from cki.kernel import KernelSpec
from cki.operand import dense
from cki.ops.linear_decode import Norm, plan_linear_decode
from cki.plan import Plan

#: Larger than L2, together with what is read between.
_ROTATED_BYTES = 200e6
_MOST_ERROR = 0.01


@dataclass(frozen=True)
class Shape:
    """y [tokens, columns] of x [tokens, depth]; what goes into the launch."""

    depth: int
    columns: int
    norm: bool = False
    gated: bool = False

    @property
    def rows(self) -> int:
        return self.columns * (2 if self.gated else 1)


SHAPES = {
    "qkv": Shape(4096, 6144, norm=True), "out": Shape(4096, 4096), "gate_up": Shape(4096, 12288, norm=True, gated=True),
    "down": Shape(12288, 4096),
}  # fmt: skip
TYPES = {"bf16": dtypes.bf16, "e4m3": dtypes.e4m3}


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--tokens", nargs="+", type=int, default=[1, 4, 8, 16])
    parser.add_argument("--shapes", nargs="+", choices=list(SHAPES), default=list(SHAPES))
    parser.add_argument("--types", nargs="+", choices=list(TYPES), default=list(TYPES))
    arguments = parser.parse_args(argv)
    device = cuda_device(0)
    seconds = engine_models.compile_ahead(kernels_of(arguments, device), driver.native_arch(0))
    print(f"kernels compiled in {seconds:.1f} s", flush=True)
    common.require_gpu()
    copy = engine.copy_rate()
    rows: list[dict[str, object]] = []
    try:
        for kind in arguments.types:
            for name in arguments.shapes:
                operands = Operands(SHAPES[name], TYPES[kind], device)
                for tokens in arguments.tokens:
                    rows += operands.rows(name, tokens, copy)
    finally:
        if rows:
            common.write_csv("gemm_tokens", rows)


def copies_of(shape: Shape, weight: dtypes.DType) -> int:
    """How many weights are walked through."""
    return max(2, round(_ROTATED_BYTES / (shape.rows * shape.depth * weight.itemsize)))


def specs_of(
    shape: Shape, weight: dtypes.DType, copies: int
) -> dict[str, tuple[tuple[int, ...], dtypes.DType]]:
    """Shape and element type of every operand."""
    specs: dict[str, tuple[tuple[int, ...], dtypes.DType]] = {
        "x": ((MAX_TOKENS, shape.depth), dtypes.bf16), "y": ((MAX_TOKENS, shape.columns), dtypes.bf16),
        "gamma": ((shape.depth,), dtypes.bf16),
    }  # fmt: skip
    for number in range(copies):
        specs[f"w{number}"] = (shape.rows, shape.depth), weight
        if weight == dtypes.e4m3:
            specs[f"w{number}.scales"] = (-(-shape.rows // 128), -(-shape.depth // 128)), dtypes.f32
    return specs


def plan_of(shape: Shape, weight: dtypes.DType, copies: int, tokens: int, device: DeviceInfo) -> Plan:
    """One launch a weight."""
    given = {name: dense(name, *spec) for name, spec in specs_of(shape, weight, copies).items()}
    x, y = (replace(given[name], shape=(tokens, given[name].shape[1])) for name in ("x", "y"))
    options: dict[str, Any] = {
        "norm": Norm(given["gamma"], 1e-6) if shape.norm else None, "gated": shape.gated,
        "activation": "silu" if shape.gated else None,
    }  # fmt: skip
    steps: tuple[Any, ...] = ()
    for number in range(copies):
        w, scales = given[f"w{number}"], given.get(f"w{number}.scales")
        steps += plan_linear_decode(x, w, None, None, y, device, scales=scales, **options)
    return Plan(steps)


def kernels_of(arguments: argparse.Namespace, device: DeviceInfo) -> list[KernelSpec]:
    """Of all rows."""
    found: dict[KernelSpec, None] = {}
    for kind, name, tokens in itertools.product(arguments.types, arguments.shapes, arguments.tokens):
        with contextlib.suppress(UnsupportedError):
            plan = plan_of(SHAPES[name], TYPES[kind], 1, tokens, device)
            found |= dict.fromkeys(step.kernel for step in plan.steps)
    return list(found)


class Operands:
    """Random operands of one product, its weight several times."""

    def __init__(self, shape: Shape, weight: dtypes.DType, device: DeviceInfo) -> None:
        self._shape, self._weight, self._device = shape, weight, device
        self._copies = copies_of(shape, weight) if device.kind == "cuda" else 1
        specs = specs_of(shape, weight, self._copies)
        self._tensors = DeviceTensors(device, [(name, *spec) for name, spec in specs.items()])
        self._tensors.finish()
        for name in specs:
            if name != "y":
                engine_models.fill_at_random("norm" if name == "gamma" else name, self._tensors[name])
        self._workspace = Workspace(device)

    def rows(self, name: str, tokens: int, copy: float) -> Iterator[dict[str, object]]:
        """The row of one number of tokens; none where they do not fit."""
        shape, expected = self._shape, self._expected(tokens)
        nbytes = shape.rows * shape.depth * self._weight.itemsize
        try:
            plan = plan_of(shape, self._weight, self._copies, tokens, self._device)
        except UnsupportedError:
            return
        program = StepProgram(
            plan, self._device, {**dict(self._tensors.items()), **self._workspace.take(plan)}
        )
        error = self._error(program, tokens, expected)
        assert error < _MOST_ERROR, f"{name} of {tokens} tokens: error {error:.2e}"
        program.capture()
        times = _replayed(program)
        timing = common.Timing(*(time / len(plan.steps) for time in times[:3]))
        of_copy = nbytes / timing.median_us / 1e3 / copy
        print(
            f"{self._weight} {name} {tokens} tokens: {timing.median_us:.2f} us, "
            f"{nbytes / timing.median_us / 1e6:.3f} TB/s, {of_copy:.3f} of a copy, error {error:.1e}",
            flush=True,
        )
        yield common.row(
            "few_tokens", f"{name} {tokens}x{shape.depth}x{shape.rows}", str(self._weight), "linear_decode", timing,
            nbytes=nbytes, of_copy=round(of_copy, 3), copy_gb_per_s=round(copy, 1), error=f"{error:.1e}",
        )  # fmt: skip

    def _expected(self, tokens: int) -> Any:
        """Of the last weight, in fp32."""
        import torch

        def tensor(name: str) -> Any:
            return as_torch(self._tensors[name])

        x, last = tensor("x")[:tokens].float(), f"w{self._copies - 1}"
        if self._shape.norm:
            x = x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6) * tensor("gamma").float()
        w = tensor(last).float()
        if self._weight == dtypes.e4m3:
            scales = tensor(f"{last}.scales").repeat_interleave(128, 0)[: w.shape[0]]
            w *= scales.repeat_interleave(128, 1)[:, : w.shape[1]]
        y = x @ w.T
        if self._shape.gated:
            gate, up = y.chunk(2, -1)
            y = torch.nn.functional.silu(gate) * up
        return y

    def _error(self, program: StepProgram, tokens: int, expected: Any) -> float:
        """Relative, in the Frobenius norm."""
        y = as_torch(self._tensors["y"])[:tokens]
        y.zero_()
        engine_models.synchronize(self._device)
        program.launch(0)
        engine_models.synchronize(self._device)
        return float((y.float() - expected).norm() / expected.norm())


def _replayed(program: StepProgram, replays: int = 14) -> common.Timing:
    import torch

    stream = torch.cuda.Stream()
    samples = []
    for _ in range(replays):
        start, stop = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record(stream)
        program.launch(stream.cuda_stream)
        stop.record(stream)
        stop.synchronize()
        samples.append(start.elapsed_time(stop) * 1e3)
    return common.summary(samples[4:])


if __name__ == "__main__":
    main()
