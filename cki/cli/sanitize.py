"""`python -m cki sanitize KERNEL`: run a kernel on the simulated device with every check on, and print what it finds.

Checks: late completion of everything asynchronous, hazards of work in flight, data races, accesses out of bounds,
deadlocks.  Each problem runs in several seeded orders of its threads.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence

import cki
from cki import sim
from cki.cli.examples import NAMES, examples
from cki.device import sim_device
from cki.errors import SimulationError
from cki.kernel import ARCHITECTURES


def main(argv: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m cki sanitize",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("kernel", metavar="KERNEL", choices=NAMES, help=f"one of {', '.join(NAMES)}")
    parser.add_argument("--seeds", type=int, default=3, help="orders tried for each problem (default 3)")
    parser.add_argument("--dtype", action="append", choices=("f32", "f16", "bf16"), help="default: all three")
    parser.add_argument(
        "--arch", choices=ARCHITECTURES, help="architecture to stand for (default: CKI_SIM_ARCH)"
    )
    options = parser.parse_args(argv)
    dtypes = tuple(options.dtype or ("f32", "f16", "bf16"))
    print(
        f"{options.kernel} on the {sim_device(options.arch)}: every check, {options.seeds} orders of each problem"
    )
    findings = 0
    with cki.device("sim", arch=options.arch):
        for example in examples(options.kernel, dtypes):
            report = ""
            for seed in range(options.seeds):
                report = report or checked_run(example.op, example.arguments, seed)
            findings += bool(report)
            print(f"  {'FAULT' if report else 'clean'}  {example.label}")
            if report:
                print(report)
    print(f"{findings} problems with faults" if findings else "no faults found")
    return 1 if findings else 0


def checked_run(op: str, arguments: dict[str, object], seed: int) -> str:
    """The simulated device's report of one run; empty when it found nothing."""
    with sim.checks(adversarial=True, hazards=True, races=True, bounds=True, seed=seed):
        try:
            getattr(cki, op)(**arguments)
        except SimulationError as error:
            return str(error)
    return ""
