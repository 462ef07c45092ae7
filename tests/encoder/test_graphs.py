"""`Encoder.capture`: buckets, replays over new inputs, one workspace for all graphs."""

from __future__ import annotations

import numpy as np
import pytest

import cki
from cki.errors import InvalidArgumentError, InvalidTypeError, UnsupportedError

torch = pytest.importorskip("torch")
from tests.encoder.hf_bert import CONFIG, ROBERTA, random_model  # noqa: E402

pytestmark = pytest.mark.torch
BUCKETS = [(2, 16), (1, 8), (4, 8)]


def make(device, config=CONFIG):
    _, state = random_model(config)
    return cki.Encoder.from_weights({n: device.array(v.astype(np.float16)) for n, v in state.items()}, config)


def ids_of(device, batch, seq, seed=0):
    return device.array(np.random.default_rng(seed).integers(3, 97, (batch, seq)))


@pytest.mark.parametrize("config", [CONFIG, ROBERTA], ids=["bert", "roberta"])
def test_replays_are_what_calls_compute(device, config):
    encoder = make(device, config)
    with encoder.capture(BUCKETS) as graphs:
        assert graphs.buckets == ((1, 8), (2, 16), (4, 8))
        # The rest of a bucket is hidden, so it does not matter which one serves.
        for batch, seq, seed in (
            (1, 8, 0),
            (1, 5, 1),
            (2, 16, 2),
            (2, 9, 3),
            (3, 8, 4),
            (4, 1, 5),
            (1, 8, 6),
        ):
            ids = ids_of(device, batch, seq, seed)
            lengths = np.random.default_rng(seed).integers(1, seq + 1, batch)
            mask = device.array((np.arange(seq) < lengths[:, None]).astype(np.int64) * 256)
            got = device.numpy(graphs(ids, mask)).copy()
            assert got.shape == (batch, seq, 48)
            kept = device.numpy(mask) != 0
            assert np.array_equal(got[kept], device.numpy(encoder(ids, mask))[kept])
            assert np.array_equal(device.numpy(graphs(ids)), device.numpy(encoder(ids)))


@pytest.mark.parametrize("padding", ["lengths", None])
def test_pooled_graphs_by_lengths_and_without_padding(device, padding):
    encoder = make(device)
    graphs = encoder.capture([(4, 8)], pooling="mean", padding=padding, token_types=True)
    ids, types = ids_of(device, 3, 8), device.array(np.random.default_rng(1).integers(0, 2, (3, 8)))
    options = {"lengths": device.array(np.array([3, 8, 1]))} if padding else {}
    got = graphs(ids, token_type_ids=types, **options)
    expected = encoder.embed(ids, token_type_ids=types, **options)
    assert np.array_equal(device.numpy(got), device.numpy(expected))
    assert np.array_equal(device.numpy(graphs(ids)), device.numpy(encoder.embed(ids)))


def test_without_padding_only_sequences_of_a_bucket_s_length(device):
    """Nothing would hide what fills a longer bucket: its tokens took part without a word."""
    encoder = make(device)
    graphs = encoder.capture([(2, 7), (2, 12)], padding=None, pooling="mean")
    for batch, seq in ((2, 7), (1, 7), (2, 12)):
        ids = ids_of(device, batch, seq)
        assert np.array_equal(device.numpy(graphs(ids)), device.numpy(encoder.embed(ids)))
    for seq in (5, 8):
        with pytest.raises(
            InvalidArgumentError,
            match=rf"input_ids has shape \(2, {seq}\), which no captured graph holds\n  hint: sequences of just",
        ):
            graphs(ids_of(device, 2, seq))


@pytest.mark.parametrize("kind", [np.int32, np.int64])
def test_lengths_beyond_the_ids_are_cut_off_as_in_a_plain_call(device, kind):
    """Not taken for tokens that fill the bucket, and not by their lower 32 bits."""
    encoder = make(device)
    graphs = encoder.capture([(2, 16)], padding="lengths", pooling="mean")
    ids = ids_of(device, 2, 7)
    wide = [[2**31 + 5, 4], [2**32 + 3, 4], [-(2**32) + 3, 4]] if kind == np.int64 else []
    for lengths in ([7, 4], [10, 4], [-3, 4], [0, 0], *wide):
        lengths = device.array(np.array(lengths, kind))
        assert np.array_equal(
            device.numpy(graphs(ids, lengths=lengths)), device.numpy(encoder.embed(ids, lengths=lengths))
        )


def test_graphs_share_one_workspace_and_output(device):
    encoder = make(device)
    graphs = encoder.capture(BUCKETS, pooling="mean")
    assert graphs.num_kernels == dict.fromkeys(graphs.buckets, 3 + 7 * 2)
    first, second = graphs(ids_of(device, 1, 8)), graphs(ids_of(device, 4, 8))
    assert pointer(first) == pointer(second)
    assert graphs._workspace.nbytes == max(encoder.workspace_nbytes(*b, pooling="mean") for b in BUCKETS)
    # Nothing else is held: no graph kept memory of its own.
    assert all(len(bucket.graph._kept) <= 2 + 7 for bucket in graphs._buckets)


def pointer(array):
    return int(array.data.ptr) if hasattr(array.data, "ptr") else array.ctypes.data


def test_one_call_captured_by_itself(device):
    encoder = make(device)
    ids, mask = ids_of(device, 2, 8), device.array(np.ones((2, 8), np.int64))
    with cki.capture(encoder, ids, mask) as graph:
        assert graph.num_kernels == 3 + 7 * 2
        for seed in (4, 5):
            ids[...] = ids_of(device, 2, 8, seed)
            assert np.array_equal(device.numpy(graph.replay()), device.numpy(encoder(ids, mask)))


def test_torch_inputs_beside_numpy_weights():
    _, state = random_model(CONFIG)
    with cki.device("sim"):
        encoder = cki.Encoder.from_weights({n: v.astype(np.float32) for n, v in state.items()}, CONFIG)
        ids = torch.randint(3, 97, (2, 8))
        graphs = encoder.capture([(2, 8)], like=ids)
        y = graphs(ids)
        assert isinstance(y, torch.Tensor)
        assert torch.equal(y, encoder(ids))


def test_what_the_graphs_do_not_take(device):
    encoder = make(device)
    graphs = encoder.capture([(2, 8)])
    ids = ids_of(device, 2, 8)
    for arguments, message in (
        ((ids_of(device, 3, 8),), r"input_ids has shape \(3, 8\), which no captured graph holds"),
        ((ids_of(device, 1, 9),), r"which no captured graph holds"),
        ((ids[0],), r"input_ids has shape \(8,\)"),
        ((ids, ids[:1]), r"attention_mask has shape \(1, 8\), not \(2, 8\)"),
        ((ids, None, ids), "token_type_ids is given, but the graphs were captured without"),
    ):
        with pytest.raises(InvalidArgumentError, match=message):
            graphs(*arguments)
    for arguments, message in (
        # Copied into the bucket they would be rounded.
        ((device.array(np.full((2, 8), 1.5, np.float32)),), "input_ids is float32, not int32, int64"),
        (
            (ids, device.array(np.ones((2, 8), np.float32))),
            "attention_mask is float32, not bool, uint8, int8, int32",
        ),
        ((ids, [[1] * 8] * 2), "attention_mask is of type list, which is no tensor"),
        (("text",), "input_ids is of type str, which is no tensor"),
        (
            (torch.ones(2, 8, dtype=torch.int64),),
            "input_ids is of torch, the graphs were captured for (numpy|cupy)",
        ),
    ):
        with pytest.raises(InvalidTypeError, match=message):
            graphs(*arguments)
    graphs.close()
    graphs.close()
    with pytest.raises(InvalidArgumentError, match="closed"):
        graphs(ids)


def test_bad_captures(device):
    encoder = make(device)
    with pytest.raises(InvalidArgumentError, match="buckets is empty"):
        encoder.capture([])
    with pytest.raises(InvalidArgumentError, match=r"bucket \(1, 41\) is not of 1 to 40 tokens"):
        encoder.capture([(1, 8), (1, 41), (0, 3)])
    with pytest.raises(InvalidTypeError, match=r"not a list of \(batch, seq\)"):
        encoder.capture([4, 8])
    for bad in ([(1.5, 8)], [("1", "8")], [(1, float("inf"))], [(1, True)]):
        with pytest.raises(
            InvalidTypeError, match=r"buckets is .*, not a list of \(batch, seq\)\n  hint: \[\(1, 128\)"
        ):
            encoder.capture(bad)
    with pytest.raises(
        InvalidArgumentError, match=r"padding is \['mask'\]\n  hint: 'mask', 'lengths' or None"
    ):
        encoder.capture([(1, 8)], padding=["mask"])
    with pytest.raises(InvalidArgumentError, match="padding is 'left'"):
        encoder.capture([(1, 8)], padding="left")


def test_frameworks_without_graphs_are_refused():
    jnp = pytest.importorskip("jax.numpy")
    _, state = random_model(CONFIG)
    with cki.device("sim"):
        encoder = cki.Encoder.from_weights({n: jnp.asarray(v, jnp.float32) for n, v in state.items()}, CONFIG)
        with pytest.raises(UnsupportedError, match="cannot be captured with jax tensors"):
            encoder.capture([(1, 8)])
