"""CKI on PyTorch tensors: zero-copy, on torch's current stream, outputs from torch's allocator.

Needs no gradient: calls belong inside `torch.inference_mode()` or `torch.no_grad()`.  With no GPU the same lines run
on CPU tensors through the simulated device.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

import cki


def main() -> None:
    on_gpu = torch.cuda.is_available()
    place = "cuda" if on_gpu else "cpu"
    batch, seq, heads, head_dim = (4, 1024, 16, 64) if on_gpu else (1, 24, 2, 32)
    dtype = torch.bfloat16
    torch.manual_seed(0)

    with torch.inference_mode(), cki.device("cuda" if on_gpu else "sim"):
        # torch keeps heads in front of the sequence; CKI honours strides, so a transposed view costs no copy.
        q, k, v = torch.randn(3, batch, heads, seq, head_dim, dtype=dtype, device=place)
        ours = cki.attention(q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), causal=True).transpose(
            1, 2
        )
        theirs = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        print(
            "attention: ",
            tuple(ours.shape),
            ours.dtype,
            "largest difference",
            float((ours - theirs).abs().max()),
        )

        x = torch.randn(batch, seq, heads * head_dim, dtype=dtype, device=place)
        weight = torch.randn(heads * head_dim, dtype=dtype, device=place)
        normalised, total = cki.rms_norm(x, weight, residual=x)  # both outputs of the fused residual add
        expected = F.rms_norm(x + x, (x.shape[-1],), weight, eps=1e-6)
        print(
            "rms_norm:  ",
            tuple(total.shape),
            "largest difference",
            float((normalised - expected).abs().max()),
        )

        def block(x: torch.Tensor) -> torch.Tensor:
            return torch.sigmoid(cki.rms_norm(2 * x, weight))

        # One graph: the call becomes the operator torch.ops.cki.rms_norm.
        compiled = torch.compile(block, fullgraph=True, backend="inductor" if on_gpu else "aot_eager")
        print("compiled:  ", "largest difference", float((compiled(x) - block(x)).abs().max()))


if __name__ == "__main__":
    main()
