"""Random encoder layers, and what a chain of separate operations makes of them: shared by tests of encoder layers."""

from __future__ import annotations

import logging

import numpy as np
import pytest

import cki
from cki.log import logger
from tests.compare import assert_close
from tests.ops.inputs import normal
from tests.ops.linear_cases import plain as plain_linear
from tests.ops.norm_cases import plain as plain_norm

ORDERS = pytest.mark.parametrize("pre_ln", [True, False], ids=["pre_ln", "post_ln"])
EVERY_DTYPE = pytest.mark.parametrize("dtype", ["f32", "f16", "bf16"])
VECTORS = ("gamma", "beta", "bq", "bk", "bv", "bo")


class _Launches(logging.Handler):
    def __init__(self) -> None:
        super().__init__(logging.INFO)
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        if record.getMessage().startswith("launch "):
            self.lines.append(record.getMessage())


@pytest.fixture
def launches():
    handler, level = _Launches(), logger.level
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    yield handler.lines
    logger.removeHandler(handler)
    logger.setLevel(level)


class Layer:
    """Random weights of an encoder layer, by the names of `cki.encoder_layer`."""

    def __init__(self, dtype, hidden=48, heads=3, head_dim=16, kv_heads=None, inner=80, vectors=True):
        kv_heads = kv_heads or heads
        q_columns, kv_columns = heads * head_dim, kv_heads * head_dim
        shapes = {
            "wq": (hidden, q_columns), "wk": (hidden, kv_columns), "wv": (hidden, kv_columns),
            "wo": (q_columns, hidden), "w1": (hidden, inner), "w2": (inner, hidden),
        }  # fmt: skip
        self.weights = {n: normal(s, dtype, i, scale=s[0] ** -0.5) for i, (n, s) in enumerate(shapes.items())}
        # Larger queries, so that the softmax is not nearly uniform.
        self.weights["wq"] = (self.weights["wq"].astype(np.float32) * 3).astype(dtype)
        widths = {
            "attention_gamma": hidden, "attention_beta": hidden, "output_gamma": hidden, "output_beta": hidden,
            "bq": q_columns, "bk": kv_columns, "bv": kv_columns, "bo": hidden, "b1": inner, "b2": hidden,
        }  # fmt: skip
        drawn = {n: normal((w,), dtype, 10 + i, scale=0.5) for i, (n, w) in enumerate(widths.items())}
        self.vectors = drawn if vectors else {}
        self.options = {"num_heads": heads, "head_dim": head_dim}
        if kv_heads != heads:
            self.options["num_kv_heads"] = kv_heads

    def block(self) -> tuple[list[np.ndarray], dict[str, np.ndarray]]:
        """Weights and vectors of the attention block, by the names of `cki.fused_attention`."""
        names = dict(zip(("attention_gamma", "attention_beta"), ("gamma", "beta")))
        vectors = {names.get(name, name): value for name, value in self.vectors.items()}
        return [self.weights[n] for n in ("wq", "wk", "wv", "wo")], {
            n: v for n, v in vectors.items() if n in VECTORS
        }


def plain_attention(q, k, v, *, causal, scale, mask):
    """Attention as separate operations of q's dtype: every result is rounded to it, sums are fp32."""
    dtype, f = q.dtype, np.float32
    group = q.shape[2] // k.shape[2]
    k, v = (np.repeat(t.astype(f), group, axis=2) for t in (k, v))
    scale = f(q.shape[3] ** -0.5 if scale is None else scale)
    logits = (
        (np.einsum("bqhd,bkhd->bhqk", q.astype(f), k).astype(dtype).astype(f) * scale).astype(dtype).astype(f)
    )
    if mask is not None:
        mask = mask[:, None, None] if mask.ndim == 2 else mask[:, None] if mask.ndim == 3 else mask
        logits = np.where(mask, logits, -np.inf)
    if causal:
        logits = np.where(np.tril(np.ones(logits.shape[-2:], bool)), logits, -np.inf)
    top = logits.max(-1, keepdims=True)
    weights = np.exp(logits - np.where(np.isinf(top), f(0), top))
    total = weights.sum(-1, keepdims=True)
    weights = (weights / np.where(total == 0, f(1), total)).astype(dtype).astype(f)
    return np.einsum("bhqk,bkhd->bqhd", weights, v).astype(dtype)


def plain_block(
    x, wq, wk, wv, wo, gamma=None, beta=None, bq=None, bk=None, bv=None, bo=None, mask=None, *, num_heads, head_dim,
    num_kv_heads=None, causal=False, pre_ln=True, residual=True, epsilon=1e-5, scale=None,
):  # fmt: skip
    """The attention block as a chain of separate operations of x's dtype."""
    u = plain_norm("layer_norm", x, gamma, beta, eps=epsilon) if pre_ln else x
    q, k, v = (
        plain_linear(u, w, b).reshape(*x.shape[:2], -1, head_dim) for w, b in ((wq, bq), (wk, bk), (wv, bv))
    )
    context = plain_attention(q, k, v, causal=causal, scale=scale, mask=mask).reshape(*x.shape[:2], -1)
    y = plain_linear(context, wo, bo)
    if residual:
        y = (y.astype(np.float32) + x.astype(np.float32)).astype(x.dtype)
    return y if pre_ln else plain_norm("layer_norm", y, gamma, beta, eps=epsilon)


def plain_layer(
    x, wq, wk, wv, wo, w1, w2, *, attention_gamma=None, attention_beta=None, output_gamma=None, output_beta=None,
    b1=None, b2=None, activation="gelu", pre_ln=True, epsilon=1e-5, **block,
):  # fmt: skip
    """The encoder layer as a chain of separate operations of x's dtype."""
    a = plain_block(
        x, wq, wk, wv, wo, attention_gamma, attention_beta, pre_ln=pre_ln, epsilon=epsilon, **block
    )
    u = plain_norm("layer_norm", a, output_gamma, output_beta, eps=epsilon) if pre_ln else a
    y = plain_linear(plain_linear(u, w1, b1, activation=activation), w2, b2)
    y = (y.astype(np.float32) + a.astype(np.float32)).astype(x.dtype)
    return y if pre_ln else plain_norm("layer_norm", y, output_gamma, output_beta, eps=epsilon)


def on(device, values):
    """Copies of all arrays in a list or dict on the device."""
    if isinstance(values, dict):
        return {k: device.array(v) if isinstance(v, np.ndarray) else v for k, v in values.items()}
    return [device.array(v) for v in values]


def check_block(device, layer, x, **options):
    weights, vectors = layer.block()
    options = {**vectors, **layer.options, **options}
    y = device.numpy(cki.fused_attention(device.array(x), *on(device, weights), **on(device, options)))
    assert_close(
        y, cki.reference.fused_attention(x, *weights, **options), plain_block(x, *weights, **options)
    )
    return y


def check_layer(device, layer, x, **options):
    options = {**layer.vectors, **layer.options, **options}
    weights = list(layer.weights.values())
    y = device.numpy(cki.encoder_layer(device.array(x), *on(device, weights), **on(device, options)))
    assert_close(y, cki.reference.encoder_layer(x, *weights, **options), plain_layer(x, *weights, **options))
    return y


def input_of(dtype, batch=2, seq=7, hidden=48):
    return normal((batch, seq, hidden), dtype, 20)
