"""Errors of an operation in the words of a function that calls it under a framework's own names."""

from __future__ import annotations

import re
from collections.abc import Mapping

from cki.errors import CkiError, DeviceError, InvalidArgumentError, InvalidTypeError, UnsupportedError


def renamed(error: CkiError, operation: str, names: Mapping[str, str]) -> CkiError:
    """The error with the function's name in front, and its arguments' names in place of the operation's.

    names: of the arguments, by the operation's name of each.
    """
    if isinstance(error, UnsupportedError):
        problems = error.reasons
    elif isinstance(error, (InvalidArgumentError, InvalidTypeError, DeviceError)):
        problems = error.problems
    else:
        return error
    pattern = re.compile(rf"\b({'|'.join(names)})\b")

    def translated(text: str) -> str:
        return pattern.sub(lambda found: names[found[1]], text)

    _, _, summary = str(error).partition("\n")[0].partition(": ")
    return type(error)(
        f"{operation}: {translated(summary)}",
        [translated(problem) for problem in problems],
        translated(error.hint),
    )
