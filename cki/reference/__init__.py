"""The plain NumPy float64 definition of every operation, under the same names and arguments: the specification.

Tests compare every kernel with it; documentation quotes it.  It is written to be read, not to be fast.
"""

from cki.reference.attention import attention
from cki.reference.embedding import embed_tokens, mean_pool
from cki.reference.encoder import encoder_layer, fused_attention
from cki.reference.encoder_model import encoder, encoder_embed, token_positions
from cki.reference.linear import linear
from cki.reference.norm import layer_norm, rms_norm
from cki.reference.paged import append_kv, decode_attention, merge_states, paged_attention
from cki.reference.rope import apply_rope
from cki.reference.varlen import varlen_attention

# Where a function and its module share a name (attention, encoder, linear), these imports leave the function.
__all__ = [
    "append_kv", "apply_rope", "attention", "decode_attention", "embed_tokens", "encoder",
    "encoder_embed", "encoder_layer", "fused_attention",
    "layer_norm", "linear", "mean_pool", "merge_states", "paged_attention", "rms_norm", "varlen_attention", "token_positions",
]  # fmt: skip
