"""What every benchmark shares: environment columns, timing, inputs that do not sit in the L2 cache, CSV.

How a time is taken.  Kernel time is measured by CUDA events around replays of a captured graph that holds
many calls, so that the host's launch cost is not in it; the calls walk through several copies of the inputs
that together are larger than the L2 cache, so that every call reads from device memory.  The median over
replays is the figure, with the 10th and 90th percentile beside it.  Host cost is a plain loop on the wall
clock (`host_times`).

A benchmark script is `bench/<family>.py`: it says `import common` and runs by itself, builds rows with `row(...)`
and ends with `write_csv("<family>", rows)`, which adds the environment to each row.  `bench/run.py` runs all.
"""

from __future__ import annotations

import csv
import functools
import gc
import importlib.metadata
import os
import platform
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

RESULTS = Path(__file__).resolve().parent / "results"


class Timing(NamedTuple):
    """Microseconds a call: median, 10th and 90th percentile over replays, and the least where that is asked for."""

    median_us: float
    p10_us: float
    p90_us: float
    best_us: float | None = None


def require_gpu() -> None:
    """Ends the program with a clear line when there is no CUDA GPU to measure on."""
    try:
        import cupy

        if cupy.cuda.is_available():
            return
        reason = "no CUDA device is visible"
    except ImportError:
        reason = "CuPy is not installed (pip install cki-runtime[cuda13] or [cuda12])"
    raise SystemExit(f"benchmarks measure a CUDA GPU: {reason}")


def _version(distribution: str) -> str:
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return ""


def git_commit() -> str:
    """Short hash of the checkout, with "+" when files differ from it; $BENCH_COMMIT where there is no git."""
    if given := os.environ.get("BENCH_COMMIT"):
        return given
    git = ["git", "-C", str(Path(__file__).resolve().parent)]
    try:
        commit = subprocess.run(
            [*git, "rev-parse", "--short=10", "HEAD"], capture_output=True, text=True, check=True
        )
        changed = subprocess.run(
            [*git, "status", "--porcelain", "--untracked-files=no"],
            capture_output=True,
            text=True,
            check=True,
        )
    except (OSError, subprocess.CalledProcessError):
        return "unknown"
    return commit.stdout.strip() + ("+" if changed.stdout.strip() else "")


def _cuda_version(number: int) -> str:
    return f"{number // 1000}.{number % 1000 // 10}"


@functools.cache
def environment() -> dict[str, str]:
    """The columns that say where a figure comes from: GPU, driver, CUDA, versions, commit."""
    columns = {
        "gpu": "",
        "driver_cuda": "",
        "nvrtc": "",
        "cki": _version("cki-runtime"),
        "commit": git_commit(),
        "python": platform.python_version(),
        "numpy": np.__version__,
        "cupy": _version("cupy-cuda13x") or _version("cupy-cuda12x") or _version("cupy"),
        "torch": _version("torch"),
        "date": time.strftime("%Y-%m-%d"),
    }
    try:
        import cupy

        if cupy.cuda.is_available():
            properties = cupy.cuda.runtime.getDeviceProperties(cupy.cuda.Device().id)
            columns["gpu"] = properties["name"].decode()
            columns["driver_cuda"] = _cuda_version(cupy.cuda.runtime.driverGetVersion())
            columns["nvrtc"] = ".".join(map(str, cupy.cuda.nvrtc.getVersion()))
    except ImportError:
        columns["gpu"] = "none"
    return columns


def rotations(bytes_per_call: int, *, limit: int = 64) -> int:
    """How many copies of the inputs keep each call out of the L2 cache: together over 3 times its size."""
    import cupy

    l2 = cupy.cuda.runtime.getDeviceProperties(cupy.cuda.Device().id)["l2CacheSize"]
    return int(min(limit, max(2, -(-3 * l2 // max(bytes_per_call, 1)))))


def rotated(make: Callable[[int], Any], bytes_per_call: int, *, limit: int = 64) -> list[Any]:
    """`make(i)` for each rotation: `inputs = rotated(lambda seed: (x(seed), out()), nbytes)`."""
    return [make(index) for index in range(rotations(bytes_per_call, limit=limit))]


def summary(samples: Sequence[float]) -> Timing:
    """Of times in microseconds."""
    p10, median, p90 = np.percentile(np.asarray(samples, np.float64), [10, 50, 90])
    return Timing(float(median), float(p10), float(p90))


def graph_time(
    call: Callable[..., object],
    inputs: Sequence[Any],
    *,
    framework: str = "cupy",
    calls: int | None = None,
    replays: int = 30,
) -> Timing:
    """Device time of `call(*inputs[i])`, free of host cost and of the L2 cache.

    call: launches on the current stream of `framework` ("cupy" or "torch") and allocates nothing there if it
        can (pass `out=`).  It runs once over all inputs before the capture, which compiles and plans.
    inputs: argument tuples, used in turn (see `rotated`).
    calls: calls in one captured graph; default: enough for about 2 ms, a multiple of len(inputs).
    replays: timed launches of the graph, after three that warm up.
    """
    for arguments in inputs:
        call(*arguments)
    captured = _TorchGraph if framework == "torch" else _CupyGraph
    if calls is None:
        once = captured(call, inputs, len(inputs))
        guess_us = max(min(once.elapsed_us() for _ in range(3)) / len(inputs), 0.5)
        calls = len(inputs) * max(1, min(2000, round(2000 / guess_us)) // len(inputs))
    graph = captured(call, inputs, calls)
    for _ in range(3):
        graph.elapsed_us()
    return summary([graph.elapsed_us() / calls for _ in range(replays)])


def graph_times_in_turn(
    variants: Mapping[str, Callable[..., object]], inputs: Sequence[Any], *, rounds: int = 20
) -> dict[str, Timing]:
    """`graph_time` of several implementations on torch tensors, one replay each a round: drift hits all alike."""
    graphs = {}
    for name, call in variants.items():
        for arguments in inputs:
            call(*arguments)
        once = _TorchGraph(call, inputs, len(inputs))
        guess_us = max(min(once.elapsed_us() for _ in range(3)) / len(inputs), 0.5)
        calls = len(inputs) * max(1, round(2000 / guess_us) // len(inputs))
        graphs[name] = _TorchGraph(call, inputs, calls), calls
    samples: dict[str, list[float]] = {name: [] for name in graphs}
    for number in range(rounds + 2):
        for name, (graph, calls) in graphs.items():
            elapsed = graph.elapsed_us() / calls
            if number >= 2:  # two rounds warm up
                samples[name].append(elapsed)
    return {name: summary(values) for name, values in samples.items()}


class _CupyGraph:
    """`calls` calls captured on a stream of CuPy's; `elapsed_us` replays them once."""

    def __init__(self, call: Callable[..., object], inputs: Sequence[Any], calls: int) -> None:
        import cupy

        self.stream = cupy.cuda.Stream(non_blocking=True)
        self.start, self.stop = cupy.cuda.Event(), cupy.cuda.Event()
        cupy.cuda.Device().synchronize()
        with self.stream:
            self.stream.begin_capture()
            # Arrays allocated during the capture must live as long as the graph: CuPy's pool knows no graphs.
            self.kept = [call(*inputs[index % len(inputs)]) for index in range(calls)]
            self.graph = self.stream.end_capture()
            self.graph.upload(self.stream)
            self.stream.synchronize()

    def elapsed_us(self) -> float:
        import cupy

        self.start.record(self.stream)
        self.graph.launch(self.stream)
        self.stop.record(self.stream)
        self.stop.synchronize()
        return float(cupy.cuda.get_elapsed_time(self.start, self.stop)) * 1e3


class _TorchGraph:
    """The same through torch.cuda.graph, whose allocator keeps a pool for the graph."""

    def __init__(self, call: Callable[..., object], inputs: Sequence[Any], calls: int) -> None:
        import torch

        torch.cuda.synchronize()
        self.start, self.stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        self.graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self.graph):
            for index in range(calls):
                call(*inputs[index % len(inputs)])

    def elapsed_us(self) -> float:
        self.start.record()
        self.graph.replay()
        self.stop.record()
        self.stop.synchronize()
        return float(self.start.elapsed_time(self.stop)) * 1e3


def host_times(
    variants: Mapping[str, Callable[[], object]],
    *,
    calls: int = 50,
    repeats: int = 100,
    synchronize: Callable[[], object] | None = None,
) -> dict[str, Timing]:
    """Host microseconds of each call in a steady state: what the thread that calls is busy for.

    calls: calls in one timed loop, few enough that the device's launch queue (about 1000 launches) never fills: a full
    queue makes the host wait.  repeats: loops of each variant, one a round in turn, so that drift of the host's clock
    hits all alike.  synchronize: drains the device before each loop, outside the timed part; default: CuPy's.
    Garbage is collected before and not while a loop is timed.
    """
    if synchronize is None:
        import cupy

        synchronize = cupy.cuda.Device().synchronize
    for call in variants.values():
        for _ in range(2 * calls):
            call()
    samples: dict[str, list[float]] = {name: [] for name in variants}
    collects = gc.isenabled()
    gc.collect()
    gc.disable()
    try:
        for _ in range(repeats):
            for name, call in variants.items():
                for _ in range(5):  # the caches are another variant's
                    call()
                synchronize()
                start = time.perf_counter()
                for _ in range(calls):
                    call()
                samples[name].append((time.perf_counter() - start) / calls * 1e6)
            gc.collect(0)
    finally:
        synchronize()
        if collects:
            gc.enable()
    return {name: summary(values)._replace(best_us=min(values)) for name, values in samples.items()}


def host_time(call: Callable[[], object], **options: Any) -> Timing:
    """`host_times` of one call."""
    return host_times({"": call}, **options)[""]


def _call_python() -> None:
    """Nothing, by a function of Python's."""


def python_call_us() -> float:
    """Microseconds of an empty call on this host, in the loop of `host_times`: what tells one host from another."""
    return host_time(_call_python, calls=1000, repeats=30, synchronize=_call_python).best_us or 0.0


def copy_rate(nbytes: int = 1 << 28) -> float:
    """GB/s of a device-to-device copy (bytes read plus written), the yardstick for memory-bound kernels.

    It is the best of CuPy's memcpy and a plain element copy kernel, both by `graph_time`."""
    import cupy

    def make(_: int) -> tuple[Any, Any]:
        return cupy.ones(nbytes // 4, cupy.float32), cupy.empty(nbytes // 4, cupy.float32)

    inputs = rotated(make, 2 * nbytes, limit=4)

    def memcpy(source: Any, target: Any) -> None:
        target.data.copy_from_device_async(source.data, nbytes, cupy.cuda.get_current_stream())

    def kernel(source: Any, target: Any) -> None:
        cupy.add(source, 0, out=target)

    fastest = min(graph_time(copy, inputs).median_us for copy in (memcpy, kernel))
    return 2 * nbytes / fastest / 1e3


def row(
    op: str,
    problem: str,
    dtype: str,
    implementation: str,
    timing: Timing | float,
    *,
    nbytes: float | None = None,
    flops: float | None = None,
    **extra: object,
) -> dict[str, object]:
    """One line of a result file.

    problem: the shape in words, e.g. "rows=16384 width=4096".  implementation: "cki", "torch", ...
    timing: microseconds.  nbytes: bytes that must move; gives GB/s.  flops: gives TFLOP/s.
    """
    measured = timing if isinstance(timing, Timing) else Timing(timing, timing, timing)
    line: dict[str, object] = {
        "op": op,
        "problem": problem,
        "dtype": dtype,
        "implementation": implementation,
        "median_us": round(measured.median_us, 3),
        "p10_us": round(measured.p10_us, 3),
        "p90_us": round(measured.p90_us, 3),
        "gb_per_s": "" if nbytes is None else round(nbytes / measured.median_us / 1e3, 1),
        "tflop_per_s": "" if flops is None else round(flops / measured.median_us / 1e6, 2),
    }
    if measured.best_us is not None:
        line["best_us"] = round(measured.best_us, 3)
    line.update(extra)
    return line


def results_dir() -> Path:
    """Where CSV files go: $BENCH_OUT, else bench/results."""
    return Path(os.environ.get("BENCH_OUT") or RESULTS)


def write_csv(
    name: str,
    rows: Sequence[Mapping[str, object]],
    folder: Path | None = None,
    *,
    is_quiet: bool = False,
) -> Path:
    """Writes `<folder>/<name>.csv`, one line a row, environment last, and prints the rows as a table.

    A command with arguments may measure a part: what it did not measure stays in bench/results.
    """
    if not rows:
        raise ValueError(f"benchmark {name!r} measured nothing")
    may_be_part = folder is None and not os.environ.get("BENCH_OUT") and len(sys.argv) > 1
    folder = folder or results_dir()
    folder.mkdir(parents=True, exist_ok=True)
    columns = list(dict.fromkeys(column for line in rows for column in line))
    path = folder / f"{name}.csv"
    kept = _others(path, rows) if may_be_part else []
    others = [column for column in (kept[0] if kept else ()) if column not in {*columns, *environment()}]
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, [*columns, *others, *environment()], restval="")
        writer.writeheader()
        writer.writerows(kept)
        for line in rows:
            writer.writerow({**line, **environment()})
    if not is_quiet:
        print_table(rows, columns)
        print(f"wrote {path}")
    return path


def _others(path: Path, rows: Sequence[Mapping[str, object]]) -> list[dict[str, str]]:
    """Rows of a file that measure something else than these."""
    if not path.exists():
        return []
    names = ("op", "problem", "dtype", "implementation")
    measured = {tuple(str(line.get(name, "")) for name in names) for line in rows}
    with path.open(newline="", encoding="utf-8") as file:
        return [
            line for line in csv.DictReader(file) if tuple(line.get(n, "") for n in names) not in measured
        ]


def print_table(rows: Sequence[Mapping[str, object]], columns: Sequence[str]) -> None:
    """The rows as aligned text."""
    cells = [[str(line.get(column, "")) for column in columns] for line in rows]
    widths = [max(len(text) for text in column) for column in zip(columns, *cells)]
    for line in (columns, *cells):
        print("  ".join(text.ljust(width) for text, width in zip(line, widths)).rstrip())
    sys.stdout.flush()
