"""Runs every benchmark of this folder, each in its own process, and draws its results.

    python bench/run.py                 # all
    python bench/run.py norm launch     # some
    python bench/run.py --out /tmp/r    # elsewhere than bench/results

A family is a file `bench/<family>.py`; a new one is found by itself.  One that fails does not stop the others; the
exit status is 1 then.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

HERE = Path(__file__).resolve().parent
SHARED = {"common", "plot", "run", "__init__"}


def families(folder: Path = HERE) -> list[str]:
    """The names of all benchmarks, sorted."""
    return sorted(
        path.stem for path in folder.glob("*.py") if path.stem not in SHARED and path.stem[0] != "_"
    )


def run_family(family: str, out: Path, folder: Path = HERE) -> bool:
    """Runs one benchmark; says whether it ended well."""
    print(f"== {family}", flush=True)
    start = time.monotonic()
    paths = os.pathsep.join(filter(None, [str(folder.parent), os.environ.get("PYTHONPATH", "")]))
    environment = {**os.environ, "BENCH_OUT": str(out), "PYTHONPATH": paths}
    status = subprocess.run(
        [sys.executable, str(folder / f"{family}.py")], env=environment, check=False
    ).returncode
    print(f"== {family}: {'done' if status == 0 else f'failed ({status})'}, {time.monotonic() - start:.0f} s")
    return status == 0


def main(argv: Sequence[str] | None = None) -> int:
    """Runs what was asked for; returns the exit status."""
    known = families()
    parser = argparse.ArgumentParser(
        prog="bench/run.py", description="run CKI's benchmarks on this machine's GPU"
    )
    parser.add_argument("family", nargs="*", help=f"of {', '.join(known) or 'none yet'}; default: all")
    parser.add_argument(
        "--out", type=Path, default=HERE / "results", help="folder of the CSV files and charts"
    )
    arguments = parser.parse_args(argv)
    unknown = sorted(set(arguments.family) - set(known))
    if unknown:
        parser.error(f"no benchmark named {', '.join(unknown)}; there are: {', '.join(known)}")
    import common
    import plot

    common.require_gpu()
    failed = [name for name in arguments.family or known if not run_family(name, arguments.out)]
    for path in plot.draw_all(arguments.out):
        print(f"drew {path}")
    if failed:
        print(f"failed: {', '.join(failed)}", file=sys.stderr)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
