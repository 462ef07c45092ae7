"""`python -m cki compile`: compile the package's kernels ahead, with no GPU needed.

Without --out they go to the cache of this machine.  With --out DIR they go to a directory that serves machines
without a compiler: set CKI_CUBIN_DIR=DIR there.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from cki import background, cache, registry
from cki.compiler import CompileReport
from cki.device import sim_device
from cki.disk import KernelDirectory
from cki.errors import CompileError
from cki.heuristics.default_set import default_kernels
from cki.kernel import ARCHITECTURES, KernelSpec


def main(argv: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m cki compile",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "--arch", action="append", choices=ARCHITECTURES,
        help="repeat for several; default: that of this machine's GPUs, else all",
    )  # fmt: skip
    parser.add_argument("--out", metavar="DIR", help="write a prebuilt directory")
    parser.add_argument(
        "--family",
        action="append",
        choices=sorted(registry.FAMILIES),
        help="repeat for several; default: all",
    )
    options = parser.parse_args(argv)
    if options.out:
        try:  # now, and not after minutes of compiling
            Path(options.out).mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryFile(dir=options.out):
                pass
        except OSError as error:
            parser.error(f"--out {options.out}: {error.strerror or error}")
    archs = options.arch or background.architectures() or list(ARCHITECTURES)
    failures = 0
    for arch in archs:
        failures += compile_all(arch, options.family or list(registry.FAMILIES), options.out)
    return 1 if failures else 0


def compile_all(arch: str, families: Sequence[str], out: str | None) -> int:
    """Compile one architecture's kernels; the number that failed or that ptxas complains about."""
    specs = dict.fromkeys(
        default_kernels(sim_device(arch)) if len(families) == len(registry.FAMILIES) else []
    )
    for family in families:
        specs |= dict.fromkeys(registry.representative_specs(family, arch))
    directory = KernelDirectory(out) if out else None
    progress = background.Progress(f"compiling {len(specs)} kernels for {arch}", len(specs))
    start, failures, written = time.monotonic(), 0, 0
    for spec in specs:
        try:
            key, compiled = cache.get(spec, arch)
        except CompileError as error:
            failures += 1
            print(f"{registry.describe(spec)}: {error}", file=sys.stderr)
            continue
        finally:
            progress.step()
        complaints = complaints_about(spec, compiled.report)
        if complaints:
            failures += 1
            print(f"{registry.describe(spec)} for {arch}: {'; '.join(complaints)}", file=sys.stderr)
        if directory is not None and directory.write(key, compiled):
            written += 1
    progress.close()
    seconds = time.monotonic() - start
    print(
        f"{arch}: {len(specs) - failures} of {len(specs)} kernels in {seconds:.1f} s"
        + (f" in {out}" if out else "")
    )
    if directory is not None and written < len(specs) - failures:
        print(f"{out} could not be written", file=sys.stderr)
        failures += 1
    return failures


def complaints_about(spec: KernelSpec, report: CompileReport) -> list[str]:
    """What makes a compiled kernel unacceptable: spills, ptxas's C75xx notes, registers over the stated budget."""
    kernel = report.kernel(spec.entry)
    complaints = list(report.messages)
    if kernel.spill_store_bytes or kernel.spill_load_bytes:
        complaints.append(f"spills {kernel.spill_store_bytes} bytes, loads {kernel.spill_load_bytes}")
    if kernel.registers > spec.max_registers:
        complaints.append(f"{kernel.registers} registers, budget {spec.max_registers}")
    return complaints
