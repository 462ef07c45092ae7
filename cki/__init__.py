"""CKI: fused CUDA kernels for transformer inference, on tensors of any Python framework.

Public names are loaded at their first use: `import cki` imports no framework, no CuPy and no NumPy.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from cki._checkout import extended_path as _extended_path
from cki.background import start as _start_compiling
from cki.device import device as device
from cki.errors import CkiError as CkiError

__path__ = _extended_path(__path__)
__version__ = "0.1.0"

if TYPE_CHECKING:
    from cki.encoder import Encoder as Encoder
    from cki.encoder.prepare import prepare as prepare
    from cki.graph import Graph as Graph
    from cki.graph import capture as capture
    from cki.loader import TensorMap as TensorMap
    from cki.loader import load as load
    from cki.ops.attention import attention as attention
    from cki.ops.choices import choices as choices
    from cki.ops.embedding import embed_tokens as embed_tokens
    from cki.ops.embedding import mean_pool as mean_pool
    from cki.ops.encoder import encoder_layer as encoder_layer
    from cki.ops.encoder import fused_attention as fused_attention
    from cki.ops.encoder_stack import encoder_layers as encoder_layers
    from cki.ops.ffn import fused_ffn as fused_ffn
    from cki.ops.gated_linear import gated_linear as gated_linear
    from cki.ops.held import hold as hold
    from cki.ops.linear import linear as linear
    from cki.ops.linear_fp8 import linear_fp8 as linear_fp8
    from cki.ops.merge import merge_states as merge_states
    from cki.ops.norm import layer_norm as layer_norm
    from cki.ops.norm import rms_norm as rms_norm
    from cki.ops.norm_quantize import layer_norm_quantize as layer_norm_quantize
    from cki.ops.norm_quantize import rms_norm_quantize as rms_norm_quantize
    from cki.ops.paged import decode_attention as decode_attention
    from cki.ops.paged import paged_attention as paged_attention
    from cki.ops.pointwise import bias_activation as bias_activation
    from cki.ops.pointwise import gated_activation as gated_activation
    from cki.ops.pointwise_dropout import dropout_add as dropout_add
    from cki.ops.pointwise_quantize import quantize_fp8 as quantize_fp8
    from cki.ops.pointwise_softmax import softmax as softmax
    from cki.ops.rope import append_kv as append_kv
    from cki.ops.rope import apply_rope as apply_rope
    from cki.ops.varlen import varlen_attention as varlen_attention
    from cki.own_operation import LaunchRule as LaunchRule

_HOME = {
    "Graph": "graph", "capture": "graph", "load": "loader", "TensorMap": "loader", "LaunchRule": "own_operation",
    "hold": "ops.held", "choices": "ops.choices",
    "attention": "ops.attention", "linear": "ops.linear", "gated_linear": "ops.gated_linear",
    "linear_fp8": "ops.linear_fp8",
    "layer_norm": "ops.norm", "rms_norm": "ops.norm",
    "embed_tokens": "ops.embedding", "mean_pool": "ops.embedding", "merge_states": "ops.merge",
    "append_kv": "ops.rope", "apply_rope": "ops.rope",
    "paged_attention": "ops.paged", "decode_attention": "ops.paged", "varlen_attention": "ops.varlen",
    "bias_activation": "ops.pointwise", "gated_activation": "ops.pointwise", "softmax": "ops.pointwise_softmax",
    "quantize_fp8": "ops.pointwise_quantize", "dropout_add": "ops.pointwise_dropout",
    "layer_norm_quantize": "ops.norm_quantize", "rms_norm_quantize": "ops.norm_quantize",
    "encoder_layer": "ops.encoder", "fused_attention": "ops.encoder", "fused_ffn": "ops.ffn",
    "encoder_layers": "ops.encoder_stack",
    "Encoder": "encoder", "prepare": "encoder.prepare",
    "selftest": "cli.selftest", "reference": "", "sim": "", "adapters": "",
}  # fmt: skip

__all__ = ["CkiError", "device", *_HOME]


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'cki' has no attribute {name!r}")
    from importlib import import_module

    home = _HOME[name]
    found = import_module(f"cki.{name}") if not home else getattr(import_module(f"cki.{home}"), name)
    globals()[name] = found
    return found


def __dir__() -> list[str]:
    return sorted({*globals(), *_HOME})


def _watch_tensorflow() -> None:
    from cki.adapters.tf_import import watch

    watch()


_start_compiling()
_watch_tensorflow()
