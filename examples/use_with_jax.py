"""CKI on JAX arrays, outside `jit`.  With no GPU they run through the simulated device."""

from __future__ import annotations

import jax
import jax.numpy as jnp

import cki


def main() -> None:
    on_gpu = jax.default_backend() == "gpu"
    seq, heads, head_dim = (1024, 16, 64) if on_gpu else (24, 2, 32)
    keys = jax.random.split(jax.random.key(0), 3)
    q, k, v = (jax.random.normal(key, (2, seq, heads, head_dim), jnp.float32) for key in keys)

    with cki.device("cuda" if on_gpu else "sim"):
        ours = cki.attention(q, k, v, causal=True)  # [batch, seq, heads, head_dim], as jax.nn has it

    with jax.default_matmul_precision(
        "highest"
    ):  # JAX would round fp32 operands to tf32 on a GPU; CKI does not
        theirs = jax.nn.dot_product_attention(q, k, v, is_causal=True)
    print("attention:", ours.shape, ours.dtype, "largest difference", float(jnp.abs(ours - theirs).max()))


if __name__ == "__main__":
    main()
