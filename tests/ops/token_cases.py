"""What the tests of products of few tokens share: operands on a device, and the definition that all are held to."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from cki import dtypes, reference
from cki.device import DeviceInfo
from cki.engine.device_memory import DeviceTensors
from cki.engine.quantized import QuantizedWeight, dequantize_blocks
from cki.operand import Operand, dense

EPSILON = 1e-5


def placed(arrays: Mapping[str, np.ndarray], device: DeviceInfo) -> tuple[DeviceTensors, dict[str, Operand]]:
    """Copies of the arrays in the device's memory, and operands of their names."""
    specs = [(name, values.shape, dtypes.from_numpy(values.dtype)) for name, values in arrays.items()]
    memory = DeviceTensors(device, specs)
    for name, values in arrays.items():
        memory.write(name, values)
    memory.finish()
    return memory, {name: dense(name, shape, dtype) for name, shape, dtype in specs}


def definition(case: Any, arrays: Mapping[str, np.ndarray], dtype: np.dtype, *, rounded: bool) -> np.ndarray:
    """In float64; rounded: plainly in `dtype` instead, each operation rounded.

    case: what the launch computes: norm, codes, gated, activation, residual.
    """

    def kept(values):
        return np.asarray(values).astype(dtype if rounded else np.float64).astype(np.float64)

    x = arrays["x"].astype(np.float64)
    if case.norm:
        x = kept(reference.rms_norm(x, arrays["gamma"], eps=EPSILON))
    w, bias = arrays["w"], arrays.get("bias")
    if case.codes:
        w = dequantize_blocks(QuantizedWeight(w, arrays["scales"]))
    if case.gated:
        product = kept(reference.linear(x, w, bias, weight_layout="out_in"))
        y = reference.gated_activation(product, activation=case.activation)
    else:
        y = kept(reference.linear(x, w, bias, activation=case.activation, weight_layout="out_in"))
    if case.residual:
        y = kept(y) + arrays["y"].astype(np.float64)
    return kept(y)
