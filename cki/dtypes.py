"""The element types CKI knows, and their names in DLPack, NumPy and CUDA C++: one table."""

from __future__ import annotations

from dataclasses import dataclass

import ml_dtypes
import numpy as np

from cki.errors import InvalidTypeError


@dataclass(frozen=True)
class DType:
    """One element type.

    name: CKI's own short name.  bits: size.  dlpack: (type code, bits) of DLPack 1.1.
    cuda: the type's name in `cuda_src/common/types.cuh` (or a built-in).  numpy: its NumPy dtype.
    """

    name: str
    bits: int
    dlpack: tuple[int, int]
    cuda: str
    numpy: np.dtype
    is_float: bool

    @property
    def itemsize(self) -> int:
        """Bytes an element takes."""
        return self.bits // 8

    def __repr__(self) -> str:
        return self.name


def _dtype(name: str, code: int, bits: int, cuda: str, numpy: object, is_float: bool) -> DType:
    return DType(name, bits, (code, bits), cuda, np.dtype(numpy), is_float)  # type: ignore[call-overload]


f64 = _dtype("f64", 2, 64, "double", np.float64, True)
f32 = _dtype("f32", 2, 32, "float", np.float32, True)
f16 = _dtype("f16", 2, 16, "cki::f16", np.float16, True)
bf16 = _dtype("bf16", 4, 16, "cki::bf16", ml_dtypes.bfloat16, True)
e4m3 = _dtype("e4m3", 10, 8, "cki::e4m3", ml_dtypes.float8_e4m3fn, True)
e5m2 = _dtype("e5m2", 12, 8, "cki::e5m2", ml_dtypes.float8_e5m2, True)
i64 = _dtype("i64", 0, 64, "cki::i64", np.int64, False)
i32 = _dtype("i32", 0, 32, "cki::i32", np.int32, False)
i16 = _dtype("i16", 0, 16, "short", np.int16, False)
i8 = _dtype("i8", 0, 8, "signed char", np.int8, False)
u64 = _dtype("u64", 1, 64, "cki::u64", np.uint64, False)
u32 = _dtype("u32", 1, 32, "cki::u32", np.uint32, False)
u16 = _dtype("u16", 1, 16, "cki::u16", np.uint16, False)
u8 = _dtype("u8", 1, 8, "cki::u8", np.uint8, False)
bool_ = _dtype("bool", 6, 8, "bool", np.bool_, False)

ALL = (f64, f32, f16, bf16, e4m3, e5m2, i64, i32, i16, i8, u64, u32, u16, u8, bool_)
_BY_NAME = {t.name: t for t in ALL}
_BY_DLPACK = {t.dlpack: t for t in ALL}
_BY_NUMPY = {t.numpy: t for t in ALL}
_ALIASES = {
    "float32": f32, "float": f32, "float16": f16, "half": f16, "bfloat16": bf16, "float64": f64, "double": f64,
    "float8_e4m3fn": e4m3, "float8_e5m2": e5m2, "int32": i32, "int64": i64, "int16": i16, "int8": i8,
    "uint8": u8, "uint16": u16, "uint32": u32, "uint64": u64, "bool_": bool_,
}  # fmt: skip


def known_names() -> str:
    """The names of all element types, for error messages."""
    return ", ".join(t.name for t in ALL)


def usual_names() -> str:
    """What operations take, for messages about a type that none takes."""
    return (
        "numbers are f32, f16 or bf16, indices i32 or i64, masks bool, codes e4m3 or u8; cki.load's kernels take "
        "every type that CKI knows"
    )


def from_name(name: str) -> DType:
    """The type of that name, CKI's own (`bf16`) or the common long one (`bfloat16`)."""
    found = (_BY_NAME.get(name) or _ALIASES.get(name)) if isinstance(name, str) else None
    if found is None:
        raise InvalidTypeError(f"unknown element type {name!r}", hint=f"one of {known_names()}")
    return found


def from_dlpack(code: int, bits: int, lanes: int = 1) -> DType:
    """The type of a DLPack (code, bits, lanes) triple."""
    found = _BY_DLPACK.get((code, bits)) if lanes == 1 else None
    if found is None:
        raise InvalidTypeError(
            f"DLPack element type code {code}, {bits} bits, {lanes} lanes has no kernels",
            hint=f"one of {known_names()}",
        )
    return found


def from_numpy(dtype: object) -> DType:
    """The type of a NumPy dtype (ml_dtypes' bfloat16 and float8 included)."""
    found = _BY_NUMPY.get(np.dtype(dtype))  # type: ignore[call-overload]
    if found is None:
        raise InvalidTypeError(f"NumPy dtype {dtype} has no kernels", hint=f"one of {known_names()}")
    return found


#: The largest finite number of f32.
LARGEST_F32 = float.fromhex("0x1.fffffep127")
#: The smallest number of f32 with all its bits; what is smaller, kernels may take for 0.
SMALLEST_F32 = float.fromhex("0x1p-126")
