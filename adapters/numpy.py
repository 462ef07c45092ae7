"""NumPy arrays: the simulated device's own tensors, used in place."""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any

import numpy as np

from cki import dtypes
from cki.adapter import ALIGNMENT, Adapter, canonical_strides, stride_problems, type_name
from cki.dtypes import DType
from cki.errors import InvalidTypeError
from cki.tensor import DeviceId, TensorView

_CPU = DeviceId("cpu", 0)


def aligned_empty(shape: tuple[int, ...], dtype: DType, alignment: int = 64) -> np.ndarray:
    """An uninitialised array whose address is a multiple of `alignment` bytes.

    NumPy itself promises 16.  64 makes outputs alike on every host, and XLA adopts such memory without a copy.
    """
    nbytes = dtype.itemsize
    for extent in shape:
        nbytes *= extent
    buffer = np.empty(nbytes + alignment, np.uint8)
    start = -buffer.__array_interface__["data"][0] % alignment
    return buffer[start : start + nbytes].view(dtype.numpy).reshape(shape)


class NumpyAdapter(Adapter):
    """Arrays of any strides that are not negative, native byte order, bfloat16 and float8 through ml_dtypes."""

    name = "numpy"

    def signature(self, tensor: np.ndarray) -> tuple[int, Hashable]:
        pointer = tensor.__array_interface__["data"][0]
        return pointer, (
            tensor.shape, tensor.strides, tensor.dtype, tensor.flags.writeable, ALIGNMENT[pointer & 15],
        )  # fmt: skip

    def check(self, tensor: np.ndarray, name: str = "tensor", output: bool = False) -> list[str]:
        native = f"{name}.astype({tensor.dtype.newbyteorder('=').name!r}) is native"
        problems: list[str] = array_problems(name, tensor, native, "numpy.ascontiguousarray")
        if output and not tensor.flags.writeable:
            problems.append(f"{name} is read-only; an output needs a writable array")
        return problems

    def view(self, tensor: np.ndarray) -> TensorView:
        dtype = dtypes.from_numpy(tensor.dtype)
        shape = tensor.shape
        strides = tuple(stride // dtype.itemsize for stride in tensor.strides)
        pointer = tensor.__array_interface__["data"][0] if tensor.size else 0
        readonly = not tensor.flags.writeable
        return TensorView(pointer, shape, canonical_strides(shape, strides), dtype, _CPU, readonly, tensor)

    def empty(self, shape: tuple[int, ...], dtype: DType, like: Any, stream: int | None = None) -> np.ndarray:
        return aligned_empty(shape, dtype)

    def pointer(self, output: np.ndarray) -> int:
        return int(output.__array_interface__["data"][0])

    def stream(self, device_index: int) -> int:
        return 0


def adapter_for(cls: type, name: str) -> Adapter:
    """The adapter for `numpy.ndarray`, its plain subclasses and `memmap`; masked arrays and scalars are refused."""
    if issubclass(cls, np.ma.MaskedArray):
        raise InvalidTypeError(
            f"{name} is a masked array", hint=f"{name}.filled(value), and the mask as its own argument"
        )
    if not issubclass(cls, np.ndarray):
        raise InvalidTypeError(f"{name} is a {type_name(cls)}, not an array", hint=f"numpy.asarray({name})")
    return _ADAPTER


_ADAPTER = NumpyAdapter()


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
