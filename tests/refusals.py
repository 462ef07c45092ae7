"""Which error a refusal is: a wrong dtype or type is an InvalidTypeError, a wrong value an InvalidArgumentError."""

from __future__ import annotations

import re

from cki.errors import CkiError, InvalidArgumentError, InvalidTypeError

_NAMES_A_TYPE = re.compile(r"\b(is|has dtype) (bool|[fiu]\d+|bf16|e4m3|e5m2)\b| of type ")


def error_of(violation: str) -> type[CkiError]:
    """The error class for a violation in the words of its message: "x is i32", "eps is -1.0"."""
    return InvalidTypeError if _NAMES_A_TYPE.search(violation) else InvalidArgumentError
