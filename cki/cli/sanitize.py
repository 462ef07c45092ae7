"""`python -m cki sanitize KERNEL ...`: run kernels on the simulated device under every check, and print the findings.

Checks: late completion of everything asynchronous, hazards of work in flight, data races, accesses out of bounds,
deadlocks.  Each problem runs in several seeded orders of its threads.

With --device cuda the same problems run once on the GPU, for a checker that watches the whole process:

    compute-sanitizer --tool memcheck --error-exitcode 9 python -m cki sanitize all --device cuda
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import Any

import cki
from cki import sim
from cki.cli.examples import NAMES, Example, examples
from cki.cli.selftest import put
from cki.device import cuda_device, sim_device
from cki.errors import SimulationError
from cki.kernel import ARCHITECTURES


def main(argv: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m cki sanitize",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "kernel",
        metavar="KERNEL",
        nargs="+",
        choices=(*NAMES, "all"),
        help=f"all, or some of {', '.join(NAMES)}",
    )
    parser.add_argument("--seeds", type=int, default=3, help="orders tried for each problem (default 3)")
    parser.add_argument("--dtype", action="append", choices=("f32", "f16", "bf16"), help="default: all three")
    parser.add_argument(
        "--arch", choices=ARCHITECTURES, help="architecture to stand for (default: CKI_SIM_ARCH)"
    )
    parser.add_argument("--device", choices=("sim", "cuda"), default="sim", help="default: sim")
    options = parser.parse_args(argv)
    if options.seeds < 1:
        parser.error(f"argument --seeds: {options.seeds}, not 1 or more")
    kernels = NAMES if "all" in options.kernel else tuple(dict.fromkeys(options.kernel))
    dtypes = tuple(options.dtype or ("f32", "f16", "bf16"))
    problems = [example for kernel in kernels for example in examples(kernel, dtypes)]
    if options.device == "cuda":
        run_on_gpu(problems)
        return 0
    print(
        f"{', '.join(kernels)} on the {sim_device(options.arch)}: every check, {options.seeds} orders of each problem"
    )
    findings = 0
    with cki.device("sim", arch=options.arch):
        for example in problems:
            report = ""
            for seed in range(options.seeds):
                report = report or checked_run(example.op, example.arguments, seed)
            findings += bool(report)
            print(f"  {'FAULT' if report else 'clean'}  {_title(example, kernels)}")
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


def run_on_gpu(problems: Sequence[Example]) -> None:
    """Each problem once, finished before the next begins, so that a checker's report names the problem printed last."""
    from cki.adapters.cupy import synchronize

    print(f"{len(problems)} problems on {cuda_device(0)}")
    with cki.device("cuda"):
        for example in problems:
            print(f"  {example.op} {example.label}", flush=True)
            arguments: dict[str, Any] = {
                name: put("cuda", value) for name, value in example.arguments.items()
            }
            getattr(cki, example.op)(**arguments)
            synchronize(0, 0)
    print("all ran")


def _title(example: Example, kernels: Sequence[str]) -> str:
    return example.label if len(kernels) == 1 else f"{example.op} {example.label}"
