"""Whether tensors are like the ones that a problem was planned for, without a loop: one generated function a problem.

A steady-state call spends most of its host time here.  Comparing attributes one by one with constants in straight-line
code takes half the time of building and hashing a key of them (0.4 us a torch tensor).  The code comes from the
adapter's `guard`, expressions over one tensor; a problem whose tensors have none is found by its key alone.
A framework that can compare all tensors in one call of its own (`Adapter.likeness`) is asked first.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple


class Guard(NamedTuple):
    """How to compare one tensor with an example.

    pointer: an expression of its address.  address: a condition on it.  conditions: expressions that hold for what may
    stand in its place.  In all, `{t}` is the tensor, `{p}` its address and `{name}` a constant.  errors: what
    evaluating them on some other object may raise.
    """

    pointer: str
    address: str
    conditions: tuple[str, ...]
    constants: Mapping[str, object]
    errors: tuple[type[Exception], ...] = (AttributeError,)


class Likeness(NamedTuple):
    """A test of several tensors in one call.

    check: takes as many tensors as there were examples; True means that the conditions of all their guards hold,
    False may mean anything.  unless: where this returns True, the answer is not to be trusted.
    """

    check: Callable[..., bool]
    unless: Callable[[], bool] | None = None


#: Tensors (None where one was left out) -> the addresses of those given, or None when one is not as planned.
Matcher = Callable[[Sequence[Any]], "list[int] | None"]


def matcher(guards: Sequence[Guard | None], likeness: Likeness | None = None) -> Matcher:
    """The function for tensors in this order; a guard of None stands for a tensor that was left out.

    likeness: of the tensors that are given (`Adapter.likeness`), tried before the conditions.
    """
    names: dict[str, object] = {}
    given = [index for index, guard in enumerate(guards) if guard is not None]
    pointers, addresses, conditions = [], [], []
    for index, guard in enumerate(guards):
        if guard is None:
            conditions.append(f"t{index} is None")
            continue
        constants = {name: f"{name}{index}" for name in guard.constants}
        names |= {constants[name]: value for name, value in guard.constants.items()}
        fields = {"t": f"t{index}", "p": f"p{index}", **constants}
        pointers.append(f"p{index} = " + guard.pointer.format(**fields))
        addresses.append(guard.address.format(**fields))
        conditions += [condition.format(**fields) for condition in guard.conditions]
    # ValueError: another number of tensors.
    errors = {ValueError, *(error for guard in guards if guard is not None for error in guard.errors)}
    names["errors"] = tuple(sorted(errors, key=str))
    tensors = "".join(f"t{index}, " for index in range(len(guards)))
    left_out = [f"t{index} is None" for index, guard in enumerate(guards) if guard is None]
    test = " and ".join(conditions)
    if likeness is not None:
        names |= {"alike": likeness.check, "unless": likeness.unless}
        left_out = [f"t{index} is None" for index, guard in enumerate(guards) if guard is None]
        unless = [] if likeness.unless is None else ["not unless()"]
        shortcut = [*left_out, *unless, f"alike({', '.join(f't{index}' for index in given)})"]
        test = f"({' and '.join(shortcut)}) or ({test})"
    lines = [
        "def match(tensors):",
        "    try:",
        f"        {tensors}= tensors",
        f"        if not ({test}): return None",
        *(f"        {pointer}" for pointer in pointers),
        f"        if not ({' and '.join(addresses) or 'True'}): return None",
        "    except errors:",
        "        return None",
        f"    return [{', '.join(f'p{index}' for index in given)}]",
    ]
    exec(compile("\n".join(lines), "<tensors as planned>", "exec"), names)
    found: Any = names["match"]
    return found  # type: ignore[no-any-return]
