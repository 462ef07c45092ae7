"""cki.fused_attention and cki.encoder_layer against the float64 reference, on the simulated device and on the GPU."""

from __future__ import annotations

import numpy as np
import pytest

import cki
from cki.errors import InvalidArgumentError
from tests.compare import assert_close
from tests.ops.encoder_cases import (
    EVERY_DTYPE,
    ORDERS,
    Layer,
    check_block,
    check_layer,
    input_of,
    launches,
    on,
    plain_block,
    plain_layer,
)
from tests.ops.inputs import DTYPES, F16, F32, normal

__all__ = ["launches"]  # a fixture


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
