"""The plain NumPy float64 definition of every operation, under the same names and arguments: the specification.

Tests compare every kernel with it; documentation quotes it.  It is written to be read, not to be fast.
"""

from cki.reference.attention import attention
from cki.reference.dropout import dropout_add
from cki.reference.embedding import embed_tokens, mean_pool
from cki.reference.encoder import (
    encoder,
    encoder_embed,
    encoder_layer,
    encoder_layers,
    fused_attention,
    fused_ffn,
    token_positions,
)
from cki.reference.linear import bias_activation, gated_activation, gated_linear, linear, linear_fp8, softmax
from cki.reference.norm import layer_norm, layer_norm_quantize, quantize_fp8, rms_norm, rms_norm_quantize
from cki.reference.paged import (
    append_kv,
    apply_rope,
    decode_attention,
    merge_states,
    paged_attention,
    varlen_attention,
)

# Where a function and its module share a name (attention, encoder, linear), these imports leave the function.
__all__ = [
    "append_kv", "apply_rope", "attention", "bias_activation", "decode_attention", "dropout_add", "embed_tokens",
    "encoder", "encoder_embed", "encoder_layer", "encoder_layers", "fused_attention", "fused_ffn", "gated_activation",
    "gated_linear", "layer_norm", "layer_norm_quantize", "linear", "linear_fp8", "mean_pool", "merge_states",
    "paged_attention", "quantize_fp8", "rms_norm", "rms_norm_quantize", "softmax", "token_positions",
    "varlen_attention",
]  # fmt: skip
