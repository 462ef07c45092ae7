"""CKI on NumPy arrays: the kernels run on the simulated device, on this machine's CPU.

A GPU is not needed and not used: the same CUDA sources are compiled by the host's C++ compiler, so this shows the
kernels' real results, not their speed.
"""

from __future__ import annotations

import numpy as np

import cki


def main() -> None:
    rng = np.random.default_rng(0)
    x = rng.normal(size=(2, 24, 96)).astype(np.float32)
    gamma, beta = rng.normal(size=(2, 96)).astype(np.float32)
    q, k, v = rng.normal(size=(3, 2, 24, 3, 32)).astype(np.float32)  # [batch, seq, heads, head_dim]

    with cki.device("sim"):
        normalised = cki.layer_norm(x, gamma, beta)
        attended = cki.attention(q, k, v, causal=True)

    mean, variance = x.mean(-1, keepdims=True), x.var(-1, keepdims=True)
    expected = (x - mean) / np.sqrt(variance + 1e-5) * gamma + beta
    print(
        "layer_norm:",
        normalised.shape,
        normalised.dtype,
        "largest difference",
        abs(normalised - expected).max(),
    )
    # The first query of a causal attention sees one key only, so its output is that key's value.
    print(
        "attention: ",
        attended.shape,
        attended.dtype,
        "largest difference",
        abs(attended[:, 0] - v[:, 0]).max(),
    )


if __name__ == "__main__":
    main()
