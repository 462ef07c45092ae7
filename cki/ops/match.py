"""Whether tensors are like the ones that a problem was planned for, without a loop: one generated function a problem.

A steady-state call spends most of its host time here.  Comparing attributes one by one with constants in straight-line
code takes half the time of building and hashing a key of them (0.4 us a torch tensor).  The code comes from the
adapter's `guard`, expressions over one tensor; a problem whose tensors have none is found by its key alone.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple


class Guard(NamedTuple):
    """How to compare one tensor with an example.

    pointer: an expression of its address.  conditions: expressions that hold for what may stand in its place.  In
    both, `{t}` is the tensor, `{p}` its address and `{name}` a constant.  errors: what evaluating them on some other
    object may raise.
    """

    pointer: str
    conditions: tuple[str, ...]
    constants: Mapping[str, object]
    errors: tuple[type[Exception], ...] = (AttributeError,)


#: Tensors (None where one was left out) -> the addresses of those given, or None when one is not as planned.
Matcher = Callable[[Sequence[Any]], "list[int] | None"]


def matcher(guards: Sequence[Guard | None]) -> Matcher:
    """The function for tensors in this order; a guard of None stands for a tensor that was left out."""
    names: dict[str, object] = {}
    presence = [f"t{index} is {'not ' if guard is None else ''}None" for index, guard in enumerate(guards)]
    lines, pointers = [f"if {' or '.join(presence)}: return None"], []
    for index, guard in enumerate(guards):
        if guard is None:
            continue
        constants = {name: f"{name}{index}" for name in guard.constants}
        names |= {constants[name]: value for name, value in guard.constants.items()}
        fields = {"t": f"t{index}", "p": f"p{index}", **constants}
        lines.append(f"p{index} = " + guard.pointer.format(**fields))
        test = " and ".join(condition.format(**fields) for condition in guard.conditions)
        lines.append(f"if not ({test}): return None")
        pointers.append(f"p{index}")
    # ValueError: another number of tensors.
    errors = {ValueError, *(error for guard in guards if guard is not None for error in guard.errors)}
    names["errors"] = tuple(sorted(errors, key=str))
    arguments = "".join(f"t{index}, " for index in range(len(guards)))
    body = "\n".join(f"        {line}" for line in lines)
    text = (
        f"def match(tensors):\n    try:\n        {arguments}= tensors\n{body}\n"
        f"    except errors:\n        return None\n    return [{', '.join(pointers)}]\n"
    )
    exec(compile(text, "<tensors as planned>", "exec"), names)
    found: Any = names["match"]
    return found  # type: ignore[no-any-return]
