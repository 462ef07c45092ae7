"""`python -m cki selftest`, `cki.selftest()`: the main operations on this machine's device against their reference.

Prints one line an operation and `ok`.  Runs on the GPU when there is one, else on the simulated device.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from typing import Any

import numpy as np

import cki
from cki.cli.examples import Array, examples
from cki.device import cuda_device, current, sim_device
from cki.errors import CkiError, DeviceError

_OPS = ("layer_norm", "rms_norm", "attention", "linear")
#: Largest error against the float64 reference, as a part of its largest value: some units of the element type.
_TOLERANCE = {"f32": 2e-5, "f16": 4e-3, "bf16": 3e-2}


def main(argv: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m cki selftest", description=__doc__)
    parser.parse_args(argv)
    try:
        selftest()
    except CkiError as error:
        print(f"failed: {error}", file=sys.stderr)
        return 1
    return 0


def selftest() -> None:
    """Run the main operations and compare with `cki.reference`.  Prints `ok`, or raises CkiError with what is wrong."""
    kind = _device_kind()
    info = sim_device() if kind == "sim" else cuda_device(0)
    print(f"cki {cki.__version__} on {info}")
    failed = []
    with cki.device(kind):
        for op in _OPS:
            for example in examples(op):
                dtype = example.label.partition(":")[0]
                error = _relative_error(kind, example.op, example.arguments)
                passed = error <= _TOLERANCE[dtype]
                print(f"  {'ok  ' if passed else 'FAIL'} {op} {example.label}: relative error {error:.1e}")
                failed += [] if passed else [f"{op} {example.label}: relative error {error:.1e}"]
    if failed:
        raise DeviceError("wrong results", failed)
    print("ok")


def _device_kind() -> str:
    if current().kind == "sim":
        return "sim"
    if os.environ.get("CKI_DEVICE") == "cuda":  # the user asked for the GPU: what is missing is an error
        cuda_device(0)
        return "cuda"
    try:
        cuda_device(0)
        import cupy  # noqa: F401
    except (DeviceError, ImportError):
        return "sim"
    return "cuda"


def _relative_error(kind: str, op: str, arguments: dict[str, Any]) -> float:
    got = getattr(cki, op)(**{name: put(kind, value) for name, value in arguments.items()})
    wide = {n: v.astype(np.float64) if _is_float(v) else v for n, v in arguments.items()}
    expected = getattr(cki.reference, op)(**wide)
    pairs = zip(got, expected) if isinstance(got, tuple) else [(got, expected)]
    return max(_error(_get(kind, result), truth) for result, truth in pairs)


def _error(result: Array, truth: Array) -> float:
    difference = np.max(np.abs(result.astype(np.float64) - truth)) / np.max(np.abs(truth))
    return float(difference) if np.isfinite(difference) else float("inf")


def _is_float(value: Any) -> bool:
    return isinstance(value, np.ndarray) and value.dtype.kind not in "iub"


def put(kind: str, value: Any) -> Any:
    """An array, or the arrays of a tuple, on the device; other values as they are."""
    if isinstance(value, tuple):
        return tuple(put(kind, part) for part in value)
    if kind == "sim" or not isinstance(value, np.ndarray):
        return value
    import cupy

    return cupy.asarray(value.view(f"u{value.itemsize}")).view(value.dtype)


def _get(kind: str, value: Any) -> Array:
    if kind == "sim":
        return np.asarray(value)
    import cupy

    return np.asarray(cupy.asnumpy(value.view(f"u{value.itemsize}"))).view(value.dtype)
