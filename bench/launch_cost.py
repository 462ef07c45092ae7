"""Host cost of a call: `cki.layer_norm`, held plans, `cki.load` and graphs, beside PyTorch and CuPy themselves.

    python bench/launch_cost.py

The tensors are small (64 x 1024 bf16), so that the device is never what is waited for: the time is what Python, CKI
and the driver take to enqueue a call.  `limit_us` is the project's budget: 10 us for a call on torch or CuPy tensors,
5 us for a held plan with `out=`.  Method: wall clock of loops of 50 calls, the queue drained before each, all cases in
turn (bench/common.py, `host_times`): least, median and percentiles over loops.

Hosts differ twofold in their speed, so every run measures what is not CKI's as well: an empty call of Python's
(`python_call_us`), the bare launch of the very kernel with its parameters written before ("driver alone"), and the
framework's allocation.  `own_us` is what is left of a call: its median less those of the driver and the allocation.
Each call's result is compared with the framework's own before it is timed.
"""

from __future__ import annotations

import argparse
import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import common
import ml_dtypes
import numpy as np

import cki
from cki import driver, reference, tensor_map
from cki.adapter import adapter_of
from cki.arguments import ArgumentBlock, lay_out
from cki.cuda_launch import CudaExecutable
from cki.ops.call import Planned, PlanRequest, find_entry
from cki.ops.entry import WORKSPACE_ALIGNMENT
from cki.ops.norm import LAYER_NORM

ROWS, WIDTH = 64, 1024
SCALE = """
extern "C" __global__ void scale(const float* x, float* y, float factor, int n) {
  const int i = blockIdx.x * blockDim.x + threadIdx.x;
  if (i < n) y[i] = factor * x[i];
}
"""
DRIVER, DRIVER_CONTEXT, EMPTY = "driver alone", "driver alone, function of the context", "empty"


class Case(NamedTuple):
    """One call.  limit_us: its budget.  launches, allocates: what of it is the driver's and the framework's."""

    name: str
    call: Callable[[], object]
    limit_us: float | None = None
    launches: bool = False
    allocates: bool = False


def torch_cases() -> list[Case]:
    """Calls on torch tensors, and what torch itself takes for the same."""
    import torch

    def tensor(*shape: int) -> Any:
        return torch.randn(*shape, device="cuda", dtype=torch.bfloat16)

    x, weight, bias, out = tensor(ROWS, WIDTH), tensor(WIDTH), tensor(WIDTH), tensor(ROWS, WIDTH)
    layer_norm, shape = torch.nn.functional.layer_norm, (WIDTH,)

    def difference(result: Any) -> float:
        return float(
            (result.float() - layer_norm(x.float(), shape, weight.float(), bias.float())).abs().max()
        )

    q, k, v = (tensor(1, 64, 8, 64) for _ in range(3))
    return [
        Case("F.layer_norm", lambda: layer_norm(x, shape, weight, bias)),
        Case(EMPTY, lambda: torch.empty_like(x)),
        *norm_cases(x, weight, bias, out, difference, lambda: out.zero_()),
        Case("cki.attention", lambda: cki.attention(q, k, v, causal=True), None, True, True),
        *several_launches(tensor),
    ]


def several_launches(tensor: Callable[..., Any]) -> Iterator[Case]:
    """The launches of fused attention and of an encoder layer, one by one and as the graph of a held plan.

    On one memory, with nothing allocated: what is compared is how they reach the driver.
    """
    import torch

    x, square = tensor(2, 16, WIDTH), [tensor(WIDTH, WIDTH) * WIDTH**-0.5 for _ in range(4)]
    wide, narrow = tensor(WIDTH, 4 * WIDTH) * WIDTH**-0.5, tensor(4 * WIDTH, WIDTH) * WIDTH**-0.5
    operations: dict[str, tuple[Callable[..., Any], list[Any]]] = {
        "fused attention": (cki.fused_attention, square),
        "encoder layer": (cki.encoder_layer, [*square, wide, narrow]),
    }
    for name, (function, weights) in operations.items():
        call = functools.partial(function, x, *weights, num_heads=16, head_dim=WIDTH // 16)
        expected = call()
        try:
            call(stream=PlanRequest())
        except Planned as planned:
            spec, inputs, attributes, outs = planned.spec, planned.inputs, planned.attributes, planned.outs
        entry, pointers = find_entry(spec, adapter_of(x), inputs + outs, attributes)
        executable = entry.executable
        assert executable is not None
        out = torch.zeros_like(expected)
        space = torch.empty(entry.workspace_nbytes, dtype=torch.uint8, device="cuda")
        base = -(-space.data_ptr() // WORKSPACE_ALIGNMENT) * WORKSPACE_ALIGNMENT
        words = [*pointers, out.data_ptr(), *(base + offset for offset in entry.workspace_offsets)]
        steps = len(executable.plan.steps)
        for how, repeated in (("one by one", False), ("as a graph", True)):
            launch = executable.launcher(repeated)
            out.zero_()
            for _ in range(20):
                launch(0, *words)
            if not torch.equal(out, expected):
                raise SystemExit(f"{name}, {how}: wrong")
            # The memory is kept by the function's default.
            yield Case(
                f"{steps} launches of {name}, {how}",
                lambda launch=launch, words=words, kept=(out, space): launch(0, *words),  # type: ignore[misc]
            )


def cupy_cases() -> list[Case]:
    """The same on CuPy arrays, and a user's own kernel beside CuPy's RawKernel."""
    import cupy

    def array(*shape: int) -> Any:
        values = np.random.default_rng(len(shape)).standard_normal(shape).astype(ml_dtypes.bfloat16)
        return cupy.asarray(values.view(np.uint16)).view(values.dtype)

    def host(array: Any) -> Any:
        return cupy.asnumpy(array.view(np.uint16)).view(ml_dtypes.bfloat16).astype(np.float64)

    x, weight, bias, out = array(ROWS, WIDTH), array(WIDTH), array(WIDTH), array(ROWS, WIDTH)
    expected = reference.layer_norm(host(x), host(weight), host(bias))

    def difference(result: Any) -> float:
        return float(np.abs(host(result) - expected).max())

    a, b = cupy.zeros(1024, "f4"), cupy.zeros(1024, "f4")
    own, raw = cki.load(SCALE), cupy.RawKernel(SCALE, "scale")
    factor, n = np.float32(2.0), np.int32(1024)
    return [
        Case(EMPTY, lambda: cupy.ndarray(x.shape, x.dtype)),
        *norm_cases(x, weight, bias, out, difference, lambda: out.data.memset(0, out.nbytes)),
        Case("cki.load kernel, 4 arguments", lambda: own(4, 256, a, b, 2.0, 1024), None, True),
        Case("cupy.RawKernel, 4 arguments", lambda: raw((4,), (256,), (a, b, factor, n)), None, True),
    ]


def norm_cases(
    x: Any, weight: Any, bias: Any, out: Any, difference: Callable[[Any], float], clear: Callable[[], object]
) -> Iterator[Case]:
    """Layer norm in all ways of calling.  difference: of a result from the right one.  clear: writes zeros to `out`."""
    held = cki.hold(cki.layer_norm, x, weight, bias, out=out)
    free = cki.hold(cki.layer_norm, x, weight, bias)
    graph = cki.capture(lambda t: cki.layer_norm(t, weight, bias, out=out), x)
    alone = driver_alone(x, weight, bias, out)
    cases = [
        Case(DRIVER, alone[0]),
        Case(DRIVER_CONTEXT, alone[1]),
        Case("cki.layer_norm", lambda: cki.layer_norm(x, weight, bias), 10.0, True, True),
        Case("cki.layer_norm out=", lambda: cki.layer_norm(x, weight, bias, out=out), 10.0, True),
        Case("held plan", lambda: free(x, weight, bias), None, True, True),
        Case("held plan out=", lambda: held(x, weight, bias, out=out), 5.0, True),
        Case("graph of one launch", lambda: graph.replay()),
    ]
    for case in cases:
        for number in range(20):  # held plans record a graph after some calls
            clear()
            result = case.call()
            error = difference(out if result is None else result)
            if not error <= 0.1:  # bf16 near 16 is rounded by up to 0.06
                raise SystemExit(f"{case.name}: call {number} is wrong by {error}")
        yield case


def driver_alone(x: Any, weight: Any, bias: Any, out: Any) -> list[Callable[[], object]]:
    """The least that a launch of layer norm's kernel costs from Python: cuLaunchKernel with everything prepared.

    By the handle that CKI launches, which belongs to no context, and by the context's own function of it.
    """
    from cupy_backends.cuda.api.driver import launchKernel

    entry, pointers = find_entry(
        LAYER_NORM, adapter_of(x), (x, weight, bias, None, out, None), (1e-5, "rounded")
    )
    executable = entry.executable
    assert isinstance(executable, CudaExecutable)
    (step,), (kernel,) = executable.plan.steps, executable.functions
    block = ArgumentBlock(lay_out(executable.plan, executable.slots), tensor_map.encode)
    block.fill(pointers)
    api = driver.api()
    status, function = api.cuKernelGetFunction(api.CUkernel(int(kernel)))
    if int(status):
        raise SystemExit(f"cuKernelGetFunction: {driver.error_text(status)}")
    geometry, parameters = (*step.grid, *step.block, step.smem), block.parameters[0]

    def launch(handle: int) -> Callable[[], object]:
        # The block, which owns the parameters, is kept by the function's default.
        return lambda kept=block: launchKernel(handle, *geometry, 0, parameters, 0)  # type: ignore[misc]

    return [launch(int(kernel)), launch(int(function))]


def measure(framework: str, cases: Sequence[Case]) -> list[dict[str, object]]:
    """Rows of one framework."""
    timings = common.host_times({case.name: case.call for case in cases})
    python_us = round(common.python_call_us(), 4)
    rows = []
    for case in cases:
        timing = timings[case.name]
        others = case.launches * timings[DRIVER].median_us + case.allocates * timings[EMPTY].median_us
        limit = case.limit_us
        rows.append(common.row(
            "host cost", f"rows={ROWS} width={WIDTH}", "bf16", f"{framework}: {case.name}", timing,
            own_us=round(timing.median_us - others, 2) if others else "",
            limit_us="" if limit is None else limit,
            within_limit="" if limit is None else ("yes" if timing.median_us <= limit else "NO"),
            python_call_us=python_us,
        ))  # fmt: skip
    return rows


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--framework", choices=("torch", "cupy"), action="append", help="default: both")
    options = parser.parse_args(argv)
    common.require_gpu()
    makers = {"torch": torch_cases, "cupy": cupy_cases}
    rows = []
    for framework in options.framework or list(makers):
        rows += measure(framework, makers[framework]())
    common.write_csv("launch_cost", rows)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
