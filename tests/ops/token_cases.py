"""The definition that kernels for products of few tokens are held to: norm, product, gates, residual."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from cki import reference
from cki.engine.quantized import QuantizedWeight, dequantize_blocks

EPSILON = 1e-5


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
