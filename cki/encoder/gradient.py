"""An encoder on weights that are being trained: refused while gradients are recorded, for its result would have none.

A state dict of torch's is detached, and so is what the encoder reads; this is about parameters and variables given as
they are.  They are asked at each call, since the caller may freeze or train them at any time.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from cki.errors import UnsupportedError


def is_trainable(framework: str, tensor: Any) -> bool:
    """Whether a gradient may be asked of this weight."""
    if framework == "torch":
        return bool(tensor.requires_grad)
    return framework == "tensorflow" and bool(getattr(tensor, "trainable", False))


def refuse_recording(trainable: Sequence[Any]) -> None:
    """UnsupportedError where a call on these weights, all of one framework, would silently cut a gradient off."""
    if hasattr(trainable[0], "requires_grad"):
        import torch

        recorded = torch.is_grad_enabled() and any(tensor.requires_grad for tensor in trainable)
        who, hint = "autograd", "torch.inference_mode() or torch.no_grad(), or weights of model.state_dict()"
    else:
        from cki.adapters.gradient_tensorflow import is_recorded

        recorded = is_recorded(trainable)
        who, hint = "a tf.GradientTape", "tape.stop_recording(), or variables that are not trainable"
    if recorded:
        raise UnsupportedError(
            f"encoder has no gradient, but {who} records what its weights go into", hint=hint
        )
