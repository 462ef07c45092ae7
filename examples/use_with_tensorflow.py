"""CKI in TensorFlow: eager, in a tf.function of unknown sizes, under XLA, in a saved model; and a kernel of your own.

With no GPU the kernels run through the simulated device.
"""

from __future__ import annotations

import tempfile
from typing import Any

import tensorflow as tf

import cki
from cki.adapters.tensorflow import fused_attention

CLIP = """
extern "C" __global__ void clip(const float* x, float* y, float limit, int n) {
  const int i = blockIdx.x * blockDim.x + threadIdx.x;
  if (i < n) y[i] = fminf(fmaxf(x[i], -limit), limit);
}
"""
HEADS, HEAD_DIM = 2, 32


class Block(tf.Module):  # type: ignore[misc]
    """A pre-LN attention block: with CKI in one operation, and of TensorFlow's own."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.w = [
            tf.Variable(tf.random.normal((width, width)) / width**0.5) for _ in ("query", "key", "value", "output")
        ]  # fmt: skip
        self.gamma, self.beta = tf.Variable(tf.ones(width)), tf.Variable(tf.zeros(width))

    def ours(self, x: Any) -> Any:
        return fused_attention(x, *self.w, self.gamma, self.beta, num_heads=HEADS, head_dim=HEAD_DIM)

    def theirs(self, x: Any) -> Any:
        mean, variance = tf.nn.moments(x, -1, keepdims=True)
        normed = (x - mean) * tf.math.rsqrt(variance + 1e-5) * self.gamma + self.beta
        shape = (*x.shape[:2], HEADS, HEAD_DIM)
        q, k, v = (tf.transpose(tf.reshape(normed @ w, shape), (0, 2, 1, 3)) for w in self.w[:3])
        weights = tf.nn.softmax(q @ tf.transpose(k, (0, 1, 3, 2)) / HEAD_DIM**0.5)
        return x + tf.reshape(tf.transpose(weights @ v, (0, 2, 1, 3)), x.shape) @ self.w[3]


def clip_rule(x: Any, *, limit: float) -> cki.LaunchRule:
    """Outputs and launch of the kernel above for x of some shape."""
    return cki.LaunchRule({"y": (x.shape, x.dtype)}, grid=-(-x.size // 256), block=256, numbers={"n": x.size})


def main() -> None:
    on_gpu = bool(tf.config.list_physical_devices("GPU"))
    tf.config.experimental.enable_tensor_float_32_execution(False)  # CKI keeps fp32
    tf.random.set_seed(0)
    block, x = Block(HEADS * HEAD_DIM), tf.random.normal((2, 512 if on_gpu else 24, HEADS * HEAD_DIM))
    clip = cki.load(CLIP).operation(clip_rule)

    with cki.device("cuda" if on_gpu else "sim"):
        wanted = block.theirs(x)
        calls = {
            "eager": block.ours,
            "tf.function": tf.function(
                block.ours, input_signature=[tf.TensorSpec([None, None, HEADS * HEAD_DIM], tf.float32)]
            ),
            "jit_compile": tf.function(block.ours, jit_compile=True),
        }
        block.call = calls["tf.function"]
        with tempfile.TemporaryDirectory() as folder:
            tf.saved_model.save(block, folder)
            loaded = tf.saved_model.load(folder)  # holds the variables
        calls["saved model"] = loaded.call
        for name, call in calls.items():
            difference = float(tf.reduce_max(tf.abs(call(x) - wanted)))
            print(f"attention block, {name}: largest difference {difference}")

        function = tf.function(lambda x: clip(x * 2.0, limit=1.0) + 1.0)
        difference = float(tf.reduce_max(tf.abs(function(x) - (tf.clip_by_value(x * 2.0, -1.0, 1.0) + 1.0))))
        print(f"own kernel in a tf.function: largest difference {difference}")


if __name__ == "__main__":
    main()
