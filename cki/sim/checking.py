"""What the simulated device looks for while a kernel runs."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from contextvars import ContextVar
from dataclasses import dataclass
from numbers import Integral

from cki.errors import InvalidTypeError


@dataclass(frozen=True)
class Checks:
    """Each check can be switched on by itself.

    adversarial: asynchronous copies and products complete as late as the rules allow, their targets and fresh shared
        memory hold NaN, threads run in an order drawn from `seed`.
    hazards: operands of work in flight that are read or overwritten are reported.
    races: conflicting accesses to shared memory that no barrier orders are reported (builds an instrumented kernel).
    bounds: accesses outside the launch's tensors, its shared memory or an array of known size are reported (the same
        build).
    seed: of the adversarial order; the same seed gives the same order whatever the number of OS threads.

    Raises InvalidTypeError for what is no bool, or no int as seed.
    """

    adversarial: bool = False
    hazards: bool = False
    races: bool = False
    bounds: bool = False
    seed: int = 0

    def __post_init__(self) -> None:
        wrong = [
            f"{name} is {value!r}, not a bool"
            for name, value in vars(self).items()
            if name != "seed" and not isinstance(value, bool)
        ]
        if not isinstance(self.seed, Integral) or isinstance(self.seed, bool):
            wrong.append(f"seed is {self.seed!r}, not an int")
        if wrong:
            raise InvalidTypeError("checks of the simulated device", wrong)

    @property
    def bits(self) -> int:
        """As the runtime takes them (cuda_src/sim/runtime/block.h)."""
        return self.adversarial | self.hazards << 1 | self.races << 2 | self.bounds << 3

    @property
    def needs_instrumented_kernel(self) -> bool:
        """Whether the compiler must insert a hook at each access."""
        return self.races or self.bounds

    @staticmethod
    def all(seed: int = 0) -> Checks:
        """Every check at once."""
        return Checks(adversarial=True, hazards=True, races=True, bounds=True, seed=seed)


_PLAIN = Checks()
_current: ContextVar[Checks] = ContextVar("cki_sim_checks", default=_PLAIN)


def current() -> Checks:
    """The checks in force for launches of this thread or task."""
    return _current.get()


@contextlib.contextmanager
def checks(
    *,
    adversarial: bool = False,
    hazards: bool = False,
    races: bool = False,
    bounds: bool = False,
    seed: int = 0,
) -> Iterator[Checks]:
    """All launches on the simulated device inside the `with` are checked; see `Checks` for the arguments."""
    chosen = Checks(adversarial, hazards, races, bounds, seed)
    token = _current.set(chosen)
    try:
        yield chosen
    finally:
        _current.reset(token)
