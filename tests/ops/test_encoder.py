"""cki.fused_attention and cki.encoder_layer against the float64 reference, on the simulated device and on the GPU."""

from __future__ import annotations

import logging

import numpy as np
import pytest

import cki
from cki.errors import InvalidArgumentError, InvalidTypeError
from cki.log import logger
from tests.compare import assert_close
from tests.ops.linear_cases import DTYPES, F16, F32, normal
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


# --- the attention block ----------------------------------------------------------------------------------------------


@ORDERS
@EVERY_DTYPE
def test_fused_attention(device, dtype, pre_ln):
    for causal in (False, True):
        check_block(device, Layer(DTYPES[dtype]), input_of(DTYPES[dtype]), pre_ln=pre_ln, causal=causal)


@ORDERS
@pytest.mark.parametrize(("heads", "kv_heads"), [(4, 2), (3, 1), (6, 2)])
def test_fewer_kv_heads(device, heads, kv_heads, pre_ln):
    layer = Layer(F16, heads=heads, kv_heads=kv_heads, head_dim=8)
    check_block(device, layer, input_of(F16), pre_ln=pre_ln, causal=True)


@pytest.mark.parametrize(("seq", "head_dim"), [(1, 16), (2, 40), (33, 16), (65, 24), (3, 5)])
def test_awkward_sizes(device, seq, head_dim):
    check_block(
        device,
        Layer(F16, hidden=33, heads=3, head_dim=head_dim),
        input_of(F16, seq=seq, hidden=33),
        causal=True,
    )


@ORDERS
def test_without_the_residual(device, pre_ln):
    check_block(device, Layer(F16), input_of(F16), pre_ln=pre_ln, residual=False)


@ORDERS
def test_vectors_are_optional(device, pre_ln):
    check_block(device, Layer(F16, vectors=False), input_of(F16), pre_ln=pre_ln)
    check_layer(device, Layer(F16, vectors=False), input_of(F16), pre_ln=pre_ln)


def test_a_bias_for_some_of_the_projections(device):
    layer = Layer(F16)
    for name in ("bk", "bo"):
        layer.vectors.pop(name)
    check_block(device, layer, input_of(F16))


def test_fp32_vectors_beside_16_bit_weights(device):
    layer = Layer(F16)
    layer.vectors = {name: value.astype(np.float32) for name, value in layer.vectors.items()}
    check_layer(device, layer, input_of(F16), pre_ln=False)


def test_scale_and_epsilon(device):
    check_block(device, Layer(F32), input_of(F32), scale=0.5, epsilon=0.1)


@pytest.mark.parametrize("kind", ["keys", "keys as u8", "queries and keys", "heads", "one sequence for all"])
def test_masks(device, kind):
    seq, lengths = 7, np.array([[7], [3]])
    keys = np.arange(seq) < lengths
    draws = np.random.default_rng(5).random((2, 3, seq, seq)) < 0.6
    mask = {
        "keys": keys, "keys as u8": keys.astype(np.uint8), "queries and keys": draws[:, 0], "heads": draws,
        "one sequence for all": keys[1:],
    }[kind]  # fmt: skip
    check_block(device, Layer(F16), input_of(F16, seq=seq), mask=mask)


def test_a_query_that_sees_nothing_gets_the_output_bias(device):
    layer = Layer(F32)
    x = input_of(F32)
    y = check_block(device, layer, x, mask=np.zeros((2, 7), bool), residual=False)
    assert np.allclose(y, layer.vectors["bo"], atol=1e-6)


def test_hidden_tokens_may_be_nan(device):
    layer, x = Layer(F16), input_of(F16)
    keys = np.arange(7) < np.array([[7], [4]])
    clean = check_layer(device, layer, x, mask=keys)
    x[1, 4:] = np.nan
    weights, options = (
        on(device, list(layer.weights.values())),
        {**layer.vectors, **layer.options, "mask": keys},
    )
    got = device.numpy(cki.encoder_layer(device.array(x), *weights, **on(device, options)))
    assert np.array_equal(got[keys], clean[keys])


def test_strided_tensors(device):
    """x in the middle of a longer sequence, weights as column slices of one packed tensor and transposed."""
    layer = Layer(F16)
    (wq, wk, wv, wo), vectors = layer.block()
    packed = device.array(np.concatenate([wq, wk, wv], axis=1))
    longer = normal((2, 9, 48), F16, 20)
    x, out = device.array(longer)[:, 1:8], device.empty((7, 2, 48), F16).transpose(1, 0, 2)
    parts = [packed[:, 48 * i : 48 * i + 48] for i in range(3)]
    options = {**vectors, **layer.options}
    y = cki.fused_attention(x, *parts, device.array(wo.T.copy()).T, out=out, **on(device, options))
    assert y is out
    x, weights = longer[:, 1:8], (wq, wk, wv, wo)
    assert_close(
        device.numpy(y),
        cki.reference.fused_attention(x, *weights, **options),
        plain_block(x, *weights, **options),
    )


def stored_as_torch_does(layer):
    """The layer's weights with the two axes exchanged."""
    return {name: np.ascontiguousarray(value.T) for name, value in layer.weights.items()}


@ORDERS
def test_weights_as_torch_stores_them(device, launches, pre_ln):
    """weight_layout="out_in" gives the bits of the transposed views, in as many launches."""
    layer, x = Layer(F16, head_dim=8, kv_heads=1), device.array(input_of(F16))
    weights = on(device, stored_as_torch_does(layer))
    options = {**on(device, layer.vectors), **layer.options, "pre_ln": pre_ln}
    got = cki.encoder_layer(x, *weights.values(), **options, weight_layout="out_in")
    assert len(launches) == 7
    views = [w.T for w in weights.values()]
    assert np.array_equal(device.numpy(got), device.numpy(cki.encoder_layer(x, *views, **options)))
    truth = cki.reference.encoder_layer(
        input_of(F16), *stored_as_torch_does(layer).values(), **layer.vectors, **layer.options, pre_ln=pre_ln,
        weight_layout="out_in",
    )  # fmt: skip
    plain = plain_layer(
        input_of(F16), *layer.weights.values(), **layer.vectors, **layer.options, pre_ln=pre_ln
    )
    assert_close(device.numpy(got), truth, plain)


@pytest.mark.parametrize("layout", ["in_out", "out_in"])
@pytest.mark.parametrize("kv_heads", [3, 1])
def test_one_weight_for_q_k_and_v(device, launches, layout, kv_heads):
    layer, x = Layer(F16, kv_heads=kv_heads), input_of(F16)
    (wq, wk, wv, wo), vectors = layer.block()
    separate = {**vectors, **layer.options}
    packed = {**separate, "bq": np.concatenate([vectors.pop(name) for name in ("bq", "bk", "bv")])}
    del packed["bk"], packed["bv"]
    weights = (np.concatenate([wq, wk, wv], axis=1), None, None, wo)
    if layout == "out_in":
        weights = tuple(None if w is None else np.ascontiguousarray(w.T) for w in weights)
    on_device = [None if w is None else device.array(w) for w in weights]
    y = cki.fused_attention(device.array(x), *on_device, **on(device, packed), weight_layout=layout)
    assert len(launches) == 4
    truth = cki.reference.fused_attention(x, wq, wk, wv, wo, **separate)
    repeated = cki.reference.fused_attention(x, *weights, **packed, weight_layout=layout)
    np.testing.assert_allclose(repeated, truth, rtol=1e-12, atol=1e-12)
    assert_close(device.numpy(y), truth, plain_block(x, wq, wk, wv, wo, **separate))


def test_weights_that_do_not_fit_are_all_named(device):
    layer, x = Layer(F16), device.array(input_of(F16))
    (wq, wk, _, wo), vectors = layer.block()
    with pytest.raises(InvalidArgumentError) as caught:
        cki.fused_attention(
            x, *on(device, [wq, wk]), None, *on(device, [wo[:-1]]), **layer.options, weight_layout="io"
        )
    assert caught.value.problems == (
        "weight_layout is 'io'",
        "wk is given alone",
        "wo has shape (47, 48), x has shape (2, 7, 48)",
    )
    with pytest.raises(InvalidArgumentError) as caught:
        cki.fused_attention(
            x, device.array(wq), None, None, device.array(wo), **on(device, vectors), **layer.options
        )
    assert caught.value.problems == (
        "wq has shape (48, 48), x has shape (2, 7, 48)",
        "bk is given without wk",
        "bv is given without wv",
    )


# --- the encoder layer ------------------------------------------------------------------------------------------------


@ORDERS
@EVERY_DTYPE
def test_encoder_layer(device, dtype, pre_ln):
    keys = np.arange(7) < np.array([[7], [5]])
    check_layer(device, Layer(DTYPES[dtype]), input_of(DTYPES[dtype]), pre_ln=pre_ln, mask=keys)


@pytest.mark.parametrize("activation", [None, "gelu_tanh", "silu", "relu"])
def test_other_activations(device, activation):
    check_layer(device, Layer(F32), input_of(F32), activation=activation)


@ORDERS
def test_inner_layer_wider_and_narrower_than_the_heads_scratch(device, pre_ln):
    """The feed-forward block reuses the attention block's memory."""
    for inner in (3, 400):
        check_layer(device, Layer(F16, inner=inner), input_of(F16), pre_ln=pre_ln)


@ORDERS
def test_two_runs_and_another_batch_give_the_same_bits(device, pre_ln):
    layer, x = Layer(F16), input_of(F16, batch=3)
    first = check_layer(device, layer, x, pre_ln=pre_ln)
    assert np.array_equal(first, check_layer(device, layer, x, pre_ln=pre_ln))
    assert np.array_equal(first[1:2], check_layer(device, layer, x[1:2], pre_ln=pre_ln))


@pytest.mark.parametrize(("batch", "seq"), [(0, 5), (3, 0)])
def test_nothing_to_compute(device, batch, seq):
    layer = Layer(F16)
    x = device.array(np.zeros((batch, seq, 48), F16))
    assert cki.encoder_layer(x, *on(device, layer.weights).values(), **layer.options).shape == (
        batch,
        seq,
        48,
    )


# --- packed sequences -------------------------------------------------------------------------------------------------

OFFSETS = np.array([0, 5, 5, 38, 39, 46])


@ORDERS
@EVERY_DTYPE
def test_packed_sequences(device, launches, dtype, pre_ln):
    """Each sequence as it is alone; an empty one among them; rows behind the last belong to nobody."""
    layer, x = Layer(DTYPES[dtype]), normal((48, 48), DTYPES[dtype], 20)
    options = {**on(device, layer.vectors), **layer.options, "pre_ln": pre_ln}
    weights = on(device, layer.weights).values()
    y = cki.encoder_layer(
        device.array(x), *weights, **options, cu_seqlens=device.array(OFFSETS), max_seqlen=33
    )
    assert len(launches) == 7
    assert y.shape == x.shape
    options = {**layer.vectors, **layer.options, "pre_ln": pre_ln}
    truth = cki.reference.encoder_layer(x, *layer.weights.values(), **options, cu_seqlens=OFFSETS)
    plain = np.zeros_like(x)
    for start, end in zip(OFFSETS, OFFSETS[1:]):
        if end > start:
            plain[start:end] = plain_layer(x[None, start:end], *layer.weights.values(), **options)[0]
    assert_close(device.numpy(y)[:46], truth[:46], plain[:46])


def test_a_packed_sequence_has_the_bits_of_any_company(device):
    layer, x = Layer(F16), normal((46, 48), F16, 20)
    (wq, wk, wv, wo), vectors = layer.block()
    weights, options = on(device, [wq, wk, wv, wo]), {**on(device, vectors), **layer.options, "causal": True}
    offsets = device.array(OFFSETS.astype(np.int32))
    y = device.numpy(cki.fused_attention(device.array(x), *weights, **options, cu_seqlens=offsets))
    alone = device.array(np.array([0, 33], np.int32))
    other = device.numpy(cki.fused_attention(device.array(x[5:38]), *weights, **options, cu_seqlens=alone))
    assert np.array_equal(y[5:38], other)
    options = {**vectors, **layer.options, "causal": True}
    truth = cki.reference.fused_attention(x, wq, wk, wv, wo, **options, cu_seqlens=OFFSETS)
    assert_close(y[5:38], truth[5:38], plain_block(x[None, 5:38], wq, wk, wv, wo, **options)[0])


def test_packed_sequences_that_are_none(device):
    layer = Layer(F16)
    weights, _ = layer.block()
    x, keys = device.array(normal((6, 48), F16, 20)), device.array(np.ones((1, 6), bool))
    for arguments, error, problems in (
        ({"cu_seqlens": np.array([0])}, InvalidArgumentError, ("cu_seqlens has shape (1,)",)),
        ({"cu_seqlens": np.array([0.0, 6.0])}, InvalidTypeError, ("cu_seqlens is f64",)),
        ({}, InvalidArgumentError, ("x has shape (6, 48)",)),
        (
            {"cu_seqlens": np.array([0, 6]), "mask": keys, "max_seqlen": -1},
            InvalidArgumentError, ("max_seqlen is -1", "mask and cu_seqlens are both given"),
        ),
    ):  # fmt: skip
        with pytest.raises(error) as caught:
            cki.fused_attention(x, *on(device, weights), **on(device, arguments), **layer.options)
        assert caught.value.problems == problems


@pytest.mark.parametrize(
    ("offsets", "problem"),
    [
        ([-1, 6], "cu_seqlens goes from -1 to 6, there are 6 tokens"),
        ([0, 7], "cu_seqlens goes from 0 to 7, there are 6 tokens"),
        ([0, 4, 3, 6], "cu_seqlens falls from 4 to 3"),
    ],
)
def test_wrong_offsets_raise_when_asked_to(device, monkeypatch, offsets, problem):
    monkeypatch.setenv("CKI_VALIDATE", "1")
    layer, x = Layer(F16), device.array(normal((6, 48), F16, 20))
    weights = on(device, layer.weights).values()
    with pytest.raises(InvalidArgumentError) as caught:
        cki.encoder_layer(x, *weights, **layer.options, cu_seqlens=device.array(np.array(offsets)))
    assert caught.value.problems == (problem,)
    cki.encoder_layer(x, *weights, **layer.options, cu_seqlens=device.array(np.array([0, 2, 2, 6])))


# --- launches ---------------------------------------------------------------------------------------------------------


@ORDERS
def test_launches(device, launches, pre_ln):
    """4 for an attention block, 7 for a layer: one for Q, K and V, none for a bias, an activation or an addition."""
    layer, x = Layer(F16), device.array(input_of(F16))
    weights, vectors = layer.block()
    cki.fused_attention(x, *on(device, weights), **on(device, vectors), **layer.options, pre_ln=pre_ln)
    assert len(launches) == 4
    launches.clear()
    options = {**on(device, layer.vectors), **layer.options, "pre_ln": pre_ln}
    cki.encoder_layer(x, *on(device, layer.weights).values(), **options)
    assert len(launches) == 7


def test_launches_when_the_projections_cannot_share_one(device, launches):
    layer, x = Layer(F16), device.array(input_of(F16))
    (wq, wk, wv, wo), _ = layer.block()
    weights = (device.array(wq), device.array(wk.T.copy()).T, device.array(wv), device.array(wo))
    cki.fused_attention(x, *weights, **layer.options)
    assert len(launches) == 6
