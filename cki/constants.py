"""What a caller may put in front of a kernel of their own: names and values of `cki.load(..., constants=...)`."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import numpy as np

from cki.dtypes import LARGEST_F32, DType
from cki.errors import InvalidArgumentError, InvalidTypeError
from cki.kernel import ConstantValue

_NAME = re.compile(r"[A-Za-z_]\w*", re.ASCII)


def checked_constants(constants: Any) -> dict[str, ConstantValue]:
    """The constants in plain Python types: NumPy's numbers are as good as Python's.

    Raises InvalidTypeError or InvalidArgumentError that names every one that cannot be written in a source.
    """
    if constants is None:
        return {}
    if not isinstance(constants, Mapping):
        raise InvalidTypeError(
            f"constants is {type(constants).__name__}, not a mapping", hint='constants={"kBlock": 256}'
        )
    problems, values = [], {}
    for name, value in constants.items():
        if not isinstance(name, str) or not _NAME.fullmatch(name):
            problems.append(f"{name!r} is no C++ identifier")
            continue
        plain = _plain(value)
        if plain is None:
            problems.append(f"{name} is {value!r} of type {type(value).__name__}")
        else:
            values[name] = plain
    if problems:
        raise InvalidArgumentError(
            "constants that cannot stand in front of a kernel", problems,
            "bool, int of 64 bits, finite float of fp32, or a cki.dtypes type, by name",
        )  # fmt: skip
    return values


def _plain(value: object) -> ConstantValue | None:
    if isinstance(value, DType):
        return value
    if isinstance(value, (bool, np.bool_)):
        return bool(value)
    if isinstance(value, (int, np.integer)):
        return int(value) if -(2**63) <= value < 2**63 else None
    if isinstance(value, (float, np.floating)):
        return float(value) if abs(float(value)) <= LARGEST_F32 else None
    return None
