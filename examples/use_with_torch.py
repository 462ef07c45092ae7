"""CKI on PyTorch tensors: zero-copy, on torch's current stream, outputs from torch's allocator.

Needs no gradient: calls belong inside `torch.inference_mode()` or `torch.no_grad()`.  A kernel of your own becomes an
operator by a rule for its shapes, which torch.compile sees too.  With no GPU the same lines run on CPU tensors through
the simulated device.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F

import cki

CLIP = """
extern "C" __global__ void clip(const float* x, float* y, float limit, int n) {
  const int i = blockIdx.x * blockDim.x + threadIdx.x;
  if (i < n) y[i] = fminf(fmaxf(x[i], -limit), limit);
}
"""


def clip_rule(x: Any, *, limit: float) -> cki.LaunchRule:
    """Outputs and launch of the kernel above for x of some shape."""
    return cki.LaunchRule({"y": (x.shape, x.dtype)}, grid=-(-x.size // 256), block=256, numbers={"n": x.size})


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
        backend = "inductor" if on_gpu else "aot_eager"
        compiled = torch.compile(block, fullgraph=True, backend=backend)
        print("compiled:  ", "largest difference", float((compiled(x) - block(x)).abs().max()))

        clip = cki.load(CLIP).operation(clip_rule)
        numbers = torch.randn(batch, seq, device=place)
        with_clip = torch.compile(lambda x: clip(2 * x, limit=1.0) + 1, fullgraph=True, backend=backend)
        expected = (2 * numbers).clamp(-1, 1) + 1
        print("own kernel:", "largest difference", float((with_clip(numbers) - expected).abs().max()))


if __name__ == "__main__":
    main()
