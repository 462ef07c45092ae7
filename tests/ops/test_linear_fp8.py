"""Linear layers of e4m3 codes with block scales, against float64 on what the codes stand for."""

from __future__ import annotations

import contextlib
import dataclasses

import numpy as np
import pytest

import cki
import cki.reference
import cki.sim
from cki import dtypes
from cki.device import sim_device
from cki.errors import InvalidArgumentError, InvalidTypeError, UnsupportedError
from cki.operand import dense
from cki.ops.call import call
from cki.ops.linear_fp8 import LINEAR_FP8, choose_fp8_tile, plan_linear_fp8
from cki.plan import Plan
from tests.compare import assert_close
from tests.ops.inputs import BF16, E4M3, F16, F32, normal
from tests.orders import every_check


@pytest.fixture
def hopper(device):
    if device.info.arch != "sm_90a":
        pytest.skip("the kernel is sm_90a's")
    return device


def codes(shape, seed):
    """Codes as bits, and scales for each 128 of the last axis."""
    values = normal(shape, F32, seed)
    return values.astype(E4M3).view(np.uint8)


def scales(shape, seed):
    return np.exp2(np.random.default_rng(seed).integers(-6, 3, shape) + 0.3).astype(np.float32)


def check(device, x, x_scale, w, w_scale, bias=None, out_dtype="bf16"):
    tensors = [None if t is None else device.array(t) for t in (x, x_scale, w, w_scale, bias)]
    got = device.numpy(cki.linear_fp8(*tensors, out_dtype=out_dtype))
    truth = cki.reference.linear_fp8(x, x_scale, w, w_scale, bias)
    dtype = BF16 if out_dtype == "bf16" else F16
    assert got.dtype == dtype
    assert_close(got, truth, truth.astype(np.float32).astype(dtype))
    return got


# Ends of tiles on all axes; a part of a stage; one row; columns that TMA cannot store; several rounds of the ring.
@pytest.mark.parametrize(
    ("rows", "depth", "columns", "out_dtype"),
    [(130, 272, 264, "bf16"), (1, 16, 8, "f16"), (70, 1040, 129, "bf16"), (200, 128, 40, "f16")],
)
def test_extents(hopper, rows, depth, columns, out_dtype):
    x, w, blocks = codes((rows, depth), 1), codes((columns, depth), 2), -(-depth // 128)
    x_scale, w_scale = scales((rows, blocks), 3), scales((-(-columns // 128), blocks), 4)
    check(hopper, x, x_scale, w, w_scale, normal((columns,), F32, 5), out_dtype)


@pytest.mark.parametrize("rows", [130, 40])
def test_scales_may_lie_anywhere(hopper, rows):
    """Side by side, where four stages' are one load, or apart: the same bits.  Groups of four, whole and not."""
    for blocks in (4, 5, 8, 12):
        x, w = codes((rows, 128 * blocks), 1), codes((264, 128 * blocks), 2)
        x_scale, w_scale = scales((rows, blocks), 3), scales((3, blocks), 4)
        together = check(hopper, x, x_scale, w, w_scale)
        apart = [hopper.array(np.ascontiguousarray(t.T)).T for t in (x_scale, w_scale)]
        y = cki.linear_fp8(hopper.array(x), apart[0], hopper.array(w), apart[1])
        assert np.array_equal(hopper.numpy(y), together)


def test_a_block_with_several_tiles(hopper):
    """Of enough stages for the consumers to take turns."""

    def plan(p, outputs, device):
        given = (p["x"], p["x_scale"], p["w"], p["w_scale"], None, outputs["out"])
        return Plan(plan_linear_fp8(*given, dataclasses.replace(device, sm_count=1)))

    spec = dataclasses.replace(LINEAR_FP8, plan=plan)
    x, w = codes((200, 1424), 1), codes((264, 1424), 2)
    x_scale, w_scale = scales((200, 12), 3), scales((3, 12), 4)
    results = []
    for seed in range(2):
        with every_check(hopper, seed):
            y = call(spec, (*map(hopper.array, (x, x_scale, w, w_scale)), None), ("bf16",), (None,))
        results.append(hopper.numpy(y))
    truth = cki.reference.linear_fp8(x, x_scale, w, w_scale)
    assert_close(results[0], truth, truth.astype(BF16))
    assert np.array_equal(*results)


# Rows of one and of all warps; parts of K unequal, shorter and longer than the ring; columns beyond TMA's stores.
@pytest.mark.parametrize(
    ("rows", "depth", "columns", "split", "early"),
    [
        (64, 1424, 264, 2, True),
        (1, 1040, 129, 8, False),
        (17, 272, 128, 2, True),
        (33, 2320, 40, 2, False),
        (50, 1424, 264, 1, True),
        (20, 2048, 128, 2, True),
    ],
)
def test_few_rows_with_k_in_parts(hopper, rows, depth, columns, split, early):
    tile = dataclasses.replace(choose_fp8_tile(rows, depth, columns, 132), split=split)

    def plan(p, outputs, device):
        given = (p["x"], p["x_scale"], p["w"], p["w_scale"], p["bias"], outputs["out"], device)
        return Plan(plan_linear_fp8(*given, tile=tile, weights_early=early))

    spec = dataclasses.replace(LINEAR_FP8, name=f"linear_fp8_in_{split}", plan=plan)
    x, w, blocks = codes((rows, depth), 1), codes((columns, depth), 2), -(-depth // 128)
    x_scale, w_scale = scales((rows, blocks), 3), scales((-(-columns // 128), blocks), 4)
    bias = normal((columns,), F32, 5)
    results = []
    for seed in range(2):
        with every_check(hopper, seed):
            y = call(spec, tuple(map(hopper.array, (x, x_scale, w, w_scale, bias))), ("bf16",), (None,))
        results.append(hopper.numpy(y))
    truth = cki.reference.linear_fp8(x, x_scale, w, w_scale, bias)
    assert_close(results[0], truth, truth.astype(BF16))
    assert np.array_equal(*results)


@pytest.mark.parametrize(
    ("depth", "columns", "split"),
    [(4096, 6144, 1), (4096, 4096, 2), (4096, 24576, 1), (12288, 4096, 2), (100, 8, 1)],
)
def test_k_is_in_parts_where_they_were_faster(depth, columns, split):
    tile = choose_fp8_tile(64, depth, columns, 132)
    assert (tile.block_m, tile.split) == (64, split)
    assert choose_fp8_tile(65, depth, columns, 132).split == 1


def test_scales_of_rows_and_of_all(hopper):
    x, w = codes((100, 272), 1), codes((136, 272), 2)
    check(hopper, x, scales((100, 1), 3), w, scales((1, 1), 4))


# Many rows, few rows with K whole and in parts; columns that are no whole tile; scales with a step between them.
@pytest.mark.parametrize(
    ("rows", "depth", "columns", "step"), [(130, 272, 264, 1), (3, 144, 129, 2), (64, 4096, 128, 1)]
)
def test_a_scale_for_each_row_of_the_weight(hopper, rows, depth, columns, step):
    x, w = codes((rows, depth), 1), codes((columns, depth), 2)
    spaced = scales((columns * step, 1), 4)
    bias = normal((columns,), F32, 5)
    for x_scale in (scales((rows, 1), 3), scales((rows, -(-depth // 128)), 3)):
        given = [hopper.array(t) for t in (x, x_scale, w)]
        y = hopper.numpy(cki.linear_fp8(*given, hopper.array(spaced)[::step], hopper.array(bias)))
        truth = cki.reference.linear_fp8(x, x_scale, w, spaced[::step], bias)
        assert_close(y, truth, truth.astype(BF16))


def test_scales_as_quantize_fp8_stores_them_transposed(hopper):
    x, w = normal((2, 70, 256), BF16, 1), codes((128, 256), 2)
    quantised, x_scale = cki.quantize_fp8(hopper.array(x), granularity="block128", out_dtype="uint8")
    w_scale = scales((1, 2), 4)
    y = hopper.numpy(cki.linear_fp8(quantised, x_scale, hopper.array(w), hopper.array(w_scale)))
    flat = hopper.numpy(quantised).reshape(140, 256), hopper.numpy(x_scale).reshape(140, 2)
    truth = cki.reference.linear_fp8(*flat, w, w_scale).reshape(2, 70, 128)
    assert_close(y, truth, truth.astype(BF16))
    transposed = np.ascontiguousarray(flat[1].T)
    again = cki.linear_fp8(
        *map(hopper.array, (flat[0],)), hopper.array(transposed).T, hopper.array(w), hopper.array(w_scale)
    )
    assert np.array_equal(hopper.numpy(again).reshape(y.shape), y)


def test_the_same_bits_in_every_order(hopper):
    x, w = codes((150, 400), 1), codes((140, 400), 2)
    given = [hopper.array(t) for t in (x, scales((150, 4), 3), w, scales((2, 4), 4))]
    results = []
    for seed in range(2):
        checks = cki.sim.checks(adversarial=True, hazards=True, races=True, bounds=True, seed=seed)
        with checks if hopper.kind == "sim" else contextlib.nullcontext():
            results.append(hopper.numpy(cki.linear_fp8(*given)))
    assert np.array_equal(*results)


def test_bad_arguments(device):
    x, w = device.array(codes((4, 256), 1)), device.array(codes((8, 256), 2))
    x_scale, w_scale = device.array(scales((4, 2), 3)), device.array(scales((1, 2), 4))
    with pytest.raises(
        InvalidArgumentError, match=r"(?s)out_dtype is 'f32'.*x_scale has shape.*w_scale has shape"
    ):
        cki.linear_fp8(
            x, device.array(scales((4, 3), 3)), w, device.array(scales((2, 2), 3)), out_dtype="f32"
        )
    with pytest.raises(InvalidTypeError, match="x is f16"):
        cki.linear_fp8(device.array(normal((4, 256), F16)), x_scale, w, w_scale)
    with pytest.raises(InvalidArgumentError, match="w of shape"):
        cki.linear_fp8(x, x_scale, device.array(codes((8, 128), 2)), w_scale)


@pytest.mark.parametrize(
    ("arch", "depth", "words"), [("sm_80", 256, "needs sm_90a"), ("sm_90a", 250, "multiples of 16")]
)
def test_obstacles(arch, depth, words):
    x, w = dense("x", (64, depth), dtypes.e4m3), dense("w", (64, depth), dtypes.e4m3)
    x_scale, w_scale = dense("xs", (64, 2), dtypes.f32), dense("ws", (1, 2), dtypes.f32)
    with pytest.raises(UnsupportedError, match=words):
        plan_linear_fp8(x, x_scale, w, w_scale, None, dense("y", (64, 64), dtypes.bf16), sim_device(arch))
