"""Host cost of a call: `cki.layer_norm`, held plans, `cki.load` and graphs, beside PyTorch and CuPy themselves.

    python bench/launch_cost.py

The tensors are small (64 x 1024 bf16), so that the device is never what is waited for: the time is what Python, CKI
and the driver take to enqueue a call.  `limit_us` is the project's budget: 10 us for a call on torch or CuPy tensors,
5 us for a held plan with `out=`.  Method: wall clock of loops of 200 calls (bench/common.py, `host_time`).
"""

from __future__ import annotations

import argparse
import ctypes
from collections.abc import Callable, Sequence
from typing import Any

import common
import ml_dtypes
import numpy as np

import cki

ROWS, WIDTH = 64, 1024
SCALE = """
extern "C" __global__ void scale(const float* x, float* y, float factor, int n) {
  const int i = blockIdx.x * blockDim.x + threadIdx.x;
  if (i < n) y[i] = factor * x[i];
}
"""
#: (name, call, budget in microseconds or None).
Case = tuple[str, Callable[[], object], float | None]


def torch_cases() -> list[Case]:
    """Calls on torch tensors, and what torch itself takes for the same."""
    import torch

    def tensor(*shape: int) -> Any:
        return torch.randn(*shape, device="cuda", dtype=torch.bfloat16)

    x, weight, bias, out = tensor(ROWS, WIDTH), tensor(WIDTH), tensor(WIDTH), tensor(ROWS, WIDTH)
    held = cki.hold(cki.layer_norm, x, weight, bias, out=out)
    free = cki.hold(cki.layer_norm, x, weight, bias)
    graph = cki.capture(lambda t: cki.layer_norm(t, weight, bias, out=out), x)
    layer_norm = torch.nn.functional.layer_norm
    shape = (WIDTH,)
    return [
        ("torch: F.layer_norm", lambda: layer_norm(x, shape, weight, bias), None),
        ("torch: empty_like", lambda: torch.empty_like(x), None),
        ("cki.layer_norm", lambda: cki.layer_norm(x, weight, bias), 10.0),
        ("cki.layer_norm out=", lambda: cki.layer_norm(x, weight, bias, out=out), 10.0),
        ("held plan", lambda: free(x, weight, bias), None),
        ("held plan out=", lambda: held(x, weight, bias, out=out), 5.0),
        ("graph of one launch", lambda: graph.replay(), None),
        ("cki.attention", _attention(tensor), None),
    ]


def _attention(tensor: Callable[..., Any]) -> Callable[[], object]:
    q, k, v = (tensor(1, 64, 8, 64) for _ in range(3))
    return lambda: cki.attention(q, k, v, causal=True)


def cupy_cases() -> list[Case]:
    """The same on CuPy arrays, and a user's own kernel beside CuPy's RawKernel."""
    import cupy

    def array(*shape: int) -> Any:
        values = np.random.default_rng(0).standard_normal(shape).astype(ml_dtypes.bfloat16)
        return cupy.asarray(values.view(np.uint16)).view(values.dtype)

    x, weight, bias, out = array(ROWS, WIDTH), array(WIDTH), array(WIDTH), array(ROWS, WIDTH)
    held = cki.hold(cki.layer_norm, x, weight, bias, out=out)
    graph = cki.capture(lambda t: cki.layer_norm(t, weight, bias, out=out), x)
    a, b = cupy.zeros(1024, "f4"), cupy.zeros(1024, "f4")
    own, raw = cki.load(SCALE), cupy.RawKernel(SCALE, "scale")
    factor, n = np.float32(2.0), np.int32(1024)
    raw((4,), (256,), (a, b, factor, n))
    return [
        ("driver alone, 4 arguments", _driver_alone(raw.kernel.ptr, a.data.ptr, b.data.ptr), None),
        ("cki.layer_norm", lambda: cki.layer_norm(x, weight, bias), 10.0),
        ("cki.layer_norm out=", lambda: cki.layer_norm(x, weight, bias, out=out), 10.0),
        ("held plan out=", lambda: held(x, weight, bias, out=out), 5.0),
        ("graph of one launch", lambda: graph.replay(), None),
        ("cki.load kernel, 4 arguments", lambda: own(4, 256, a, b, 2.0, 1024), None),
        ("cupy.RawKernel, 4 arguments", lambda: raw((4,), (256,), (a, b, factor, n)), None),
    ]


def _driver_alone(function: int, x: int, y: int) -> Callable[[], object]:
    """The least that any launch from Python costs: cuLaunchKernel with everything prepared."""
    from cupy_backends.cuda.api.driver import launchKernel

    values: list[Any] = [ctypes.c_uint64(x), ctypes.c_uint64(y), ctypes.c_float(2.0), ctypes.c_int(1024)]
    parameters = (ctypes.c_void_p * 4)(*(ctypes.addressof(value) for value in values))
    address = ctypes.addressof(parameters)
    # The arrays are kept by the function's default.
    return lambda kept=(values, parameters): launchKernel(function, 4, 1, 1, 256, 1, 1, 0, 0, address, 0)  # type: ignore[misc]


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
        for name, call, limit in makers[framework]():
            timing = common.host_time(call)
            within = "" if limit is None else ("yes" if timing.median_us <= limit else "NO")
            rows.append(common.row(
                "host cost", f"rows={ROWS} width={WIDTH}", "bf16", f"{framework}: {name}", timing,
                limit_us="" if limit is None else limit, within_limit=within,
            ))  # fmt: skip
    common.write_csv("launch_cost", rows)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
