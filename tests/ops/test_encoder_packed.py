"""Encoder layers of packed sequences (`cu_seqlens`): each is what it is alone."""

from __future__ import annotations

import numpy as np
import pytest

import cki
from cki.errors import InvalidArgumentError, InvalidTypeError
from tests.compare import assert_close
from tests.ops.encoder_cases import (
    EVERY_DTYPE,
    ORDERS,
    Layer,
    launches,
    on,
    plain_block,
    plain_layer,
)
from tests.ops.inputs import DTYPES, F16, normal

__all__ = ["launches"]  # a fixture

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
