"""Runs every benchmark of this folder, each in its own process, draws its results, and says how each ended.

    python bench/run.py                 # all
    python bench/run.py norms launch_cost
    python bench/run.py --out /tmp/r --limit 600

A family is a file `bench/<family>.py` that runs by itself (it ends with `if __name__ == "__main__":`); a new one is
found, the others are its modules.  One that fails, or takes longer than the limit, does not stop the others; the exit
status is 1 then.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

HERE = Path(__file__).resolve().parent
SHARED = {"common", "plot", "plot_sweeps", "run"}
#: Seconds that a family has to write what it measured when its time is over.
_GRACE_S = 20.0


class Outcome(NamedTuple):
    """How a family's run ended: "done", "failed (status)" or "stopped after its limit"."""

    family: str
    ending: str
    seconds: float

    @property
    def is_done(self) -> bool:
        return self.ending == "done"

    def __str__(self) -> str:
        return f"{self.family:<18} {self.ending}, {self.seconds:.0f} s"


def families(folder: Path = HERE) -> list[str]:
    """The names of all benchmarks, sorted."""
    return sorted(
        path.stem
        for path in folder.glob("*.py")
        if path.stem not in SHARED and '__name__ == "__main__"' in path.read_text(encoding="utf-8")
    )


def run_family(family: str, out: Path, folder: Path = HERE, limit_s: float = 2400.0) -> Outcome:
    """Runs one benchmark, at most limit_s seconds."""
    print(f"== {family}", flush=True)
    start = time.monotonic()
    paths = os.pathsep.join(filter(None, [str(folder.parent), os.environ.get("PYTHONPATH", "")]))
    environment = {**os.environ, "BENCH_OUT": str(out), "PYTHONPATH": paths}
    # A session of its own, so that what it started can be ended with it.  A shell lets its background jobs ignore
    # SIGINT, which they hand down.
    process = subprocess.Popen(
        [sys.executable, str(folder / f"{family}.py")], env=environment, start_new_session=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )  # fmt: skip
    try:
        status = process.wait(limit_s)
        ending = "done" if status == 0 else f"failed ({status})"
    except subprocess.TimeoutExpired:
        ending = f"stopped after {limit_s:.0f} s"
        process.send_signal(signal.SIGINT)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(_GRACE_S)
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
    outcome = Outcome(family, ending, time.monotonic() - start)
    print(f"== {outcome}", flush=True)
    return outcome


def main(argv: Sequence[str] | None = None) -> int:
    """Runs what was asked for; returns the exit status."""
    known = families()
    parser = argparse.ArgumentParser(
        prog="bench/run.py", description="run CKI's benchmarks on this machine's GPU"
    )
    parser.add_argument("family", nargs="*", help=f"of {', '.join(known)}; default: all")
    parser.add_argument(
        "--out", type=Path, default=HERE / "results", help="folder of the CSV files and charts"
    )
    parser.add_argument("--limit", type=float, default=2400.0, help="seconds for each; default 2400")
    arguments = parser.parse_args(argv)
    unknown = sorted(set(arguments.family) - set(known))
    if unknown:
        parser.error(f"no benchmark named {', '.join(unknown)}; there are: {', '.join(known)}")
    import common
    import plot
    import plot_sweeps

    common.require_gpu()
    outcomes = [
        run_family(name, arguments.out, limit_s=arguments.limit) for name in arguments.family or known
    ]
    return report(outcomes, [*plot.draw_all(arguments.out), *plot_sweeps.draw_all(arguments.out)])


def report(outcomes: Sequence[Outcome], drawn: Sequence[Path]) -> int:
    """Prints the summary; returns the exit status."""
    for path in drawn:
        print(f"drew {path}")
    print("\nsummary")
    for outcome in outcomes:
        print(f"  {outcome}")
    failed = [outcome.family for outcome in outcomes if not outcome.is_done]
    print(f"  {len(outcomes) - len(failed)} of {len(outcomes)} done", flush=True)
    if failed:
        print(f"failed: {', '.join(failed)}", file=sys.stderr)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
