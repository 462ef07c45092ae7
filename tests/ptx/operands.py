"""Random operands of the ptx tests, and references that follow the PTX manual's words in NumPy."""

from __future__ import annotations

from pathlib import Path

import ml_dtypes
import numpy as np

import cki

KERNELS = Path(__file__).parent / "kernels"
CANONICAL_NAN = {"f16": 0x7FFF, "bf16": 0x7FFF, "e4m3": 0x7F, "e5m2": 0x7F, "f32": 0x7FFFFFFF}
ELEMENT = {
    "f16": np.dtype(np.float16),
    "bf16": np.dtype(ml_dtypes.bfloat16),
    "e4m3": np.dtype(ml_dtypes.float8_e4m3fn),
    "e5m2": np.dtype(ml_dtypes.float8_e5m2),
    "f32": np.dtype(np.float32),
}
LARGEST = {"e4m3": 448.0, "e5m2": 57344.0}


def load(file: str, entry: str, **constants: int) -> cki.loader.Kernel:  # type: ignore[name-defined]
    """A test kernel, for the device in force at its launch."""
    return cki.load(KERNELS / file, entry=entry, constants=constants)


def carrier(element: str) -> np.dtype:
    """The unsigned integer that holds an element's bits."""
    return np.dtype(f"u{ELEMENT[element].itemsize}")


def narrow(x: np.ndarray, element: str) -> np.ndarray:
    """Bits of float32 values rounded to nearest even; 8-bit formats saturate; NaN is canonical."""
    with np.errstate(over="ignore", invalid="ignore"):
        finite = np.clip(x, -LARGEST[element], LARGEST[element]) if element in LARGEST else x
        bits = finite.astype(ELEMENT[element]).view(carrier(element))
    return np.where(np.isnan(x), carrier(element).type(CANONICAL_NAN[element]), bits)


def random_elements(rng: np.random.Generator, shape: tuple[int, ...], element: str) -> np.ndarray:
    """Bits of normally distributed elements."""
    return narrow(rng.standard_normal(shape, np.float32), element)


def widen(bits: np.ndarray, element: str) -> np.ndarray:
    """The float64 values of elements given by their bits."""
    return bits.view(ELEMENT[element]).astype(np.float64)


def product_error(d: np.ndarray, a: np.ndarray, b: np.ndarray, c: np.ndarray | float = 0.0) -> float:
    """The largest error of D = A B^T + C, relative to sum |a||b| + |c|, the scale of its rounding errors."""
    exact = a @ np.swapaxes(b, -1, -2) + c
    scale = np.abs(a) @ np.swapaxes(np.abs(b), -1, -2) + np.abs(c)
    return float(np.max(np.abs(d - exact) / scale))
