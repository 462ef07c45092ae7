"""cki.linear against the float64 reference, on the simulated device and on the GPU."""

from __future__ import annotations

import numpy as np
import pytest

import cki
from cki.heuristics.linear import TILES_16BIT, TILES_FP32
from tests.compare import assert_close
from tests.ops.inputs import BF16, DTYPES, F16, F32, normal
from tests.ops.linear_cases import WEIGHT_VIEWS, linear_with_tile, plain

LAYOUTS = ("in_out", "out_in")
#: M, N, K, each of the awkward extents on every axis.
EXTENTS = (
    (1, 1, 1), (2, 3, 7), (3, 2, 15), (7, 17, 2), (15, 31, 33), (17, 33, 31), (31, 15, 63), (33, 65, 3), (1, 1000, 65),
    (63, 7, 129), (65, 129, 17), (127, 1, 127), (129, 63, 1), (2, 127, 1000), (1000, 2, 3),
)  # fmt: skip


def weight(depth: int, columns: int, dtype: np.dtype, layout: str, seed: int = 2) -> np.ndarray:
    """Normal numbers of variance 1 / depth."""
    shape = (depth, columns) if layout == "in_out" else (columns, depth)
    return normal(shape, dtype, seed, scale=max(depth, 1) ** -0.5)


def check(device, x: np.ndarray, w: np.ndarray, *vectors: np.ndarray, **options) -> np.ndarray:
    """Run cki.linear on row-major copies of host arrays and compare; returns the result."""
    on_device = {k: device.array(v) if isinstance(v, np.ndarray) else v for k, v in options.items()}
    y = cki.linear(*(device.array(t) for t in (x, w, *vectors)), **on_device)
    assert y.dtype == x.dtype
    got = device.numpy(y)
    what = f"{x.shape} by {w.shape} of {x.dtype}, {options.get('weight_layout', 'in_out')}"
    assert_close(got, cki.reference.linear(x, w, *vectors, **options), plain(x, w, *vectors, **options), what)
    return got


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dtype", ["f16", "f32"])
def test_awkward_extents(device, dtype, layout):
    for rows, columns, depth in EXTENTS:
        x, w = normal((rows, depth), DTYPES[dtype], 1), weight(depth, columns, DTYPES[dtype], layout)
        check(device, x, w, weight_layout=layout)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_bf16(device, layout):
    for rows, columns, depth in ((5, 72, 136), (17, 33, 31)):
        check(
            device, normal((rows, depth), BF16, 1), weight(depth, columns, BF16, layout), weight_layout=layout
        )


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize(
    "tile", TILES_16BIT + TILES_FP32, ids=lambda t: f"{t.block_m}x{t.block_n}s{t.stages}w{t.warps_m}"
)
def test_every_tile_with_a_ring_that_wraps_twice(device, tile, layout):
    if tile.shared_memory > device.info.shared_memory_per_block:
        pytest.skip("the tile does not fit into this device's shared memory")
    dtype = F16 if tile in TILES_16BIT else F32
    depth = (2 * tile.stages + 1) * 128 // dtype.itemsize + 8
    columns = tile.block_n + 8
    x, w = normal((tile.block_m + 5, depth), dtype, 1), weight(depth, columns, dtype, layout)
    bias, residual = normal((columns,), dtype, 3), normal((len(x), columns), dtype, 4)
    y = linear_with_tile(tile, *map(device.array, (x, w, bias, residual)), weight_layout=layout)
    options = {"residual": residual, "weight_layout": layout}
    assert_close(device.numpy(y), cki.reference.linear(x, w, bias, **options), plain(x, w, bias, **options))


@pytest.mark.parametrize("activation", ["gelu", "gelu_tanh", "silu", "relu"])
@pytest.mark.parametrize("dtype", ["f16", "f32"])
def test_activations(device, dtype, activation):
    x = normal((9, 40), DTYPES[dtype], 1, scale=3.0)
    w, bias = weight(40, 24, DTYPES[dtype], "in_out"), normal((24,), DTYPES[dtype], 3)
    check(device, x, w, bias, activation=activation)


@pytest.mark.parametrize("activation", ["gelu", "gelu_tanh", "silu", "relu"])
def test_activations_by_value(device, activation):
    """The matrix (1): what is seen is the activation alone, over its whole range.

    Bound, in 2^-24 of x: ex2.approx 2^1.5, rcp.approx 2, and one for each of sum, product and exponent's argument: 8.
    """
    points = [np.linspace(-12, 12, 4000), [0.0, -0.0, 1e-30, -1e-30, 88.0, -88.0, 1e4, -1e4, 1e30, -1e30]]
    x = np.concatenate(points).astype(np.float32)[:, None]
    got = device.numpy(cki.linear(device.array(x), device.array(np.ones((1, 1), F32)), activation=activation))
    truth = cki.reference.linear(x, np.ones((1, 1), F32), activation=activation)
    assert np.max(np.abs(got - truth) / np.maximum(np.abs(x), 1e-30)) <= 8 * 2.0**-24
    special = np.array([[np.nan], [np.inf]], np.float32)
    got = device.numpy(
        cki.linear(device.array(special), device.array(np.ones((1, 1), F32)), activation=activation)
    )
    assert np.isnan(got[0, 0])
    assert got[1, 0] == np.inf


@pytest.mark.parametrize("dtype", ["f16", "f32"])
def test_residual_is_added_after_the_activation(device, dtype):
    x, w = normal((6, 24), DTYPES[dtype], 1), weight(24, 40, DTYPES[dtype], "in_out")
    residual = normal((6, 40), DTYPES[dtype], 4)
    check(device, x, w, residual=residual, activation="relu")
    check(device, x, w, normal((40,), DTYPES[dtype], 5), residual=residual)


@pytest.mark.parametrize("dtype", ["f16", "bf16"])
def test_fp32_bias_beside_16_bit_inputs(device, dtype):
    x, w = normal((6, 24), DTYPES[dtype], 1), weight(24, 40, DTYPES[dtype], "in_out")
    check(device, x, w, normal((40,), F32, 3))


def test_large_magnitudes_stay_finite(device):
    """Products and sums past fp16's range, whose result is inside it: sums are fp32."""
    x = np.full((3, 512), 200.0, F16)
    w = np.concatenate([np.full((256, 8), 200.0, F16), np.full((256, 8), -200.0, F16)])
    assert np.all(check(device, x, w) == 0)


# --- places -----------------------------------------------------------------------------------------------------------


def test_leading_axes(device):
    w = weight(16, 8, F16, "in_out")
    assert check(device, normal((16,), F16, 1), w).shape == (8,)
    assert check(device, normal((2, 3, 16), F16, 1), w).shape == (2, 3, 8)
    assert (
        check(device, normal((1, 2, 1, 3, 16), F16, 1), w, residual=normal((1, 2, 1, 3, 8), F16, 4)).shape[3]
        == 3
    )


@pytest.mark.parametrize("dtype", ["f16", "f32"])
def test_strided_x(device, dtype):
    w = weight(24, 40, DTYPES[dtype], "in_out")
    wide = normal((4, 6, 5, 64), DTYPES[dtype], 1)
    views = {
        "columns of a wider tensor": lambda t: t[..., 8:32],
        "from an odd element on": lambda t: t[..., 1:25],
        "every second column": lambda t: t[..., 4:52:2],
        "a slice of the middle axis": lambda t: t[:, 1:4, :, :24],
        "permuted leading axes": lambda t: t.transpose(2, 0, 1, 3)[..., :24],
        "every second row": lambda t: t[:, ::2, ::2, :24],
        "x stored by columns": lambda t: t[:, :, :24, 3].transpose(0, 2, 1)[..., :3],
    }
    for what, view in views.items():
        x = view(wide)
        weights = w if x.shape[-1] == 24 else w[: x.shape[-1]]
        y = cki.linear(view(device.array(wide)), device.array(weights))
        assert_close(device.numpy(y), cki.reference.linear(x, weights), plain(x, weights), what)


def test_more_row_axes_than_a_launch_indexes(device):
    wide = normal((2, 3, 2, 3, 2, 16), F16, 1)
    w = weight(16, 8, F16, "in_out")
    order = (4, 1, 3, 0, 2, 5)
    y = cki.linear(device.array(wide).transpose(order), device.array(w))
    x = wide.transpose(order)
    assert_close(device.numpy(y), cki.reference.linear(x, w), plain(x, w))


@pytest.mark.parametrize("dtype", ["f16", "f32"])
def test_strided_weight(device, dtype):
    x = normal((5, 24), DTYPES[dtype], 1)
    wide = normal((80, 96), DTYPES[dtype], 2, scale=0.2)
    for what, view in WEIGHT_VIEWS.items():
        w = view(wide)
        y = cki.linear(device.array(x), view(device.array(wide)))
        assert_close(device.numpy(y), cki.reference.linear(x, w), plain(x, w), what)


def test_a_transposed_weight_is_the_other_layout(device):
    x, w = device.array(normal((5, 64), F16, 1)), device.array(weight(64, 40, F16, "out_in"))
    first, second = cki.linear(x, w.T), cki.linear(x, w, weight_layout="out_in")
    assert np.array_equal(device.numpy(first), device.numpy(second))


def test_strided_bias(device):
    x, w = normal((5, 24), F16, 1), weight(24, 40, F16, "in_out")
    wide = normal((80,), F16, 3)
    y = cki.linear(device.array(x), device.array(w), device.array(wide)[::2])
    assert_close(device.numpy(y), cki.reference.linear(x, w, wide[::2]), plain(x, w, wide[::2]))


def test_out(device):
    x, w = normal((4, 3, 24), F16, 1), weight(24, 40, F16, "in_out")
    truth, expected = cki.reference.linear(x, w), plain(x, w)
    places = {
        "row-major": (lambda: device.empty((4, 3, 40), F16), lambda t: t),
        "columns of a wider tensor": (lambda: device.empty((4, 3, 64), F16), lambda t: t[..., 8:48]),
        "an odd column on": (lambda: device.empty((4, 3, 64), F16), lambda t: t[..., 1:41]),
        "every second column": (lambda: device.empty((4, 3, 80), F16), lambda t: t[..., ::2]),
        "axes exchanged": (lambda: device.empty((3, 4, 40), F16), lambda t: t.transpose(1, 0, 2)),
    }
    for what, (make, view) in places.items():
        memory = make()
        before = device.numpy(memory).copy()
        out = view(memory)
        assert cki.linear(device.array(x), device.array(w), out=out) is out
        assert_close(device.numpy(out), truth, expected, what)
        untouched = before.view(np.uint16)
        view(untouched)[...] = 0
        after = device.numpy(memory).copy().view(np.uint16)
        view(after)[...] = 0
        assert np.array_equal(after, untouched), what


def test_out_may_be_the_residual(device):
    x, w, residual = normal((20, 24), F16, 1), weight(24, 70, F16, "in_out"), normal((20, 70), F16, 4)
    memory = device.array(residual)
    y = cki.linear(device.array(x), device.array(w), residual=memory, out=memory)
    assert y is memory
    assert_close(
        device.numpy(y), cki.reference.linear(x, w, residual=residual), plain(x, w, residual=residual)
    )


# --- nothing to do ----------------------------------------------------------------------------------------------------


def test_no_depth(device):
    x, w = np.zeros((3, 0), F32), np.zeros((0, 6), F32)
    bias, residual = normal((6,), F32, 3), normal((3, 6), F32, 4)
    assert np.all(check(device, x, w) == 0)
    check(device, x, w, bias, activation="gelu", residual=residual)
    check(device, x.astype(F16), np.zeros((6, 0), F16), weight_layout="out_in")


@pytest.mark.parametrize(("rows", "columns"), [((0,), 5), ((2, 0), 5), ((3,), 0)])
def test_nothing_to_compute(device, rows, columns):
    y = cki.linear(device.array(np.zeros((*rows, 4), F16)), device.array(np.zeros((4, columns), F16)))
    assert y.shape == (*rows, columns)


# --- numbers ----------------------------------------------------------------------------------------------------------


def test_fp32_is_accurate_over_a_long_depth(device):
    """Sums of one sign: an accumulator that truncates would lose in proportion to the depth."""
    x, w = np.abs(normal((3, 20000), F32, 1)), np.abs(weight(20000, 4, F32, "out_in"))
    y = cki.linear(device.array(x), device.array(w), weight_layout="out_in")
    truth = cki.reference.linear(x, w, weight_layout="out_in")
    assert np.max(np.abs(device.numpy(y) - truth) / truth) < 2e-6


def test_fp32_keeps_all_mantissa_bits(device):
    """Operands that tf32 would round: 1 + 2^-20 by 1 and by 1 + 2^-12."""
    x, w = np.array([[1 + 2.0**-20]], F32), np.array([[1.0, 1 + 2.0**-12]], F32)
    got = device.numpy(cki.linear(device.array(x), device.array(w)))
    assert np.all(np.abs(got - x.astype(np.float64) @ w) < 2.0**-22)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dtype", ["f32", "f16", "bf16"])
def test_infinities_and_nan(device, dtype, layout):
    x, w = normal((20, 70), DTYPES[dtype], 1), np.abs(weight(70, 66, DTYPES[dtype], layout))
    x[3, 5], x[4, 69], x[17, 2], x[18, 1], x[18, 2] = np.inf, -np.inf, np.nan, np.inf, -np.inf
    options = {"weight_layout": layout}
    got = device.numpy(cki.linear(device.array(x), device.array(w), **options))
    with np.errstate(invalid="ignore"):
        assert_close(got, cki.reference.linear(x, w, **options), plain(x, w, **options))
    assert np.all(got[3] == np.inf)
    assert np.all(got[4] == -np.inf)
    assert np.all(np.isnan(got[17:19].astype(np.float32)))


def test_the_largest_fp32_numbers(device):
    """tf32 rounds these to infinity."""
    largest = np.float32(np.finfo(np.float32).max)
    y = cki.linear(device.array(np.full((1, 1), largest)), device.array(np.array([[1.0, 0.5, -1.0]], F32)))
    assert np.array_equal(device.numpy(y), [[largest, largest / 2, -largest]])


@pytest.mark.parametrize("dtype", ["f16", "f32"])
def test_a_row_does_not_depend_on_the_batch(device, dtype):
    x, w = normal((150, 136), DTYPES[dtype], 1), device.array(weight(136, 136, DTYPES[dtype], "in_out"))
    together = device.numpy(cki.linear(device.array(x), w))
    assert np.array_equal(together, device.numpy(cki.linear(device.array(x), w)))
    for rows in (slice(0, 1), slice(7, 30), slice(60, 150)):
        assert np.array_equal(together[rows], device.numpy(cki.linear(device.array(x[rows]), w)))
