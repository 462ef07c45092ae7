"""`cki.choices()`: what was chosen for each problem that has been called so far.

Kernels and their configurations are functions of the problem and the device (`cki.heuristics`), decided at the first
call and remembered under device, shapes, strides, element types and attributes (`cki.ops.call`).  This lists what is
remembered; `CKI_LOG=1` tells the same launch by launch.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from cki.errors import InvalidArgumentError, InvalidTypeError
from cki.launch import describe_step
from cki.ops.call import remembered
from cki.ops.entry import Entry
from cki.ops.table import public_specs
from cki.own_operation import made


class Choice(NamedTuple):
    """One problem and its launches.

    operation: the public name, "encoder" for `cki.Encoder`.  device: "NVIDIA H200 (sm_90a)".  tensors: "x f16[4, 8]",
    those of the call, at most eight.  launches: kernel, compile-time constants, geometry and the reason of each.
    """

    operation: str
    device: str
    tensors: tuple[str, ...]
    launches: tuple[str, ...]

    def __str__(self) -> str:
        head = f"{self.operation}({', '.join(self.tensors)}) on {self.device}"
        return "\n  ".join((head, *self.launches))


def choices(operation: str | None = None) -> list[Choice]:
    """What was chosen for every problem called so far in this process: the oldest first, an encoder's own behind them.

    operation: only this one's, by name; None is all.  Problems with nothing to compute have no choice.  Of very many
    problems the oldest are forgotten, and an encoder's with it.

    Example: `print(*cki.choices("linear"), sep="\\n")`.
    """
    if operation is not None and not isinstance(operation, str):
        raise InvalidTypeError(f"operation is a {type(operation).__name__}, not str or None")
    found = list(_choices(operation))
    known = {*public_specs(), *(spec.name for spec in made), "encoder"}
    if operation is not None and not found and operation not in known:
        raise InvalidArgumentError(f"operation is {operation!r}", hint=f"one of {', '.join(sorted(known))}")
    return found


def _choices(operation: str | None) -> Iterator[Choice]:
    entry: Entry
    for entry in remembered():
        executable = entry.executable
        if executable is None or operation not in (None, entry.spec.name):
            continue
        device = executable.device
        launches = tuple(describe_step(step, device) for step in executable.plan.steps)
        yield Choice(entry.spec.name, str(device), entry.tensors, launches)
