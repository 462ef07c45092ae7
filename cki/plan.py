"""Plan: the launches that solve one problem, with addresses still open.

A planner returns steps; a step names its kernel, geometry and arguments.  Argument values are `Operand`s (they
become an address), `TensorMapArg`s (they become a 128-byte TMA descriptor) or plain numbers of the kind that the
kernel's `params` letter says.  `cki.launch` turns a plan into something that runs.
"""

from __future__ import annotations

from dataclasses import dataclass

from cki.kernel import KernelSpec
from cki.operand import Operand


@dataclass(frozen=True)
class TensorMapArg:
    """A tiled TMA descriptor over an operand.

    dims, box: innermost first, in elements.  strides: in bytes, of dims[1:].  swizzle: 0, 32, 64 or 128 bytes.
    """

    operand: Operand
    dims: tuple[int, ...]
    strides: tuple[int, ...]
    box: tuple[int, ...]
    swizzle: int = 128


@dataclass(frozen=True)
class NullPointer:
    """An absent optional tensor: the kernel receives a null pointer."""


ArgumentValue = Operand | TensorMapArg | NullPointer | int | float


@dataclass(frozen=True)
class Step:
    """One kernel launch.  grid and cluster count blocks, block counts threads; smem is dynamic shared memory in bytes.

    programmatic: the kernel may start before the previous one in the stream has ended (programmatic dependent
    launch, sm_90 and later): it then waits by griddepcontrol_wait before it reads what that one wrote.
    """

    kernel: KernelSpec
    grid: tuple[int, int, int]
    block: tuple[int, int, int]
    args: tuple[ArgumentValue, ...]
    smem: int = 0
    cluster: tuple[int, int, int] = (1, 1, 1)
    cooperative: bool = False
    programmatic: bool = False
    reason: str = ""  # why this kernel and configuration: shown by CKI_LOG


@dataclass(frozen=True)
class Plan:
    """Steps in stream order, and the temporary memory they need (slot name, bytes), each 256-byte aligned."""

    steps: tuple[Step, ...]
    workspace: tuple[tuple[str, int], ...] = ()
