"""How long compiling takes: the default set cold and warm, single kernels, first calls, and `import cki` itself.

    python bench/compile_time.py [--arch sm_90a]

Each figure is of a fresh process with a cache directory of its own (`cold`) or one that was filled before (`warm`).
Compiling needs no GPU; the first calls are measured where there is one.  `limit_us` is the project's budget: 10 s for
the cold default set on 2 cores, 1.5 s for an attention kernel of a new head size, 50 ms for the import beyond CuPy's.
Times are wall clock, best of `--repeats`.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import common

ROOT = Path(__file__).resolve().parents[1]

IMPORT = "import time; t = time.perf_counter(); import {modules}; print(time.perf_counter() - t)"
DEFAULT_SET = """
import time
from cki import background, cache
from cki.device import sim_device
from cki.heuristics.default_set import default_kernels
specs = default_kernels(sim_device({arch!r}))
t = time.perf_counter()
background._compile_all(specs, {arch!r}, background.Progress("", len(specs)))
print(time.perf_counter() - t, len(specs), cache.statistics().compiled)
"""
ONE_KERNEL = """
import time
from cki import cache, dtypes, registry
from cki.device import sim_device
from cki.operand import dense
from cki.ops.attention import plan_attention
spec = {spec}
cache.compiler.compile_text("", "warm-up", {arch!r}, cache.compiler.options({arch!r}))
t = time.perf_counter()
cache.get(spec, {arch!r})
print(time.perf_counter() - t)
"""
FIRST_CALL = """
import time, cupy, cki
x = cupy.ones((64, 1024), "f2")
cupy.cuda.runtime.deviceSynchronize()
t = time.perf_counter()
cki.layer_norm(x)
cupy.cuda.runtime.deviceSynchronize()
print(time.perf_counter() - t)
"""
#: A kernel by its name, the smallest of them, and attention of whole causal prompts by its head dimension.
BY_NAME = "registry.find({name!r}, {arch!r})[0]"
CAUSAL = (
    "plan_attention(*(dense(name, (4, 2048, 16, {dim}), dtypes.bf16) for name in 'qkvo'), "
    "device=sim_device({arch!r}), causal=True)[-1].kernel"
)
#: Seconds that the first call with a new head size may compile.
_FIRST_CALL_S = 1.5


def run(code: str, cache_dir: str, cores: int | None = None) -> list[float]:
    """The numbers that a fresh process prints last."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "CKI_CACHE_DIR": cache_dir, "CKI_COMPILE": "lazy"}
    command = [sys.executable, "-c", code]
    if cores is not None:
        available = sorted(os.sched_getaffinity(0))[:cores]
        command = ["taskset", "-c", ",".join(map(str, available)), *command]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise SystemExit(done.stderr)
    return [float(word) for word in done.stdout.split()]


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--arch", default="sm_90a")
    parser.add_argument("--repeats", type=int, default=3)
    options = parser.parse_args(argv)
    rows: list[dict[str, object]] = []

    def measure(
        problem: str, code: str, *, warm: bool = False, cores: int | None = None, limit: float | None = None
    ) -> float:
        best = float("inf")
        for _ in range(options.repeats):
            with tempfile.TemporaryDirectory() as directory:
                if warm:
                    run(code, directory, cores)
                best = min(best, run(code, directory, cores)[0])
        add(problem, "warm" if warm else "cold", best, limit)
        return best

    def add(problem: str, state: str, seconds: float, limit: float | None = None) -> None:
        extra: dict[str, Any] = {"limit_us": "" if limit is None else limit * 1e6, "within_limit": ""}
        if limit is not None:
            extra["within_limit"] = "yes" if seconds <= limit else "NO"
        rows.append(common.row("compile", problem, options.arch, state, seconds * 1e6, **extra))

    default_set = DEFAULT_SET.format(arch=options.arch)
    measure("default set, 2 cores", default_set, cores=2, limit=10.0)
    measure("default set, all cores", default_set)
    measure("default set, 2 cores", default_set, warm=True, cores=2)
    hopper = ("attention_hopper",) if options.arch == "sm_90a" else ()
    for name in ("layer_norm", "attention", "linear", *hopper):
        code = ONE_KERNEL.format(spec=BY_NAME.format(name=name, arch=options.arch), arch=options.arch)
        measure(f"one {name} kernel", code, limit=_FIRST_CALL_S if name.startswith("attention") else None)
        measure(f"one {name} kernel", code, warm=True)
    for dim in (64, 128, 256):
        code = ONE_KERNEL.format(spec=CAUSAL.format(dim=dim, arch=options.arch), arch=options.arch)
        measure(f"causal attention, head dimension {dim}", code, limit=_FIRST_CALL_S)
    with tempfile.TemporaryDirectory() as directory:
        cupy_alone = min(run(IMPORT.format(modules="cupy"), directory)[0] for _ in range(5))
        both = min(run(IMPORT.format(modules="cupy, cki"), directory)[0] for _ in range(5))
    add("import cki beyond cupy", "", max(both - cupy_alone, 0.0), 0.05)
    if common.environment()["gpu"] not in ("", "none"):
        measure("first call of layer_norm in a process", FIRST_CALL)
        measure("first call of layer_norm in a process", FIRST_CALL, warm=True)
    common.write_csv("compile_time", rows)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
