"""The kernels of the pointwise family and of the quantised norms, for the compile test and `list-kernels`."""

from __future__ import annotations

from cki.kernel import KernelSpec
from cki.ops import norm_quantize, pointwise, pointwise_dropout, pointwise_quantize, pointwise_softmax


def representative_specs(arch: str) -> list[KernelSpec]:
    """Those of every operation of the family that the architecture has."""
    modules = (pointwise, pointwise_softmax, pointwise_quantize, pointwise_dropout, norm_quantize)
    return [spec for module in modules for spec in module.representative_specs(arch)]
