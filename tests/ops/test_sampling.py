"""sample_tokens against its definition: the same tokens, and so the same distribution; logprobs; what is refused."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest

import cki
from cki.errors import InvalidArgumentError, InvalidTypeError
from cki.ops.sampling import sample_tokens
from tests.engine.sampling_definition import kept_tokens, log_softmax
from tests.engine.sampling_definition import sample_tokens as reference

F32, F16, BF16 = np.float32, np.float16, ml_dtypes.bfloat16
TYPES = {
    "temperature": F32, "top_k": np.int32, "top_p": F32, "min_p": F32, "repetition_penalty": F32, "seed": np.int64,
    "step": np.int32, "seen_rows": np.int32, "alternatives": np.int32,
}  # fmt: skip


def parameters(batch, **values):
    """Arrays [batch] of the parameters' types; a number is for all rows."""
    return {
        name: np.broadcast_to(np.asarray(value, TYPES[name]), (batch,)).copy()
        for name, value in values.items()
    }


def run(device, logits, given, **options):
    """Tokens and logprobs (and more, where asked for) as NumPy arrays; `seen` of `given` is written."""
    there = {name: device.array(values) for name, values in given.items()}
    results = sample_tokens(device.array(logits), **there, **options)
    if "seen" in given:
        given["seen"][...] = device.numpy(there["seen"])
    return [device.numpy(result) for result in results]


def check(device, logits, given):
    """The definition's tokens and logprobs."""
    tokens, logprobs = reference(logits, **given)
    got, got_logprobs = run(device, logits, {name: values.copy() for name, values in given.items()})
    assert np.array_equal(got, tokens)
    assert np.allclose(got_logprobs, logprobs, rtol=1e-6, atol=1e-5)
    return got


def mixed(rng, batch, vocabulary):
    return {
        **parameters(
            batch, temperature=rng.choice([0, 0.3, 0.7, 1, 2], batch), top_k=rng.choice([0, 1, 5, 50, 600], batch),
            top_p=rng.choice([1, 0.1, 0.5, 0.9, 0.99], batch), min_p=rng.choice([0, 0, 0.05, 0.5], batch),
            repetition_penalty=rng.choice([1, 1.3, 0.8], batch), seed=rng.integers(-(2**62), 2**62, batch),
            step=rng.integers(0, 100, batch), seen_rows=rng.permutation(np.arange(batch) - batch // 3),
        ),
        "seen": rng.integers(0, 2**32, (batch, -(-vocabulary // 32)), np.uint32),
    }  # fmt: skip


@pytest.mark.parametrize(("vocabulary", "dtype"), [(997, F32), (8192, BF16)])
def test_any_mix_of_parameters(device, vocabulary, dtype):
    rng = np.random.default_rng(vocabulary)
    logits = (rng.normal(size=(24, vocabulary)) * 3).astype(dtype)
    check(device, logits, mixed(rng, 24, vocabulary))


def test_under_every_check_of_the_simulated_device():
    rng = np.random.default_rng(3)
    logits = (rng.normal(size=(6, 997)) * 3).astype(F32)
    given = mixed(rng, 6, 997)
    tokens, _ = reference(logits, **given)
    with cki.device("sim"), cki.sim.checks(adversarial=True, hazards=True, races=True, seed=1):
        got, _ = sample_tokens(logits, **{name: values.copy() for name, values in given.items()})
    assert np.array_equal(got, tokens)


def test_draws_follow_the_distribution(device):
    """Chi-squared over many seeds, with each filter alone and with all: 1 in 10^5 of right kernels would fail."""
    row = np.array([2.0, 1.5, 1.5, 1.0, 0.2, 0.0, -0.5, -1.0, -1.0, -3.0], F32)
    count = 250
    filters = [{}, {"top_k": 4}, {"top_p": 0.8}, {"min_p": 0.2}, {"top_k": 6, "top_p": 0.7, "min_p": 0.1}]
    logits = np.broadcast_to(row, (count * len(filters), len(row))).copy()
    given = parameters(
        len(logits), temperature=0.8, seed=np.arange(len(logits)), step=7,
        **{name: np.repeat([f.get(name, neutral) for f in filters], count)
           for name, neutral in (("top_k", 0), ("top_p", 1.0), ("min_p", 0.0))},
    )  # fmt: skip
    tokens, _ = run(device, logits, given)
    for number, chosen in enumerate(filters):
        kept, distances = kept_tokens(row, 0.8, **chosen)
        expected = np.exp(-distances) / np.exp(-distances).sum() * count
        seen = np.bincount(tokens[number * count : (number + 1) * count], minlength=len(row))
        assert seen.sum() == seen[kept].sum(), "nothing outside of what is kept"
        assert ((seen[kept] - expected) ** 2 / expected).sum() < 45


def test_equal_logits_are_in_the_order_of_tokens(device):
    logits = np.zeros((6, 3000), F32)
    logits[3:, 5:9] = 1
    given = parameters(
        6,
        temperature=[0, 1, 1, 0, 1, 1],
        top_k=[0, 7, 2500, 0, 2, 6],
        top_p=[1, 1, 0.5, 1, 1, 0.9],
        seed=np.arange(6),
    )
    tokens = check(device, logits, given)
    assert tokens[0] == 0
    assert tokens[1] < 7
    assert tokens[2] < 1250
    assert tokens[3] == 5
    assert tokens[4] in (5, 6)
    assert tokens[5] in (5, 6, 7, 8, 0, 1)


def test_limits_beyond_the_vocabulary_and_of_nothing(device):
    rng = np.random.default_rng(5)
    logits = rng.normal(size=(5, 33)).astype(F16)
    given = parameters(
        5, temperature=1, top_k=[1000, 33, 1, 0, 0], top_p=[1, 2, 1, 1e-9, 1], min_p=[0, 0, 0, 0, 1], seed=3
    )
    tokens = check(device, logits, given)
    assert np.array_equal(tokens[2:], logits[2:].argmax(1))


def test_a_row_is_the_same_in_any_company(device):
    rng = np.random.default_rng(6)
    logits = rng.normal(size=(5, 1000)).astype(F32)
    given = parameters(5, temperature=1, top_p=0.9, seed=np.arange(5), step=np.arange(5) + 10)
    together, _ = run(device, logits, given)
    for row in range(5):
        alone, _ = run(
            device, logits[row : row + 1], {name: values[row : row + 1] for name, values in given.items()}
        )
        assert alone[0] == together[row]
    other, _ = run(device, logits, {**given, "step": given["step"] + 1})
    assert not np.array_equal(other, together)


def test_numbers_that_are_none(device):
    inf, nan = np.inf, np.nan
    logits = np.array(
        [[nan, 1, 0, -inf], [nan, nan, nan, nan], [-inf] * 4, [inf, 0, inf, 1], [0, -0.0, -1, -inf]], F32
    )
    for temperature in (0.0, 1.0):
        given = parameters(5, temperature=temperature, top_k=3, seed=4)
        tokens, _ = run(device, logits, given)
        expected, _ = reference(logits, **given)
        assert np.array_equal(tokens, expected)
        assert tokens[0] in (1, 2)
        assert tokens[3] in (0, 2)


def test_seen_tokens_count_less_and_the_new_one_is_added(device):
    logits = np.array([[2.0, 1.9, -1.0], [-3.0, -2.0, -2.1]], F32)
    seen = np.array([[0b010], [0b001]], np.uint32)
    given = {**parameters(2, temperature=0, repetition_penalty=2.0, seen_rows=[1, 0]), "seen": seen}
    tokens, logprobs = run(device, logits, given)
    assert tokens.tolist() == [1, 2]  # 2 / 2 < 1.9 and -2 * 2 < -2.1
    assert np.allclose(logprobs, [log_softmax(row)[token] for row, token in zip(logits, tokens)], atol=1e-6)
    assert given["seen"].reshape(-1).tolist() == [0b110, 0b011]


def test_rows_without_memory_have_no_penalty(device):
    logits = np.array([[2.0, 1.9]] * 3, F32)
    seen = np.array([[0b11]], np.uint32)
    given = {**parameters(3, temperature=0, repetition_penalty=2.0, seen_rows=[-1, 1, 7]), "seen": seen}
    tokens, _ = run(device, logits, given)
    assert tokens.tolist() == [0, 0, 0]
    assert given["seen"].tolist() == [[0b11]]


def test_alternatives(device):
    rng = np.random.default_rng(8)
    logits = rng.normal(size=(3, 500)).astype(BF16)
    given = parameters(3, temperature=1, seed=1, alternatives=[5, 0, 9])
    _, _, top_tokens, top_logprobs = run(device, logits, given, max_alternatives=5)
    for row, shown in ((0, 5), (2, 5)):
        shares = log_softmax(logits[row])
        order = np.argsort(-shares, kind="stable")[:shown]
        assert np.array_equal(top_tokens[row, :shown], order)
        assert np.allclose(top_logprobs[row, :shown], shares[order], atol=1e-5)


def test_strides(device):
    rng = np.random.default_rng(9)
    wide = rng.normal(size=(4, 300, 2)).astype(F32)
    logits, temperature = (
        device.array(wide)[:, 1:, 1],
        device.array(np.array([[1, 0], [1, 0], [0, 0], [2, 0]], F32))[:, 0],
    )
    seeds = np.arange(4)
    tokens, _ = sample_tokens(logits, temperature=temperature, seed=device.array(seeds))
    expected, _ = reference(wide[:, 1:, 1], temperature=np.array([1, 1, 0, 2], F32), seed=seeds)
    assert np.array_equal(device.numpy(tokens), expected)


@pytest.mark.parametrize(
    ("error", "match", "change"),
    [
        (InvalidTypeError, "logits is i32", {"logits": np.zeros((2, 9), np.int32)}),
        (InvalidArgumentError, r"logits has shape \(9,\)", {"logits": np.zeros(9, F32)}),
        (InvalidTypeError, "top_k is f32", {"top_k": np.zeros(2, F32)}),
        (InvalidArgumentError, r"top_p has shape \(3,\)", {"top_p": np.zeros(3, F32)}),
        (InvalidArgumentError, "seen_rows is given without seen", {"seen_rows": np.zeros(2, np.int32)}),
        (InvalidArgumentError, "repetition_penalty is given without", {"repetition_penalty": np.ones(2, F32)}),
        (InvalidArgumentError, "seen has", {"seen": np.zeros((2, 0), np.uint32), "seen_rows": np.zeros(2, np.int32)}),
        (InvalidArgumentError, "max_alternatives is 10", {"max_alternatives": 10}),
    ],
)  # fmt: skip
def test_refusals(error, match, change):
    arguments = {"logits": np.zeros((2, 9), F32), **change}
    with cki.device("sim"), pytest.raises(error, match=match):
        sample_tokens(arguments.pop("logits"), **arguments)


def test_no_rows():
    with cki.device("sim"):
        tokens, logprobs = sample_tokens(np.zeros((0, 9), F32))
    assert tokens.shape == logprobs.shape == (0,)
