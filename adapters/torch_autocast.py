"""`torch.autocast` for functions that stand in the place of torch's own attention: they cast what torch casts there."""

from __future__ import annotations

import torch


def as_autocast(*tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Floating-point tensors in autocast's type, where it is enabled on their device, as torch's own attention takes
    them; f64 stays, as there.  Others and all tensors outside autocast are returned as they are."""
    kind = tensors[0].device.type
    if not torch.is_autocast_enabled(kind):
        return tensors
    dtype = torch.get_autocast_dtype(kind)
    return tuple(
        tensor.to(dtype) if tensor.is_floating_point() and tensor.dtype != torch.float64 else tensor
        for tensor in tensors
    )
