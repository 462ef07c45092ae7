"""Running small kernels on the simulated device from tests."""

from __future__ import annotations

import ctypes
import functools
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from cki import sim
from cki.sim import Checks

KERNELS = Path(__file__).parent / "kernels"

#: Every check on its own and all together, on the plain order and on adversarial ones.
SOUND_SEEDS = 100


@functools.cache
def kernel(file: str, entry: str) -> sim.SimKernel:
    """The entry of a file in tests/sim/kernels; all of a file's entries are compiled at once."""
    path = KERNELS / file
    text = path.read_text()
    entries = re.findall(r'^extern "C" __global__ void (\w+)\(', text, re.MULTILINE)
    return sim.compile_kernel(f'#line 1 "{path}"\n{text}', entry, name=file, together_with=entries)


def arguments(
    values: tuple[Any, ...],
) -> tuple[ctypes.Array[ctypes.c_void_p], list[tuple[int, int]], list[Any]]:
    """The argument array of arrays (by address), 32-bit ints and floats; the arrays' extents; what must stay alive."""
    kept: list[Any] = []
    extents = []
    for value in values:
        if isinstance(value, np.ndarray):
            kept.append(ctypes.c_void_p(value.ctypes.data))
            extents.append((value.ctypes.data, value.nbytes))
        elif isinstance(value, float):
            kept.append(ctypes.c_float(value))
        else:
            kept.append(ctypes.c_int(value))
    return (ctypes.c_void_p * len(kept))(*map(ctypes.addressof, kept)), extents, kept


def run(
    built: sim.SimKernel, grid: Any, block: Any, *values: Any, checks: Checks | None = None, **options: Any
) -> None:
    """Launch with NumPy arrays, ints and floats as arguments."""
    argv, extents, _kept = arguments(values)
    sim.launch(built, grid, block, argv, checks=checks, extents=extents, **options)


def report(built: sim.SimKernel, grid: Any, block: Any, *values: Any, checks: Checks, **options: Any) -> str:
    """The report of a launch that must be found faulty."""
    with pytest.raises(sim.SimulationError) as error:
        run(built, grid, block, *values, checks=checks, **options)
    return str(error.value)


def sound_checks() -> list[Checks]:
    """100 seeds of every check: 50 adversarial with hazards, 50 with everything, and each check on the plain order."""
    plain = [Checks(hazards=True), Checks(races=True), Checks(bounds=True)]
    half = SOUND_SEEDS // 2
    return (
        plain
        + [Checks(adversarial=True, hazards=True, seed=s) for s in range(half)]
        + [Checks.all(s) for s in range(half, SOUND_SEEDS)]
    )


def line_of(file: str, marker: str) -> str:
    """`file:line` of the line that ends with `// marker`."""
    for number, text in enumerate((KERNELS / file).read_text().splitlines(), 1):
        if text.rstrip().endswith(f"// {marker}"):
            return f"{file}:{number}"
    raise AssertionError(f"no line of {file} ends with // {marker}")
