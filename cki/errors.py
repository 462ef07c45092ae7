"""Every error CKI raises.

Each class derives from `CkiError` and from the built-in error that a Python caller would
expect (`ValueError`, `TypeError`, ...), so both `except CkiError` and `except ValueError` work.
All checks run before anything is launched or written.
"""

from __future__ import annotations

from collections.abc import Sequence


class CkiError(Exception):
    """Base of all errors raised by CKI."""


def _describe(summary: str, problems: Sequence[str], hint: str) -> str:
    lines = [summary]
    lines += [f"  - {problem}" for problem in problems]
    if hint:
        lines.append(f"  hint: {hint}")
    return "\n".join(lines)


class InvalidArgumentError(CkiError, ValueError):
    """One or more arguments break a rule.  `problems` lists every violated rule, `hint` what would pass."""

    def __init__(self, summary: str, problems: Sequence[str] = (), hint: str = "") -> None:
        super().__init__(_describe(summary, problems, hint))
        self.problems = tuple(problems)
        self.hint = hint


class InvalidTypeError(CkiError, TypeError):
    """An argument is of a type or dtype that no kernel takes (whatever else is wrong: `problems` lists that too)."""

    def __init__(self, summary: str, problems: Sequence[str] = (), hint: str = "") -> None:
        super().__init__(_describe(summary, problems, hint))
        self.problems = tuple(problems)
        self.hint = hint


class DeviceError(CkiError, RuntimeError):
    """No usable device, a tensor on the wrong device, or a driver or library that is missing or too old."""

    def __init__(self, summary: str, problems: Sequence[str] = (), hint: str = "") -> None:
        super().__init__(_describe(summary, problems, hint))
        self.problems = tuple(problems)
        self.hint = hint


class UnsupportedError(CkiError, ValueError):
    """A valid problem that no kernel serves on this device; `reasons` says why, `hint` what would work."""

    def __init__(self, summary: str, reasons: Sequence[str] = (), hint: str = "") -> None:
        super().__init__(_describe(summary, reasons, hint))
        self.reasons = tuple(reasons)
        self.hint = hint


class CompileError(CkiError, RuntimeError):
    """A kernel did not compile, or no compiler was found; the message holds the compiler's own words."""


class LaunchError(CkiError, RuntimeError):
    """The driver refused a launch."""


class SimulationError(CkiError, RuntimeError):
    """The simulated device found a fault (race, hazard, deadlock, out-of-bounds); the message is its report."""


class OutOfBlocksError(CkiError, MemoryError):
    """A paged cache has `free` blocks, slots or bytes and `needed` are wanted; nothing changed: free some, retry."""

    def __init__(self, summary: str, *, needed: int = 0, free: int = 0, hint: str = "") -> None:
        super().__init__(_describe(summary, (), hint))
        self.needed = needed
        self.free = free
        self.hint = hint


class MissingPackageError(CkiError, ImportError):
    """An optional package, or one that carries weights, is not installed; the message says how to install it."""
