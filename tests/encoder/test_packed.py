"""`cki.Encoder` on packed sequences (`cu_seqlens`): each is what it is alone."""

from __future__ import annotations

import numpy as np
import pytest

import cki
import cki.reference
from tests.compare import assert_close

torch = pytest.importorskip("torch")
from tests.encoder.hf_bert import CONFIG, ROBERTA, forward, random_model  # noqa: E402
from tests.encoder.inputs import DTYPES, OFFSETS, TORCH, on  # noqa: E402

pytestmark = pytest.mark.torch


@pytest.mark.parametrize("config", [CONFIG, ROBERTA], ids=["bert", "roberta"])
@pytest.mark.parametrize("dtype", ["f32", "f16"])
def test_packed_sequences(device, config, dtype):
    """Sequences without padding, one of them empty, one longer than a warp is wide, and a rest that belongs to none."""
    config = {**config, "max_position_embeddings": 60}
    model, state = random_model(config)
    encoder = cki.Encoder.from_weights(on(device, state, DTYPES[dtype]), config)
    ids = np.random.default_rng(5).integers(0, 97, 48)
    types = np.random.default_rng(6).integers(0, config["type_vocab_size"], 48)
    arguments = [device.array(ids), None, device.array(types)]
    for offsets in (OFFSETS, OFFSETS.astype(np.int32)):
        got = device.numpy(encoder(*arguments, cu_seqlens=device.array(offsets), max_seqlen=33))
        assert got.shape == (48, 48)
        truth, plain = np.zeros((2, 48, 48))
        for start, end in zip(OFFSETS, OFFSETS[1:]):
            if end > start:
                one = (ids[None, start:end], None, types[None, start:end])
                truth[start:end] = forward(model.double(), *one).numpy()
                plain[start:end] = forward(model.to(TORCH[dtype]), *one).double().numpy()
        assert_close(got[:46], truth[:46], plain[:46])
    options = {"token_type_ids": types, "cu_seqlens": OFFSETS}
    if dtype == "f32":
        named = {name: device.numpy(weight) for name, weight in encoder.weights.items()}
        reference = cki.reference.encoder(named, encoder.config, ids, **options)
        np.testing.assert_allclose(reference[:46], truth[:46], rtol=0, atol=1e-12)
        for pooling in ("mean", "first"):
            truth = cki.reference.encoder_embed(named, encoder.config, ids, **options, pooling=pooling)
            vectors = encoder.embed(*arguments, cu_seqlens=device.array(OFFSETS), pooling=pooling)
            assert np.abs(device.numpy(vectors) - truth).max() < 1e-6
            assert not device.numpy(vectors)[1].any()


def test_a_captured_graph_serves_other_lengths(device):
    _, state = random_model(ROBERTA)
    encoder = cki.Encoder.from_weights(on(device, state, np.float16), ROBERTA)
    ids = device.array(np.random.default_rng(5).integers(2, 97, 40))
    offsets = device.array(np.array([0, 20, 30, 40]))
    with cki.capture(encoder.embed, ids, cu_seqlens=offsets, max_seqlen=37) as graph:
        for values in ([0, 20, 30, 40], [0, 1, 38, 40], [0, 0, 20, 40]):
            offsets[...] = device.array(np.array(values))
            eager = encoder.embed(ids, cu_seqlens=offsets, max_seqlen=37)
            assert np.array_equal(device.numpy(graph.replay()), device.numpy(eager))


def test_offsets_beyond_the_tokens_are_cut_off(device):
    _, state = random_model(ROBERTA)
    encoder = cki.Encoder.from_weights(on(device, state), ROBERTA)
    ids = device.array(np.random.default_rng(5).integers(2, 97, 20))
    good = encoder.embed(ids, cu_seqlens=device.array(np.array([0, 9, 20])))
    bad = encoder.embed(ids, cu_seqlens=device.array(np.array([-5, 9, 1 << 40])))
    assert np.array_equal(device.numpy(good), device.numpy(bad))
