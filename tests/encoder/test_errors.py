"""What `cki.Encoder` says of calls that it cannot make."""

from __future__ import annotations

import numpy as np
import pytest

import cki
from cki.errors import DeviceError, InvalidArgumentError, InvalidTypeError, UnsupportedError

torch = pytest.importorskip("torch")
from tests.encoder.hf_bert import CONFIG, random_model  # noqa: E402
from tests.encoder.inputs import MASK, some_ids  # noqa: E402

pytestmark = pytest.mark.torch


@pytest.fixture(scope="module")
def small():
    _, state = random_model(CONFIG)
    return cki.Encoder.from_weights({n: v.astype(np.float32) for n, v in state.items()}, CONFIG)


def test_every_broken_rule_is_named(small):
    ids = some_ids(CONFIG)
    with cki.device("sim"), pytest.raises(InvalidArgumentError) as caught:
        small(ids, MASK[:, :4], ids[:2], ids[0, :4], lengths=MASK)
    assert caught.value.problems == (
        "attention_mask and lengths are both given",
        "attention_mask has shape (3, 4), input_ids has shape (3, 9)",
        "lengths has shape (3, 9), input_ids has shape (3, 9)",
        "token_type_ids has shape (2, 9), input_ids has shape (3, 9)",
        "position_ids has shape (4,), input_ids has shape (3, 9)",
    )
    with cki.device("sim"), pytest.raises(InvalidTypeError) as caught:
        small(ids.astype(np.int16), MASK.astype(np.float32), position_ids=ids.astype(np.int8))
    assert caught.value.problems == ("input_ids is i16", "attention_mask is f32", "position_ids is i8")


def test_broken_rules_of_packed_sequences(small):
    ids, offsets = some_ids(CONFIG)[0], np.array([0, 9])
    with cki.device("sim"):
        with pytest.raises(InvalidArgumentError) as caught:
            small(ids, ids, ids[:4], lengths=offsets, cu_seqlens=offsets[:1], max_seqlen=-1)
        assert caught.value.problems == (
            "max_seqlen is -1",
            "cu_seqlens has shape (1,)",
            "attention_mask and cu_seqlens are both given",
            "lengths and cu_seqlens are both given",
            "token_type_ids has shape (4,), input_ids has shape (9,)",
        )
        with pytest.raises(InvalidArgumentError, match=r"input_ids has shape \(1, 9\)"):
            small(ids[None], cu_seqlens=offsets)
        with pytest.raises(InvalidTypeError, match="cu_seqlens is f64"):
            small(ids, cu_seqlens=offsets * 1.0)
        with pytest.raises(InvalidArgumentError, match="nothing to pool"):
            small.embed(ids[:0], cu_seqlens=offsets)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"input_ids": np.zeros(9, np.int64)}, r"input_ids has shape \(9,\)"),
        ({"input_ids": np.zeros((1, 41), np.int64)}, "41 tokens a sequence, the model has positions for 40"),
        ({"workspace": np.zeros(100, np.uint8)}, "workspace has 100 bytes"),
        ({"workspace": np.zeros((100, 1), np.uint8)}, r"workspace .*\(100, 1\)"),
        ({"out": np.zeros((3, 9, 47), np.float32)}, r"out of shape \(3, 9, 48\)"),
    ],
)
def test_bad_arguments(small, change, message):
    arguments = {"input_ids": some_ids(CONFIG), **change}
    with cki.device("sim"), pytest.raises(InvalidArgumentError, match=message):
        small(**arguments)


def test_other_bad_arguments(small, monkeypatch):
    ids = some_ids(CONFIG)
    with cki.device("sim"):
        for pooling in ("max", None):
            with pytest.raises(InvalidArgumentError, match="pooling is"):
                small.embed(ids, pooling=pooling)
        with pytest.raises(InvalidArgumentError, match="nothing to pool"):
            small.embed(ids[:, :0])
        assert small(ids[:0]).shape == (0, 9, 48)
        assert small(ids[:, :0]).shape == (3, 0, 48)
        with pytest.raises(InvalidTypeError, match="input_ids is None"):
            small(None)
        with pytest.raises(InvalidTypeError, match="input_ids is of type list"):
            small([[1, 2]])
        with pytest.raises(InvalidTypeError, match="different frameworks"):
            small(ids, torch.from_numpy(MASK))
        monkeypatch.setenv("CKI_VALIDATE", "1")
        with pytest.raises(InvalidArgumentError, match="token_ids holds 97"):
            small(np.full((1, 3), 97))
        with pytest.raises(
            InvalidArgumentError, match="a sequence has 41 tokens, the model has positions for 40"
        ):
            small(np.zeros(41, np.int64), cu_seqlens=np.array([0, 41]))
    with cki.device("cuda"), pytest.raises(DeviceError, match="are on cpu, but the current device is cuda"):
        small(ids)


@pytest.mark.parametrize("bad", [[1], np.array([1, 2]), {}], ids=repr)
def test_attributes_without_a_hash(small, bad):
    with cki.device("sim"):
        for name in ("pooling", "normalize", "max_seqlen"):
            with pytest.raises(InvalidTypeError, match=f"{name} is .* of type {type(bad).__name__}, not "):
                small.embed(some_ids(CONFIG), **{name: bad})


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"batch": "2"}, InvalidTypeError, "batch is '2', not an integer"),
        ({"seq": 2.0}, InvalidTypeError, r"seq is 2\.0, not an integer"),
        ({"seq": -1}, InvalidArgumentError, "seq is -1\n  hint: seq of at least 0"),
        (
            {"pooling": "max"},
            InvalidArgumentError,
            'pooling is \'max\'\n  hint: pooling "mean", "first" or None',
        ),
        ({"pooling": np.array([1, 2])}, InvalidArgumentError, r"pooling is array\(\[1, 2\]\)"),
    ],
)
def test_workspace_of_what_is_no_shape(small, arguments, error, message):
    with pytest.raises(error, match=message):
        small.workspace_nbytes(**{"batch": 2, "seq": 3, **arguments})


def test_modes_that_trace_are_refused():
    """Each output of a kernel would have no data there, or be recorded as an empty tensor."""
    _, state = random_model(CONFIG)
    weights, ids = (
        {n: torch.from_numpy(v).float() for n, v in state.items()},
        torch.from_numpy(some_ids(CONFIG)),
    )
    encoder = cki.Encoder.from_weights(weights, CONFIG)
    with cki.device("sim"), torch.no_grad():
        expected = encoder(ids)
        with (
            torch._subclasses.FakeTensorMode(allow_non_fake_inputs=True),
            pytest.raises(UnsupportedError, match="an encoder or a held plan inside FakeTensorMode"),
        ):
            encoder(ids)
        with pytest.raises(UnsupportedError, match="inside ProxyTorchDispatchMode, which would not see"):
            torch.fx.experimental.proxy_tensor.make_fx(encoder)(ids)
        assert torch.equal(encoder(ids), expected)


def test_what_is_no_encoder_s_weights():
    with pytest.raises(InvalidTypeError, match="weights is a int\n  hint: cki.Encoder.from_weights"):
        cki.Encoder(5)
    _, state = random_model(CONFIG)
    with pytest.raises(InvalidTypeError, match="config is a str, not a configuration or the dict of one"):
        cki.Encoder.from_weights(state, "x")
