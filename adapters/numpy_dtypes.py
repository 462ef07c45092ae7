"""What arrays with NumPy's dtypes and byte strides (NumPy's and CuPy's) must be for kernels to read them."""

from __future__ import annotations

from typing import Any

from cki import dtypes
from cki.adapter import stride_problems
from cki.errors import InvalidTypeError


def array_problems(name: str, array: Any, foreign_order: str, copy: str) -> list[str]:
    """Every reason why an array's dtype or strides cannot be used.

    foreign_order: what is said of an array in the other byte order.  copy: see `stride_problems`.
    """
    dtype = array.dtype
    problems = []
    if not dtype.isnative:
        problems.append(f"{name} is of dtype {dtype.str}, foreign byte order; {foreign_order}")
    else:
        try:
            dtypes.from_numpy(dtype)
        except InvalidTypeError:
            problems.append(f"{name} is of dtype {dtype}, which has no kernels; {dtypes.usual_names()}")
    return problems + stride_problems(name, array.shape, array.strides, dtype.itemsize, copy)
