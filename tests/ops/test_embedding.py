"""embed_tokens and mean_pool against the float64 reference, on the simulated device and on the GPU."""

from __future__ import annotations

import numpy as np
import pytest

import cki
import cki.reference
from cki.errors import InvalidArgumentError, UnsupportedError
from tests.compare import assert_close
from tests.ops.inputs import BF16, DTYPES, F32, normal
from tests.orders import every_check, orders
from tests.refusals import error_of


def _ids(shape: tuple[int, ...], entries: int, dtype: type = np.int64, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, entries, shape).astype(dtype)


def _plain_embedding(ids, word, place=None, types=None, kinds=None, positions=None) -> np.ndarray:
    result = cki.reference.embed_tokens(ids, word, place, types, kinds, positions)
    return result.astype(np.float32).astype(word.dtype)


@pytest.mark.parametrize("dtype", ["f32", "f16", "bf16"])
@pytest.mark.parametrize("width", [1, 7, 64, 384])
def test_embedding_of_three_tables(device, dtype, width):
    word, place, kinds = (normal((n, width), DTYPES[dtype], n) for n in (50, 20, 2))
    ids, types = _ids((3, 17), 50), _ids((3, 17), 2)
    args = (ids, word, place, types, kinds)
    y = cki.embed_tokens(*map(device.array, args))
    assert y.shape == (3, 17, width)
    assert_close(device.numpy(y), cki.reference.embed_tokens(*args), _plain_embedding(*args))


def test_embedding_of_the_word_table_alone(device):
    word, ids = normal((50, 40), F32, 1), _ids((9,), 50, np.int32)
    y = cki.embed_tokens(device.array(ids), device.array(word))
    assert np.array_equal(device.numpy(y), word[ids])


@pytest.mark.parametrize("shape", [(11,), (4, 11)])
def test_positions_and_a_default_type(device, shape):
    word, place, kinds = normal((50, 24), BF16, 1), normal((30, 24), BF16, 2), normal((2, 24), BF16, 3)
    ids, positions = _ids((4, 11), 50, np.int32), _ids(shape, 30, np.int64, 5)
    y = cki.embed_tokens(
        device.array(ids), device.array(word), device.array(place), type_table=device.array(kinds),
        positions=device.array(positions),
    )  # fmt: skip
    args = (ids, word, place, None, kinds, positions)
    assert_close(device.numpy(y), cki.reference.embed_tokens(*args), _plain_embedding(*args))


def test_ids_outside_their_table_add_zeros(device):
    word, place, kinds = normal((5, 16), F32, 1), normal((3, 16), F32, 2), normal((2, 16), F32, 3)
    ids = np.array([[0, 5, -1, 2**40]])
    args = (ids, word, place, np.array([[0, 7, -3, 1]]), kinds, np.array([0, 1, 2, -(2**40)]))
    y = cki.embed_tokens(*map(device.array, args))
    assert_close(device.numpy(y), cki.reference.embed_tokens(*args), _plain_embedding(*args))


def test_ids_outside_their_table_raise_when_asked_to(device, monkeypatch):
    monkeypatch.setenv("CKI_VALIDATE", "1")
    word, place = device.array(normal((5, 16), F32, 1)), device.array(normal((3, 16), F32, 2))
    with pytest.raises(InvalidArgumentError) as caught:
        cki.embed_tokens(
            device.array(np.array([[0, 1], [9, 0]])), word, place, positions=device.array(np.array([0, -2]))
        )
    assert "token_ids holds 9, but word_table has 5 rows" in str(caught.value)
    assert "positions holds -2, but position_table has 3 rows" in str(caught.value)
    cki.embed_tokens(device.array(np.array([[0, 1], [4, 0]]))[:, ::-1][:, ::-1], word, place)


def test_strided_ids_tables_and_output(device):
    tables, ids = normal((50, 2, 24), BF16, 1), _ids((7, 6), 50)
    out = device.empty((6, 7, 32), BF16)
    on_device = device.array(tables)
    cki.embed_tokens(device.array(ids).T, on_device[:, 1], out=out[..., 8:])
    assert np.array_equal(device.numpy(out)[..., 8:], tables[:, 1][ids.T])
    assert np.isnan(device.numpy(out)[..., :8].astype(np.float32)).all()


@pytest.mark.parametrize("dtype", ["f32", "f16", "bf16"])
@pytest.mark.parametrize(("length", "width"), [(1, 3), (37, 384), (5, 1026)])
@pytest.mark.parametrize("normalize", [True, False])
def test_pooling(device, dtype, length, width, normalize):
    x = normal((3, length, width), DTYPES[dtype], 1)
    mask = np.random.default_rng(2).random((3, length)) < 0.6
    mask[:, 0] = True
    x[~mask] = np.nan
    y = cki.mean_pool(device.array(x), device.array(mask), normalize=normalize)
    expected = cki.reference.mean_pool(x, mask, normalize=normalize)
    assert_close(device.numpy(y), expected, expected.astype(np.float32).astype(x.dtype))


@pytest.mark.parametrize("kind", [np.uint8, np.int8, np.int32, np.int64])
def test_masks_of_integers(device, kind):
    x = normal((2, 9, 32), F32, 1)
    mask = np.array([[3, 0, 1] * 3, [0] * 9], kind)
    y = device.numpy(cki.mean_pool(device.array(x), device.array(mask)))
    expected = cki.reference.mean_pool(x, mask)
    assert_close(y, expected, expected.astype(np.float32))
    assert np.all(y[1] == 0)


@pytest.mark.parametrize("kind", [np.int32, np.int64])
def test_lengths(device, kind):
    x, lengths = normal((4, 9, 32), BF16, 1), np.array([9, 0, 4, 100], kind)
    y = cki.mean_pool(device.array(x), device.array(lengths))
    expected = cki.reference.mean_pool(x, lengths)
    assert_close(device.numpy(y), expected, expected.astype(np.float32).astype(BF16))


def test_pooling_of_strided_tensors(device):
    base, mask = normal((9, 4, 70), BF16, 1), np.arange(36).reshape(9, 4) % 3 > 0
    for view in (lambda t: t[..., :64].swapaxes(0, 1), lambda t: t[..., 1::2].swapaxes(0, 1)):
        y = cki.mean_pool(view(device.array(base)), device.array(mask).T)
        expected = cki.reference.mean_pool(view(base), mask.T)
        assert_close(device.numpy(y), expected, expected.astype(np.float32).astype(BF16))


def test_empty_batches(device):
    word = device.array(normal((5, 16), F32, 1))
    assert cki.embed_tokens(device.array(np.zeros((0, 4), np.int64)), word).shape == (0, 4, 16)
    assert cki.embed_tokens(device.array(np.zeros((3, 0), np.int64)), word).shape == (3, 0, 16)
    x = device.array(np.zeros((0, 4, 8), np.float32))
    assert cki.mean_pool(x, device.array(np.zeros((0, 4), bool))).shape == (0, 8)
    none = device.array(np.zeros((2, 0, 8), np.float32))
    assert np.all(device.numpy(cki.mean_pool(none, device.array(np.zeros((2, 0), bool)))) == 0)


def test_under_every_check(device):
    word, ids = normal((50, 24), BF16, 1), _ids((3, 5), 50)
    x, mask = normal((2, 21, 40), F32, 2), _ids((2, 21), 2) > 0
    expected = cki.reference.mean_pool(x, mask)
    for seed in orders(device):
        with every_check(device, seed):
            y = cki.embed_tokens(device.array(ids), device.array(word))
            pooled = cki.mean_pool(device.array(x), device.array(mask))
        assert np.array_equal(device.numpy(y), word[ids])
        assert_close(device.numpy(pooled), expected, expected.astype(np.float32), f"seed {seed}")


class TestErrors:
    """Texts of refusals."""

    ids, word = np.zeros((2, 3), np.int64), np.ones((5, 8), np.float32)

    @pytest.fixture(autouse=True)
    def _simulated(self):
        with cki.device("sim"):
            yield

    @pytest.mark.parametrize(
        ("arguments", "options", "violation"),
        [
            ((ids.astype(np.float32), word), {}, "token_ids is f32"),
            ((ids[None], word), {}, "token_ids has shape (1, 2, 3)"),
            ((ids, word[0]), {}, "word_table has shape (8,)"),
            ((ids, word[0, :1].reshape(()), word), {}, "word_table has shape ()"),
            ((ids, word.astype(np.int32)), {}, "word_table is i32"),
            ((ids, word[:, ::2]), {}, "word_table has strides (8, 2): rows with gaps"),
            ((ids, word, word[:, :4]), {}, "position_table has shape (5, 4), word_table has shape (5, 8)"),
            ((ids, word, word.astype(np.float16)), {}, "position_table is f16, word_table is f32"),
            ((ids, word, word[:2]), {}, "the sequence has 3 tokens, position_table has 2 rows"),
            ((ids, word, None, ids), {}, "token_type_ids is given without type_table"),
            ((ids, word, None, ids[:1], word), {}, "token_type_ids has shape (1, 3)"),
            ((ids, word), {"positions": ids}, "positions is given without position_table"),
            ((ids, word, word), {"positions": ids[:, :2]}, "positions has shape (2, 2)"),
        ],
    )
    def test_embedding(self, arguments, options, violation):
        with pytest.raises(error_of(violation)) as caught:
            cki.embed_tokens(*arguments, **options)
        assert any(violation in problem for problem in caught.value.problems), str(caught.value)

    @pytest.mark.parametrize(
        ("x", "mask", "violation"),
        [
            (np.ones((2, 3, 4), np.int32), np.ones((2, 3), bool), "x is i32"),
            (np.ones((2, 3), np.float32), np.ones((2, 3), bool), "x has shape (2, 3)"),
            (
                np.ones((2, 3, 4), np.float32),
                np.ones((2, 4), bool),
                "mask has shape (2, 4), x has shape (2, 3, 4)",
            ),
            (np.ones((2, 3, 4), np.float32), np.ones((2, 3), np.float32), "mask of shape (2, 3) is f32"),
            (np.ones((2, 3, 4), np.float32), np.ones(2, bool), "mask of shape (2,) is bool"),
        ],
    )
    def test_pooling(self, x, mask, violation):
        with pytest.raises(error_of(violation)) as caught:
            cki.mean_pool(x, mask)
        assert any(violation in problem for problem in caught.value.problems), str(caught.value)

    def test_rows_beyond_shared_memory(self):
        with pytest.raises(UnsupportedError, match=r"width 100000 needs .* bytes of shared memory"):
            cki.mean_pool(np.ones((1, 1, 100000), np.float32), np.ones((1, 1), bool))
