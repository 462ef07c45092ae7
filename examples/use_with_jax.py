"""CKI in JAX: inside `jit` beside JAX's own operations, under `vmap`, and a cache that is donated to a decoding step.

A kernel of your own becomes an operation by a rule for its shapes, inside `jit` too.  With no GPU the kernels run
through the simulated device.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp

import cki
from cki.adapters.jax import dot_product_attention

CLIP = """
extern "C" __global__ void clip(const float* x, float* y, float limit, int n) {
  const int i = blockIdx.x * blockDim.x + threadIdx.x;
  if (i < n) y[i] = fminf(fmaxf(x[i], -limit), limit);
}
"""


def clip_rule(x: Any, *, limit: float) -> cki.LaunchRule:
    """Outputs and launch of the kernel above for x of some shape."""
    return cki.LaunchRule({"y": (x.shape, x.dtype)}, grid=-(-x.size // 256), block=256, numbers={"n": x.size})


@functools.partial(jax.jit, static_argnames="ours")
def block(x: Any, gamma: Any, w: Any, *, ours: bool) -> Any:
    """Attention of two heads on a normed input [batch, seq, width], in one XLA program."""
    if ours:
        normed = cki.rms_norm(x, gamma)
    else:
        normed = x * jax.lax.rsqrt((x * x).mean(-1, keepdims=True) + 1e-6) * gamma
    qkv = (normed @ w).reshape(*x.shape[:2], 3, 2, -1)
    attention = dot_product_attention if ours else jax.nn.dot_product_attention
    return x + attention(qkv[:, :, 0], qkv[:, :, 1], qkv[:, :, 2], is_causal=True).reshape(x.shape)


@functools.partial(jax.jit, donate_argnames="cache")
def decode(token: Any, cache: Any, table: Any, position: Any) -> Any:
    """One token [1, heads, head_dim] written into the paged cache, and its attention over all of it."""
    slot = table[0, position // 16] * 16 + position % 16
    cache = cki.append_kv(token, token, cache, slot[None])
    return cki.paged_attention(token[None], cache, table, position[None] + 1)[0], cache


def main() -> None:
    on_gpu = jax.default_backend() == "gpu"
    seq, width = (1024, 256) if on_gpu else (24, 64)
    keys = jax.random.split(jax.random.key(0), 4)
    x = jax.random.normal(keys[0], (2, seq, width))
    gamma, w = (
        jax.random.normal(keys[1], (width,)),
        jax.random.normal(keys[2], (width, 3 * width)) / width**0.5,
    )

    # JAX would round fp32 operands to tf32 on a GPU; CKI does not.
    with cki.device("cuda" if on_gpu else "sim"), jax.default_matmul_precision("highest"):
        ours, theirs = (block(x, gamma, w, ours=ours) for ours in (True, False))
        print("block inside jit:", ours.shape, "largest difference", float(jnp.abs(ours - theirs).max()))

        norms = jax.vmap(cki.rms_norm)(x)
        print("vmap: largest difference", float(jnp.abs(norms - cki.rms_norm(x)).max()))

        tokens = jax.random.normal(keys[3], (20, 1, 2, 32))
        cache = (jnp.zeros((4, 16, 2, 32)), jnp.zeros((4, 16, 2, 32)))
        table = jnp.array([[2, 0]])
        for position in range(20):
            last, cache = decode(tokens[position], cache, table, jnp.int32(position))
        whole = cki.attention(*[tokens.reshape(1, 20, 2, 32)] * 3, causal=True)
        print("20 decoding steps: largest difference", float(jnp.abs(last[0] - whole[0, -1]).max()))

        clip = cki.load(CLIP).operation(clip_rule)
        clipped = jax.jit(lambda x: clip(2 * x, limit=1.0) + 1)(x)
        difference = jnp.abs(clipped - (jnp.clip(2 * x, -1, 1) + 1)).max()
        print("own kernel inside jit: largest difference", float(difference))


if __name__ == "__main__":
    main()
