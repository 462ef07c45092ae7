"""All public operations, from which every framework's registrations are made."""

from __future__ import annotations

import functools
from importlib import import_module

from cki.ops.spec import OpSpec

_SPECS = {
    "norm": ("LAYER_NORM", "RMS_NORM"),
    "norm_quantize": ("LAYER_NORM_QUANTIZE", "RMS_NORM_QUANTIZE"),
    "attention": ("ATTENTION",),
    "varlen": ("VARLEN_ATTENTION",),
    "paged": ("PAGED_ATTENTION", "DECODE_ATTENTION"),
    "merge": ("MERGE_STATES",),
    "rope": ("APPEND_KV", "APPLY_ROPE"),
    "linear": ("LINEAR",),
    "gated_linear": ("GATED_LINEAR",),
    "linear_fp8": ("LINEAR_FP8",),
    "encoder": ("FUSED_ATTENTION", "ENCODER_LAYER"),
    "ffn": ("FUSED_FFN",),
    "encoder_stack": ("ENCODER_LAYERS",),
    "embedding": ("EMBED_TOKENS", "MEAN_POOL"),
    "pointwise": ("GATED_ACTIVATION", "BIAS_ACTIVATION"),
    "pointwise_softmax": ("SOFTMAX",),
    "pointwise_quantize": ("QUANTIZE_FP8",),
    "pointwise_dropout": ("DROPOUT_ADD",),
}


@functools.cache
def public_specs() -> dict[str, OpSpec]:
    """Operations by name, which is the name of the public function too.

    `cki.Encoder` is not among them: its operation is made for a model, with as many inputs as that has weights.
    """
    specs = [
        getattr(import_module(f"cki.ops.{module}"), name)
        for module, names in _SPECS.items()
        for name in names
    ]
    return {spec.name: spec for spec in specs}
