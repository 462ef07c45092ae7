"""cki.attention against the float64 reference, on the simulated device and on the GPU."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import cki
from cki import reference
from tests.compare import assert_close
from tests.ops.attention_cases import check, plain, qkv
from tests.ops.inputs import BF16, DTYPES, F16, F32, normal

SIZES = [
    (1, 1), (2, 3), (3, 127), (31, 33), (33, 31), (63, 65), (64, 64), (65, 63), (65, 129), (127, 2), (129, 129),
    (128, 200),
]  # fmt: skip


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(("queries", "keys"), SIZES)
def test_sizes(device, queries, keys, causal):
    q, k, v = qkv(F16, queries, keys)
    check(device, q, k, v, causal=causal)


# Head dimensions that fill a tile and that do not, with value dimensions of their own; copies of 16, 8, 4 and 2 bytes.
@pytest.mark.parametrize(
    ("dtype", "dim", "value_dim"),
    [
        ("bf16", 8, 8), ("f32", 16, 16), ("f16", 40, 40), ("bf16", 64, 32), ("f16", 72, 72), ("bf16", 80, 80),
        ("f32", 96, 40), ("bf16", 128, 128), ("f16", 160, 160), ("f16", 192, 128), ("bf16", 256, 256),
        ("f32", 256, 256), ("f32", 1, 1), ("bf16", 1, 3), ("f16", 5, 5), ("f32", 5, 6), ("bf16", 100, 100),
        ("f16", 36, 18), ("f32", 20, 100),
    ],
)  # fmt: skip
def test_head_dims(device, dtype, dim, value_dim):
    q, k, v = qkv(DTYPES[dtype], 33, 70, dim=dim, value_dim=value_dim)
    check(device, q, k, v, causal=True)


@pytest.mark.parametrize("dtype", ["f32", "f16", "bf16"])
def test_many_rows_and_tiles(device, dtype):
    q, k, v = qkv(DTYPES[dtype], 150, 333, dim=64)
    check(device, q, k, v, causal=True)


@pytest.mark.parametrize(("queries", "group"), [(1, 1), (1, 3), (5, 5), (7, 7), (1, 8), (9, 8), (70, 3)])
def test_groups(device, queries, group):
    """Query heads of one KV head share a block while there are few queries, and read the right head in any case."""
    q, k, v = qkv(BF16, queries, 70, heads=2 * group, kv_heads=2, batch=2, seed=group)
    check(device, q, k, v, causal=True)


@pytest.mark.parametrize("alignment", ["bottom_right", "top_left"])
@pytest.mark.parametrize("window", [(-1, -1), (0, 0), (5, -1), (70, 3), (-1, 40), (100000, 100000)])
@pytest.mark.parametrize("causal", [False, True])
def test_windows(device, alignment, window, causal):
    q, k, v = qkv(F16, 40, 150, dim=16)
    check(device, q, k, v, causal=causal, causal_alignment=alignment, window=window)


def test_more_queries_than_keys(device):
    """Bottom-right: the first queries stand before the first key and see nothing when causal."""
    q, k, v = qkv(F16, 40, 7, dim=16)
    out = check(device, q, k, v, causal=True)
    assert not out[:, : 40 - 7].any()
    check(device, q, k, v, window=(2, 1))


@pytest.mark.parametrize("scale", [None, 0.0, -0.4, 3.0])
def test_scale(device, scale):
    q, k, v = qkv(BF16, 20, 70, dim=16)
    check(device, q, k, v, scale=scale)


@pytest.mark.parametrize("softcap", [0.3, 2.0, 30.0, 1e3, 1e6])
@pytest.mark.parametrize("dtype", ["f32", "bf16"])
def test_softcap(device, dtype, softcap):
    """From a cap below most logits to one that none comes near: it must not cost accuracy."""
    q, k, v = qkv(DTYPES[dtype], 20, 70, dim=16)
    check(device, q, k, v, softcap=softcap, causal=True)


@pytest.mark.parametrize(
    "shape", [(), (70,), (20, 1), (1, 1, 70), (2, 1, 4, 1, 70), (4, 20, 70), (2, 4, 20, 70)]
)
def test_bias_broadcasts(device, shape):
    q, k, v = qkv(F16, 20, 70, heads=4, kv_heads=2, dim=16, batch=2)
    if len(shape) == 5:
        with pytest.raises(ValueError, match="bias has shape"):
            check(device, q, k, v, bias=normal(shape, F32, 3))
    else:
        check(device, q, k, v, bias=np.asarray(normal(shape, F32, 3)))


@pytest.mark.parametrize("dtype", ["f16", "bf16"])
def test_bias_of_16_bits_that_hides(device, dtype):
    q, k, v = qkv(BF16, 20, 70, dim=16)
    bias = normal((1, 2, 20, 70), DTYPES[dtype], 3)
    bias[0, 0, 3] = -np.inf  # a whole row
    bias[0, 1, :, 10:60] = -np.inf
    check(device, q, k, v, bias=bias)


def test_bias_of_the_lowest_finite_number_does_not_hide(device):
    """Model code masks with the lowest fp32; a row in which all keys have it is an average of all, not empty."""
    q, k, v = qkv(F16, 3, 70, dim=16)
    bias = np.zeros((1, 1, 3, 70), np.float32)
    bias[0, 0, 0], bias[0, 0, 1, 30:] = np.finfo(np.float32).min, np.finfo(np.float32).min
    out = device.numpy(cki.attention(*map(device.array, (q, k, v)), bias=device.array(bias)))
    truth = reference.attention(q, k, v, bias=bias)
    assert_close(out, truth, plain(q, k, v, bias=bias)[0])
    assert np.allclose(out[0, 0], v.astype(np.float64).mean(axis=1), atol=2e-3)


@pytest.mark.parametrize("as_bytes", [False, True])
def test_mask(device, as_bytes):
    """bool, or bytes of which any value but 0 keeps; a row of only hidden keys is 0 with lse -inf."""
    q, k, v = qkv(F16, 20, 130, batch=2, dim=16)
    mask = np.random.default_rng(0).random((2, 1, 20, 130)) < 0.3
    mask[1, 0, 7] = False
    given = mask.astype(np.uint8) * 4 if as_bytes else mask
    out = check(device, q, k, v, mask=given)
    assert not out[1, 7].any()


@pytest.mark.parametrize("with_mask", [False, True])
def test_sinks(device, with_mask):
    q, k, v = qkv(BF16, 20, 70, heads=4, kv_heads=2, dim=16)
    mask = np.ones((1, 1, 20, 70), bool)
    mask[0, 0, 5] = False
    sinks = np.array([-4.0, 0.0, 3.0, 6.0], np.float32)
    check(device, q, k, v, sinks=sinks, mask=mask if with_mask else None)


def test_alibi(device):
    q, k, v = qkv(F32, 20, 70, heads=4, kv_heads=2, dim=16)
    check(device, q, k, v, alibi_slopes=np.array([0.5, 0.25, 0.01, 0.0], np.float32), causal=True)


def _random_options(rng: np.random.Generator, shape: tuple[int, int, int, int]) -> dict[str, Any]:
    options: dict[str, Any] = {"causal": bool(rng.random() < 0.5)}
    if rng.random() < 0.3:
        options["causal_alignment"] = "top_left"
    if rng.random() < 0.4:
        options["window"] = tuple(int(w) for w in rng.integers(-1, 90, 2))
    if rng.random() < 0.3:
        options["softcap"] = float(rng.uniform(1, 20))
    if rng.random() < 0.3:
        options["scale"] = float(rng.uniform(-1, 1))
    broadcast = tuple(extent if rng.random() < 0.6 else 1 for extent in shape)
    if rng.random() < 0.5:
        options["bias"] = rng.standard_normal(broadcast).astype([F32, F16, BF16][rng.integers(3)])
        options["bias"][rng.random(broadcast) < 0.1] = -np.inf
    if rng.random() < 0.5:
        options["mask"] = rng.random(broadcast) < 0.7
    if rng.random() < 0.4:
        options["sinks"] = rng.uniform(-4, 6, shape[1]).astype(np.float32)
    if rng.random() < 0.4:
        options["alibi_slopes"] = rng.uniform(0, 0.3, shape[1]).astype(np.float32)
    return options


@pytest.mark.parametrize("seed", range(14))
def test_features_combined(device, seed):
    rng = np.random.default_rng(seed)
    dtype = [F32, F16, BF16][seed % 3]
    batch, kv_heads, group = int(rng.integers(1, 3)), int(rng.integers(1, 3)), int(rng.integers(1, 4))
    queries, keys = int(rng.integers(1, 100)), int(rng.integers(1, 200))
    heads = kv_heads * group
    q, k, v = qkv(dtype, queries, keys, heads, kv_heads, 32, batch=batch, seed=seed)
    check(device, q, k, v, **_random_options(rng, (batch, heads, queries, keys)))


def test_logits_far_above_half_precision(device):
    q, k, v = (normal((1, 9, 2, 16), F16, seed, scale) for seed, scale in ((1, 200.0), (2, 200.0), (3, 1.0)))
    check(device, q, k, v)


# What may lie behind a hidden key -----------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", ["f32", "f16", "bf16"])
def test_nan_behind_a_mask_leaves_no_trace(device, dtype):
    q, k, v = qkv(DTYPES[dtype], 20, 130, batch=2, dim=16)
    mask = np.random.default_rng(0).random((2, 1, 1, 130)) < 0.5
    clean = check(device, q, k, v, mask=mask)
    for b in range(2):
        hidden = np.flatnonzero(~mask[b, 0, 0])
        k[b, hidden[::3]], k[b, hidden[1::3]] = np.nan, np.inf
        v[b, hidden[::3]], v[b, hidden[1::3]], v[b, hidden[2::3]] = np.nan, -np.inf, np.inf
    out = device.numpy(cki.attention(*map(device.array, (q, k, v)), mask=device.array(mask)))
    assert np.array_equal(out, clean)


@pytest.mark.parametrize("dtype", ["f32", "bf16"])
@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_only_queries_that_see_a_bad_value_get_it(device, dtype, value):
    """Causal: rows before the key are untouched, later ones have the value in its column alone.

    Untouched to the bit but in the Hopper kernel, which computes a row anew when its tile held such a value."""
    q, k, v = qkv(DTYPES[dtype], 100, 100, dim=16)
    clean = device.numpy(cki.attention(*map(device.array, (q, k, v)), causal=True))
    v[0, 70, 0, 5] = value
    out = device.numpy(cki.attention(*map(device.array, (q, k, v)), causal=True)).astype(np.float32)
    if dtype == "bf16" and device.info.arch == "sm_90a":
        before = q[:, :70], k[:, :70], v[:, :70]
        assert_close(out[:, :70], reference.attention(*before, causal=True), plain(*before, causal=True)[0])
    else:
        assert np.array_equal(out[:, :70], clean[:, :70].astype(np.float32))
    bad = out[:, 70:, :, 5]
    assert (np.isnan(bad) if np.isnan(value) else bad == np.inf).all()
    assert np.isfinite(np.delete(out, 5, axis=3)).all()


def test_a_nan_query_spoils_its_own_row_only(device):
    q, k, v = qkv(F16, 20, 70, dim=16)
    clean = device.numpy(cki.attention(*map(device.array, (q, k, v))))
    q[0, 3, 0] = np.nan
    out = device.numpy(cki.attention(*map(device.array, (q, k, v))))
    assert np.isnan(out[0, 3, 0]).all()
    out[0, 3, 0] = clean[0, 3, 0]
    assert np.array_equal(out, clean)


# Memory layouts -----------------------------------------------------------------------------------------------------


def _strided(device: Any, values: np.ndarray, layout: str) -> Any:
    """The values as a view of [B, H, S, D] storage, of a wider row, of longer heads, of every second element."""
    batch, length, heads, dim = values.shape
    if layout == "bhsd":
        return device.array(values.transpose(0, 2, 1, 3)).transpose(0, 2, 1, 3)
    start, shape = {
        "fused": ((0, 0, 2, 0), (batch, length, heads + 4, dim)),
        "wider": ((0, 0, 0, 3), (batch, length, heads, dim + 5)),
        "quarter": ((0, 0, 0, 4), (batch, length, heads, dim + 4)),
        "stepped": ((0, 0, 0, 0), (batch, length, heads, 2 * dim)),
    }[layout]
    buffer = np.full(shape, np.nan, np.float32).astype(values.dtype)
    step = 2 if layout == "stepped" else 1
    index = tuple(slice(s, s + e * (step if axis == 3 else 1), step if axis == 3 else 1)
                  for axis, (s, e) in enumerate(zip(start, values.shape)))  # fmt: skip
    buffer[index] = values
    return device.array(buffer)[index]


@pytest.mark.parametrize("dtype", ["f32", "f16"])
@pytest.mark.parametrize("layout", ["bhsd", "fused", "wider", "quarter", "stepped"])
def test_layouts(device, dtype, layout):
    q, k, v = qkv(DTYPES[dtype], 20, 70, dim=16, batch=2)
    given = tuple(_strided(device, t, layout) for t in (q, k, v))
    check(device, q, k, v, given=given)


def test_expanded_keys(device):
    """Stride 0 over heads and batch: the same keys for all."""
    q, k, v = qkv(F16, 20, 70, heads=4, kv_heads=4, dim=16, batch=2)
    k, v = (np.broadcast_to(t[:1, :, :1], t.shape) for t in (k, v))
    one = device.array(k[:1, :, :1]), device.array(v[:1, :, :1])
    views = one
    if device.kind == "cuda":
        import cupy

        given = tuple(cupy.broadcast_to(t, k.shape) for t in views)
    else:
        given = tuple(np.broadcast_to(t, k.shape) for t in views)
    check(device, q, k, v, given=(device.array(q), *given))


@pytest.mark.parametrize("layout", ["bhsd", "stepped", "wider"])
def test_out_of_any_strides(device, layout):
    """What lies around a strided output stays as it was."""
    q, k, v = qkv(F16, 20, 70, dim=16)
    empty = np.full(q.shape, 7.0, q.dtype)
    out = _strided(device, empty, layout)
    check(device, q, k, v, out=out)
    whole = device.numpy(out.base)
    if layout != "bhsd":
        assert np.isnan(whole.reshape(-1)).sum() == whole.size - q.size


# Edges and promises ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("batch", "queries", "keys"), [(0, 3, 5), (2, 0, 5), (2, 3, 0), (0, 0, 0)])
def test_empty(device, batch, queries, keys):
    q, k, v = qkv(F16, queries, keys, heads=4, kv_heads=2, dim=16, batch=batch)
    out, lse = cki.attention(*map(device.array, (q, k, v)), return_lse=True)
    assert out.shape == (batch, queries, 4, 16)
    assert not device.numpy(out).any()
    assert (device.numpy(lse) == -np.inf).all()
    assert lse.shape == (batch, 4, queries)


def test_no_keys_but_sinks(device):
    q, k, v = qkv(F16, 3, 0, dim=16)
    sinks = np.array([1.5, -2.0], np.float32)
    check(device, q, k, v, sinks=sinks)


def test_every_element_is_written(device):
    q, k, v = qkv(BF16, 70, 33, dim=20)
    out = device.empty(q.shape, q.dtype)
    assert cki.attention(*map(device.array, (q, k, v)), out=out) is out
    assert np.isfinite(device.numpy(out).astype(np.float32)).all()


@pytest.mark.parametrize("dtype", ["f32", "bf16"])
def test_results_do_not_depend_on_the_batch(device, dtype):
    """To the bit: alone, in other company, in another place, with more queries beside them, and again.

    On sm_90a another kernel computes fewer than 64 queries, so these are more."""
    q, k, v = qkv(DTYPES[dtype], 70, 97, heads=4, kv_heads=2, dim=16, batch=3)
    whole = device.numpy(cki.attention(*map(device.array, (q, k, v)), causal=True))
    again = device.numpy(cki.attention(*map(device.array, (q, k, v)), causal=True))
    assert np.array_equal(whole, again)
    for b in range(3):
        alone = cki.attention(*(device.array(t[b : b + 1]) for t in (q, k, v)), causal=True)
        assert np.array_equal(device.numpy(alone)[0], whole[b])
    more = np.concatenate([normal((3, 200, 4, 16), DTYPES[dtype], 9), q], axis=1)  # other tiles of rows
    longer = device.numpy(cki.attention(device.array(more), device.array(k), device.array(v), causal=True))
    assert np.array_equal(longer[:, 200:], whole)
