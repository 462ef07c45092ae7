"""How many orders of threads, copies and poison a test tries under the simulated device's checks.

A seed is one order.  Each kernel is run with twenty where its shape is smallest; further cases of the kernel, which
differ by a constant, a layout or a type, add a few seeds of their own to them.
"""

from __future__ import annotations

import contextlib
from typing import Any

import cki.sim

ALL, FEW = 20, 3


def seeds_of(case: int) -> range:
    """Of the case of a kernel with this number, on the simulated device."""
    return range(ALL) if case == 0 else range(ALL + FEW * (case - 1), ALL + FEW * case)


def orders(device: Any, case: int = 0, on_gpu: int = 1) -> range:
    """The same; as many runs as `on_gpu` says where there are no checks."""
    return seeds_of(case) if device.kind == "sim" else range(on_gpu)


def every_check(device: Any, seed: int) -> contextlib.AbstractContextManager[Any]:
    """All that the simulated device can find, in the order of this seed; nothing on a GPU."""
    if device.kind != "sim":
        return contextlib.nullcontext()
    return cki.sim.checks(adversarial=True, hazards=True, races=True, bounds=True, seed=seed)
