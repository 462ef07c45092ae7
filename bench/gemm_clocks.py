"""SM clock and power while one product runs again and again: what the power limit leaves of the tensor cores.

    python bench/gemm_clocks.py                              # 4096^3, six seconds on an H200
    python bench/gemm_clocks.py --shape 8192x8192x8192

Our bf16 and e4m3 kernels, and torch's, each for about a second; nvidia-smi reads clock and power meanwhile, and the
first half of its readings is left out.  `busy`: the part of the tensor cores' rate at that clock that was used (4096
operations a clock and SM on bf16, 8192 on e4m3).  Writes results/gemm_clocks.csv.
"""

from __future__ import annotations

import argparse
import statistics
import subprocess
import time
from collections.abc import Callable
from typing import Any

import common
import gemm_fp8

import cki

SECONDS = 1.0
#: Operations a clock and SM of the tensor cores.
RATE = {"bf16": 4096, "e4m3": 8192}
QUERY = ("nvidia-smi", "--query-gpu=clocks.sm,power.draw", "--format=csv,noheader,nounits", "-lms", "50")


def under_load(run: Callable[[], object], calls: int) -> tuple[float, float, float]:
    """(microseconds a call, SM clock in MHz, watts) of a second of calls."""
    import torch

    torch.cuda.synchronize()
    reader = subprocess.Popen([*QUERY, "-i", "0"], stdout=subprocess.PIPE, text=True)
    done, start = 0, time.perf_counter()
    while time.perf_counter() - start < SECONDS:
        for _ in range(calls):
            run()
        torch.cuda.synchronize()
        done += calls
    elapsed = time.perf_counter() - start
    reader.terminate()
    lines = [line.split(",") for line in (reader.communicate()[0] or "").splitlines() if line.count(",") == 1]
    readings = [(float(clock), float(watts)) for clock, watts in lines[len(lines) // 2 :]]
    if not readings:
        raise SystemExit("nvidia-smi said nothing")
    clock, watts = (statistics.median(values) for values in zip(*readings))
    return elapsed / done * 1e6, clock, watts


def measure(rows: int, depth: int, columns: int) -> list[dict[str, object]]:
    """Rows of one shape."""
    import torch

    x, x_scale, w, w_scale, a, b, y = gemm_fp8.make_inputs(rows, depth, columns, 0)
    gemm_fp8.check((x, x_scale, w, w_scale, a, b, y))
    one = torch.ones((), device="cuda")
    variants: dict[str, tuple[str, Callable[[], Any]]] = {
        "cki": ("bf16", lambda: cki.linear(a, b, weight_layout="out_in", out=y)),
        "torch": ("bf16", lambda: torch.matmul(a, b.T, out=y)),
        "cki fp8": ("e4m3", lambda: cki.linear_fp8(x, x_scale, w, w_scale, out=y)),
        "torch fp8": (
            "e4m3",
            lambda: torch._scaled_mm(x, w.T, scale_a=one, scale_b=one, out_dtype=torch.bfloat16),
        ),
    }
    flops, found = 2.0 * rows * depth * columns, []
    sms = torch.cuda.get_device_properties(0).multi_processor_count
    for name, (dtype, run) in variants.items():
        for _ in range(3):
            run()
        us, clock, watts = under_load(run, 20)
        found.append(common.row(
            "linear", f"{rows}x{depth}x{columns}", dtype, name, us, flops=flops, sm_mhz=clock, watts=watts,
            busy=round(flops / us / (sms * RATE[dtype] * clock), 3),
        ))  # fmt: skip
    return found


def main() -> None:
    """Measures and writes gemm_clocks.csv."""
    parser = argparse.ArgumentParser(description="clock and power under products")
    parser.add_argument("--shape", action="append", help="ROWSxDEPTHxCOLUMNS; may be repeated")
    arguments = parser.parse_args()
    common.require_gpu()
    rows: list[dict[str, object]] = []
    for shape in arguments.shape or ["4096x4096x4096"]:
        m, k, n = (int(extent) for extent in shape.split("x"))
        rows += measure(m, k, n)
    common.write_csv("gemm_clocks", rows)


if __name__ == "__main__":
    main()
