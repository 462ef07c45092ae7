"""The plain NumPy float64 definition of every operation, under the same names and arguments: the specification.

Tests compare every kernel with it; documentation quotes it.  It is written to be read, not to be fast.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from cki.reference.attention import attention as attention
    from cki.reference.embedding import embed_tokens as embed_tokens
    from cki.reference.embedding import mean_pool as mean_pool
    from cki.reference.encoder import encoder_layer as encoder_layer
    from cki.reference.encoder import fused_attention as fused_attention
    from cki.reference.linear import linear as linear
    from cki.reference.norm import layer_norm as layer_norm
    from cki.reference.norm import rms_norm as rms_norm

# Functions found at their first use.  Where function and module share a name (attention, linear), importing the module
# would put the module in the function's place, so the function is set over it.
_HOME = {
    "attention": "attention", "linear": "linear", "layer_norm": "norm", "rms_norm": "norm",
    "embed_tokens": "embedding", "mean_pool": "embedding", "fused_attention": "encoder", "encoder_layer": "encoder",
}  # fmt: skip

__all__ = list(_HOME)


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'cki.reference' has no attribute {name!r}")
    from importlib import import_module

    function = getattr(import_module(f"cki.reference.{_HOME[name]}"), name)
    globals()[name] = function
    return function
