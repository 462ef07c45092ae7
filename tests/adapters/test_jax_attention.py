"""`cki.adapters.jax.dot_product_attention` against `jax.nn.dot_product_attention`, argument by argument."""

from __future__ import annotations

import inspect
import re
from typing import Any

import numpy as np
import pytest

jax = pytest.importorskip("jax")

import jax.numpy as jnp  # noqa: E402

import cki  # noqa: E402
from cki.adapters.jax import dot_product_attention  # noqa: E402
from cki.errors import InvalidArgumentError, InvalidTypeError  # noqa: E402

pytestmark = pytest.mark.jax


@pytest.fixture(autouse=True)
def simulated():
    with cki.device("sim"), jax.default_device(jax.local_devices(backend="cpu")[0]):
        yield


def normal(*shape: int, seed: int = 0) -> Any:
    return jnp.asarray(np.random.default_rng([seed, *shape]).standard_normal(shape), jnp.float32)


Q, K, V = normal(2, 24, 4, 32), normal(2, 28, 2, 32, seed=1), normal(2, 28, 2, 32, seed=2)
# Every query keeps key 0, so that each sees one with a causal mask too.
KEPT = jnp.asarray(np.random.default_rng(1).random((2, 1, 24, 28)) > 0.3).at[..., 0].set(True)
LENGTHS = {"query_seq_lengths": jnp.array([5, 24]), "key_value_seq_lengths": jnp.array([7, 28])}


def test_the_signature_is_jax_s_own():
    ours, theirs = (
        inspect.signature(f).parameters for f in (dot_product_attention, jax.nn.dot_product_attention)
    )
    assert [(p.name, p.kind, p.default) for p in ours.values()][: len(theirs)] == [
        (p.name, p.kind, p.default) for p in theirs.values()
    ]


@pytest.mark.parametrize(
    "arguments",
    [
        {}, {"is_causal": True}, {"scale": 0.3}, {"bias": normal(1, 4, 24, 28)}, {"bias": normal(2, 1, 1, 28)},
        {"mask": KEPT}, {"mask": KEPT, "bias": normal(1, 4, 24, 28), "is_causal": True},
        {"local_window_size": (3, 2)}, {"local_window_size": 4, "is_causal": True}, LENGTHS,
        {**LENGTHS, "mask": KEPT, "is_causal": True},
        {"key_value_seq_lengths": jnp.array([1, 9])}, {"return_residual": True},
        {"return_residual": True, "is_causal": True, "scale": 0.1},
    ],
    ids=lambda arguments: "-".join(arguments) or "plain",
)  # fmt: skip
def test_the_same_as_jax(arguments):
    static = {key: value for key, value in arguments.items() if not isinstance(value, jax.Array)}
    arrays = {key: value for key, value in arguments.items() if key not in static}
    ours = jax.jit(lambda q, k, v, arrays: dot_product_attention(q, k, v, **arrays, **static))(
        Q, K, V, arrays
    )
    theirs = jax.nn.dot_product_attention(Q, K, V, **arguments)
    for found, wanted in zip(jax.tree.leaves(ours), jax.tree.leaves(theirs), strict=True):
        assert (found.shape, found.dtype) == (wanted.shape, wanted.dtype)
        np.testing.assert_allclose(found, wanted, rtol=2e-5, atol=2e-5)


@pytest.mark.parametrize("dtype", [jnp.float16, jnp.bfloat16], ids=str)
def test_half_precision(dtype):
    q, k, v = (array.astype(dtype) for array in (Q, K, V))
    found = dot_product_attention(q, k, v, is_causal=True)
    wanted = jax.nn.dot_product_attention(*(a.astype(jnp.float32) for a in (q, k, v)), is_causal=True)
    theirs = jax.nn.dot_product_attention(q, k, v, is_causal=True)
    error, bound = (np.abs(np.asarray(a, np.float64) - wanted).max() for a in (found, theirs))
    assert found.dtype == dtype and error <= 2 * bound + 1e-5 * np.abs(wanted).max()


def test_without_a_batch_axis_and_under_vmap():
    found = dot_product_attention(Q[0], K[0], V[0], is_causal=True)
    wanted = jax.nn.dot_product_attention(Q[0], K[0], V[0], is_causal=True)
    assert found.shape == wanted.shape == (24, 4, 32)
    np.testing.assert_allclose(found, wanted, atol=1e-5)
    mapped = jax.vmap(lambda q, k, v: dot_product_attention(q, k, v, is_causal=True))
    np.testing.assert_allclose(mapped(Q, K, V)[0], wanted, atol=1e-5)


def test_a_query_that_sees_no_key_gets_zero():
    """The one difference: JAX averages the values there."""
    nothing = jnp.zeros((1, 1, 1, 28), bool)
    assert not np.asarray(dot_product_attention(Q, K, V, mask=nothing)).any()
    assert np.asarray(jax.nn.dot_product_attention(Q, K, V, mask=nothing)).any()


def test_jax_s_own_implementations_are_jax_s_own():
    found = dot_product_attention(Q, K, V, is_causal=True, implementation="xla")
    np.testing.assert_array_equal(found, jax.nn.dot_product_attention(Q, K, V, is_causal=True))


def test_bad_shapes_are_named():
    with pytest.raises(
        InvalidArgumentError,
        match="^dot_product_attention: .*\n  - query has 4 heads, which is no multiple of key's 3",
    ):
        dot_product_attention(Q, normal(2, 28, 3, 32), normal(2, 28, 3, 32))


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"query": None}, InvalidTypeError, "query is of type NoneType\n  hint: JAX or NumPy arrays"),
        ({"value": "text"}, InvalidTypeError, "value is of type str"),
        # These broadcast: the result would have other sequences than the query.
        ({"query_seq_lengths": np.ones(3, np.int32)}, InvalidArgumentError, "has shape (3,)\n  hint:"),
        ({"query_seq_lengths": 4}, InvalidArgumentError, "has shape ()\n  hint: query_seq_lengths of shape (2,)"),
        ({"key_value_seq_lengths": np.ones(1, np.int32)}, InvalidArgumentError, "key_value_seq_lengths has shape (1,)"),
        ({"key_value_seq_lengths": np.ones(2, np.float32)}, InvalidTypeError, "key_value_seq_lengths is float32"),
        ({"local_window_size": (-2, 1)}, InvalidArgumentError, "local_window_size is (-2, 1)"),
        ({"local_window_size": -1}, InvalidArgumentError, "local_window_size is -1\n  hint: sizes of 0 or more"),
        ({"local_window_size": (0, -1)}, InvalidArgumentError, "local_window_size is (0, -1)"),
        ({"local_window_size": 2.5}, InvalidTypeError, "local_window_size is 2.5\n  hint: an integer, or a pair"),
        (
            {"key_value_seq_lengths": np.ones(2, np.int32), "mask": np.ones((3, 4), np.float32)},
            InvalidTypeError, "mask is float32\n  hint: a mask of bool",
        ),
        (
            {"key_value_seq_lengths": np.ones(2, np.int32), "mask": np.ones((3, 5), bool)},
            InvalidArgumentError, "mask has shape (3, 5), there are 4 keys",
        ),
    ],
)  # fmt: skip
def test_bad_arguments_are_named(changes, error, message):
    q, k = np.ones((2, 3, 2, 8), np.float32), np.ones((2, 4, 2, 8), np.float32)
    with pytest.raises(error, match=re.escape(message)):
        dot_product_attention(**{"query": q, "key": k, "value": k, **changes})


def test_a_window_of_a_numpy_integer():
    q = np.ones((1, 3, 2, 8), np.float32)
    assert dot_product_attention(q, q, q, local_window_size=np.int64(1)).shape == q.shape
