"""Whether tensors are like the ones that a problem was planned for, without a loop: one generated function a problem.

A steady-state call spends most of its host time here.  Comparing attributes one by one with constants in straight-line
code takes half the time of building and hashing a key of them (0.4 us a torch tensor).  The code comes from the
adapter's `guard`, expressions over one tensor; a problem whose tensors have none is found by its key alone.
A framework that can compare all tensors in one call of its own (`Adapter.likeness`) is asked first.

`Recognition` is that code in pieces, from which `matcher` makes a function of the tensors and `cki.ops.steady` whole
calls.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from cki.generated import define


class Guard(NamedTuple):
    """How to compare one tensor with an example, whose address is a multiple of 16 (as that of what stands for it).

    pointer: an expression of its address.  conditions: expressions that hold for what may stand in its place.  In both,
    `{t}` is the tensor and `{name}` a constant.  errors: what evaluating them on some other object may raise.
    everywhere: a condition on the framework's state, tested once for all of its tensors.
    """

    pointer: str
    conditions: tuple[str, ...]
    constants: Mapping[str, object]
    errors: tuple[type[Exception], ...] = (AttributeError,)
    everywhere: str = ""


class Likeness(NamedTuple):
    """A test of several tensors in one call.

    check: takes as many tensors as there were examples; True means that the conditions of all their guards hold,
    False may mean anything.  unless: where this returns True, the answer is not to be trusted.
    askable: an expression over one tensor `{t}`, True where `check` may be asked about it at all.
    """

    check: Callable[..., bool]
    unless: Callable[[], bool] | None = None
    askable: str = ""


#: Tensors (None where one was left out) -> the addresses of those given, or None when one is not as planned.
Matcher = Callable[[Sequence[Any]], "list[int] | None"]


class Recognition:
    """Source code that recognises tensors `t0`, `t1`, ... and reads the addresses of those given.

    names: what the code refers to.  given: the indices of the tensors that are not None.  pointers: their addresses'
    variables.
    """

    def __init__(self, guards: Sequence[Guard | None], likeness: Likeness | None = None) -> None:
        """guards: None stands for a tensor left out.  likeness: of those given, tried before the conditions."""
        self.count = len(guards)
        self.given = [index for index, guard in enumerate(guards) if guard is not None]
        self.pointers = [f"p{index}" for index in self.given]
        self._reads: list[str] = []
        names: dict[str, object] = {}
        left_out = [f"t{index} is None" for index, guard in enumerate(guards) if guard is None]
        conditions = [*left_out]
        # ValueError: another number of tensors.
        errors: set[type[Exception]] = {ValueError}
        everywhere = ""
        for index, guard in enumerate(guards):
            if guard is None:
                continue
            constants = {name: f"{name}{index}" for name in guard.constants}
            names |= {constants[name]: value for name, value in guard.constants.items()}
            fields = {"t": f"t{index}", **constants}
            self._reads.append(f"p{index} = " + guard.pointer.format(**fields))
            conditions += [condition.format(**fields) for condition in guard.conditions]
            errors |= {*guard.errors}
            everywhere = guard.everywhere.format(**fields) or everywhere
        names["errors"] = tuple(sorted(errors, key=str))
        self._test = " and ".join(conditions) or "True"
        if likeness is not None:
            names |= {"alike": likeness.check, "unless": likeness.unless}
            unless = [] if likeness.unless is None else ["not unless()"]
            askable = [likeness.askable.format(t=f"t{index}") for index in self.given if likeness.askable]
            shortcut = [
                *left_out,
                *unless,
                *askable,
                f"alike({', '.join(f't{index}' for index in self.given)})",
            ]
            self._test = f"({' and '.join(shortcut)}) or ({self._test})"
        if everywhere:
            self._test = f"{everywhere} and ({self._test})"
        self.names = names

    def lines(self, unpacked: Sequence[str] = ()) -> list[str]:
        """Statements that tell whether the tensors are recognised (`known`) and read their addresses.

        unpacked: statements that give `t0`, ... their values, where that may fail.
        """
        # One test of all addresses: null is that of a tensor without memory.
        odd = " or ".join(f"{pointer} % 16" for pointer in self.pointers)
        known = " and ".join([*self.pointers, f"not ({odd})"])
        return [
            "known = False",
            "try:",
            *(f"    {line}" for line in unpacked),
            f"    if {self._test}:",
            *(f"        {read}" for read in self._reads),
            f"        known = {known if self.pointers else True}",
            "except errors:",
            "    known = False",
        ]

    def matcher(self) -> Matcher:
        """The function of a sequence of the tensors."""
        tensors = "".join(f"t{index}, " for index in range(self.count))
        body = self.lines([f"{tensors}= tensors"] if tensors else [])
        result = f"return [{', '.join(self.pointers)}] if known else None"
        found: Matcher = define("match", "tensors", [*body, result], self.names)
        return found


def matcher(guards: Sequence[Guard | None], likeness: Likeness | None = None) -> Matcher:
    """The function for tensors in this order (see `Recognition`)."""
    return Recognition(guards, likeness).matcher()
