"""A layer's products of few rows, of bf16 and of e4m3 codes, with norms, gates and quantisations, against float64.

parts: 0 of bf16, 1 or 2 of codes.
"""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from cki import dtypes
from cki.device import sim_device
from cki.errors import UnsupportedError
from cki.operand import dense
from cki.ops.call import call
from cki.ops.few_rows import Heads, Rows, plan_embed_stream, plan_few_rows
from cki.ops.spec import Attribute, Input, OpSpec, OutputSpec
from cki.plan import Plan
from cki.reference import append_kv, linear_fp8
from tests.compare import assert_close
from tests.ops.inputs import BF16, E4M3, normal
from tests.ops.test_linear_fp8 import codes, hopper, scales  # noqa: F401
from tests.orders import every_check

EPS = 1e-5


def operation(sm_count: int, split: int) -> OpSpec:
    """The planner as an operation: all of its inputs and outputs."""

    def infer(problem):
        rows = given_rows(problem)
        columns = problem["w"].shape[0] // (2 if problem.get("y") is None else 1)
        groups = (rows.tokens, columns // 128)
        dtype = dtypes.bf16 if rows.scales is None else dtypes.u8
        return {
            "out": OutputSpec((rows.values.shape[0], columns), dtype), "scale_out": OutputSpec(groups, dtypes.f32),
            "squares_out": OutputSpec(groups, dtypes.f32),
        }  # fmt: skip

    def plan(problem, outputs, device):
        is_plain = problem.get("y") is not None and problem.get("gamma") is None
        x, w_scale = given_rows(problem), problem.get("w_scale")
        steps = plan_few_rows(
            x, as_codes(problem["w"]), w_scale, dataclasses.replace(device, sm_count=sm_count), y=problem.get("y"),
            to=None if is_plain else rows_of(outputs["out"], outputs["scale_out"], outputs["squares_out"]),
            bias=problem.get("bias"), gamma=problem.get("gamma"), activation=problem.attribute("activation"),
            split=split,
        )  # fmt: skip
        return Plan(steps)

    inputs = Input("x"), Input("x_scale", True), Input("w"), Input("w_scale", True)
    optional = (
        Input("squares", True),
        Input("y", True, written=True),
        Input("bias", True),
        Input("gamma", True),
    )
    return OpSpec(
        name=f"few_rows_{sm_count}_{split}", inputs=(*inputs, *optional),
        attributes=(Attribute("activation", str),), outputs=("out", "scale_out", "squares_out"),
        check=lambda problem: None, infer=infer, plan=plan,
    )  # fmt: skip


def given_rows(problem):
    return Rows(as_codes(problem["x"]), problem.get("x_scale"), problem.get("squares"), EPS)


def as_codes(tensor):
    """Bytes are codes here."""
    return dataclasses.replace(tensor, dtype=dtypes.e4m3) if tensor.dtype == dtypes.u8 else tensor


def rows_of(values, scales, squares):
    """Outputs as rows: bf16 has no scales."""
    return Rows(as_codes(values), None if values.dtype == dtypes.bf16 else scales, squares)


def run(device, given, sm_count=132, split=1, activation=None):
    """y, codes, scales and sums of squares; the same in every order of the device's threads."""
    results = []
    for seed in range(2):
        with every_check(device, seed):
            tensors = [None if t is None else device.array(t.copy()) for t in given]
            outputs = call(operation(sm_count, split), tuple(tensors), (activation,), (None,) * 3)
            found = [device.numpy(t).copy() for t in (tensors[5], *outputs) if t is not None]
            is_stream, is_project = given[7] is not None, given[5] is not None and given[7] is None
            # What nobody writes: bf16 has no scales, a product alone no rows, and streams alone have squares.
            written = (not is_project, not is_project and given[1] is not None, is_stream)
            found[-3:] = [t if is_written else None for t, is_written in zip(found[-3:], written)]
            results.append(found)
    rows = len(given[0] if given[1] is None else given[1])
    for first, second in zip(*results):
        if first is not None and len(first) == rows:  # of two parts, rows of nobody are not written
            assert first.tobytes() == second.tobytes()
    return results[0]


def problem(rows, depth, columns, *, norm, parts):
    """x and w, scales, squares of rows; and the product.  Of two parts two rows of codes for one of x."""
    blocks = -(-depth // 128)
    squares = np.abs(normal((rows, blocks), np.float32, 5)) * 100 if norm else None
    factors = 1.0
    if norm:
        factors = 1 / np.sqrt(squares.astype(np.float64).sum(1, keepdims=True) / depth + EPS)
    if parts == 0:
        x, w = normal((rows, depth), BF16, 1), normal((columns, depth), BF16, 2)
        return (x, None, w, None, squares), factors * (x.astype(np.float64) @ w.astype(np.float64).T)
    x, w = codes((parts * rows, depth), 1), codes((columns, depth), 2)
    x_scale, w_scale = scales((rows, blocks), 3) / 4, scales((-(-columns // 128), blocks), 4) / 4
    product = factors * sum(linear_fp8(part, x_scale, w, w_scale) for part in np.split(x, parts))
    if parts == 2:
        physical = np.random.default_rng(9).integers(0, 256, (64, depth)).astype(np.uint8)  # most of nobody
        physical[first_parts(rows)], physical[first_parts(rows) + 8] = np.split(x, 2)
        x = physical
    return (x, x_scale, w, w_scale, squares), product


def first_parts(rows):
    return np.arange(rows) // 8 * 16 + np.arange(rows) % 8


def check_rows(got, scale, values, parts):
    """bf16 as ever.  Of one part of codes half a step of three bits of mantissa, or of the least normal code, may be
    lost, and what bf16 takes before; of two parts 2^-8 of a value, and what a tensor core loses where products cancel.
    """
    if parts == 0:
        assert_close(got, values, values.astype(BF16))
        return
    groups = values.reshape(len(values), -1, 128)
    largest = np.abs(groups).max(-1)
    stands_for = got.view(E4M3).astype(np.float64)
    if parts == 2:
        stands_for = stands_for[first_parts(len(values))] + stands_for[first_parts(len(values)) + 8]
        assert (np.frexp(scale)[0] == 0.5).all()
        assert (scale * 127 <= largest).all() and (largest <= scale * 257).all()
    else:
        np.testing.assert_allclose(scale, largest / 448, rtol=1e-2)
    relative, absolute = (1 / 15, 2**-9) if parts == 1 else (2**-8, 2**-10)
    error = np.abs(stands_for.reshape(groups.shape) * scale[..., None] - groups)
    assert (error <= np.abs(groups) * relative + largest[..., None] * absolute).all()


# Several rounds of the ring and a part of a stage, a block with several tiles; one row; two tiles of rows.
@pytest.mark.parametrize(
    ("rows", "depth", "columns", "sm_count", "norm", "parts"),
    [
        (64, 896, 256, 1, True, 1),
        (1, 16, 128, 4, False, 1),
        (70, 272, 128, 4, False, 1),
        (19, 896, 256, 1, True, 2),
        (64, 896, 256, 1, True, 0),
        (1, 16, 128, 4, False, 0),
        (70, 136, 128, 4, False, 0),
        (19, 384, 128, 132, True, 0),
    ],
)
def test_gates(hopper, rows, depth, columns, sm_count, norm, parts):  # noqa: F811
    given, product = problem(rows, depth, 2 * columns, norm=norm, parts=parts)
    got, scale, _ = run(hopper, (*given, None, None, None), sm_count, 1, "silu")
    gate, up = np.split(product, 2, axis=1)
    check_rows(got, scale, gate / (1 + np.exp(-gate)) * up, parts)


# K in two parts, uneven and a part of a stage; whole, a block with several tiles.
@pytest.mark.parametrize(
    ("rows", "depth", "columns", "split", "sm_count", "parts"),
    [
        (64, 2448, 256, 2, 132, 1),
        (64, 1424, 256, 3, 132, 1),
        (32, 400, 128, 3, 132, 2),
        (70, 272, 128, 2, 132, 1),
        (70, 272, 256, 1, 2, 1),
        (32, 272, 128, 2, 132, 2),
        (64, 1240, 256, 2, 132, 0),
        (9, 1424, 256, 3, 132, 0),
        (17, 136, 128, 3, 132, 0),
        (70, 272, 256, 1, 2, 0),
    ],
)
def test_stream(hopper, rows, depth, columns, split, sm_count, parts):  # noqa: F811
    given, product = problem(rows, depth, columns, norm=False, parts=parts)
    y, gamma = normal((rows, columns), BF16, 6), normal((columns,), BF16, 7)
    after, got, scale, squares = run(hopper, (*given, y, None, gamma), sm_count, split)
    truth = y.astype(np.float64) + product
    assert_close(after, truth, truth.astype(BF16))
    rounded = after.astype(np.float64)
    check_rows(got, scale, rounded * gamma.astype(np.float64), parts)
    np.testing.assert_allclose(squares, (rounded**2).reshape(rows, -1, 128).sum(-1), rtol=1e-5)


@pytest.mark.parametrize(
    ("rows", "depth", "columns", "split", "parts"),
    [
        (33, 1408, 192, 1, 1),
        (64, 256, 640, 2, 1),
        (9, 256, 192, 1, 2),
        (33, 1408, 192, 1, 0),
        (64, 256, 640, 2, 0),
    ],
)
def test_project(hopper, rows, depth, columns, split, parts):  # noqa: F811
    given, product = problem(rows, depth, columns, norm=True, parts=parts)
    y, bias = normal((rows, columns), BF16, 6), normal((columns,), BF16, 7)
    got = run(hopper, (*given, y, bias, None), 132, split)[0]
    truth = product + bias.astype(np.float64)
    assert_close(got, truth, truth.astype(BF16))


# Queries of two heads, a key's, a value's; slots and positions outside; blocks of a power of two, and not; K in two
# parts, whole, a block with several heads.
@pytest.mark.parametrize(
    ("rows", "depth", "split", "sm_count", "parts", "norm", "block_size"),
    [
        (40, 384, 2, 132, 1, True, 16), (19, 256, 2, 132, 2, True, 5), (9, 256, 1, 3, 2, False, 16),
        (64, 128, 1, 3, 1, True, 16), (40, 384, 2, 132, 0, True, 16), (9, 256, 1, 3, 0, False, 5),
        (33, 128, 2, 132, 0, True, 16),
    ],
)  # fmt: skip
def test_heads(hopper, rows, depth, split, sm_count, parts, norm, block_size):  # noqa: F811
    given, product = problem(rows, depth, 4 * 128, norm=True, parts=parts)
    rng, blocks = np.random.default_rng(1), -(-rows // block_size) + 1
    bias = normal((512,), BF16, 2)
    slots = rng.permutation(blocks * block_size)[:rows].astype(np.int64)
    positions = rng.integers(0, 50, rows).astype(np.int32)
    slots[1], slots[3], positions[2], positions[4] = -1, blocks * block_size, -1, 50
    table = np.cos(normal((50, 128), np.float32, 8))
    gammas = [normal((128,), BF16, seed) for seed in (3, 4)] if norm else [None, None]
    caches = [normal((blocks, block_size, 1, 128), BF16, seed) for seed in (5, 6)]
    found = []
    for seed in range(2):
        with every_check(hopper, seed):
            tensors = [
                None if t is None else hopper.array(t.copy())
                for t in (*given, bias, *caches, slots, positions, table, *gammas)
            ]
            out = call(heads_operation(sm_count, split), tuple(tensors), (), (None,))
            q = hopper.numpy(out).reshape(rows, 4, 128)[:, :2]
            found.append([hopper.numpy(tensors[6]).copy(), hopper.numpy(tensors[7]).copy(), q.copy()])
    for first, second in zip(*found):
        assert first.tobytes() == second.tobytes()
    q, k, v = np.split((product + bias.astype(np.float64)).reshape(rows, 4, 128), (2, 3), axis=1)
    options = {"positions": positions, "cos_sin": table, "norm_eps": EPS}
    options |= {} if not norm else {"q_norm_weight": gammas[0], "k_norm_weight": gammas[1]}
    truth = append_kv(k, v, [c.astype(np.float64) for c in caches], slots, q=q, **options)
    for got, expected in zip(found[0], truth):
        assert_close(got, expected, expected.astype(BF16))


def heads_operation(sm_count, split):
    """The planner with heads as an operation on memory that it writes."""

    def plan(problem, outputs, device):
        gammas = problem.get("q_gamma"), problem.get("k_gamma")
        heads = Heads(
            (problem["k_cache"], problem["v_cache"]), problem["slots"], problem["positions"], problem["table"],
            None if gammas[0] is None else gammas, EPS,
        )  # fmt: skip
        return Plan(plan_few_rows(
            given_rows(problem), as_codes(problem["w"]), problem.get("w_scale"),
            dataclasses.replace(device, sm_count=sm_count), y=outputs["out"],
            bias=problem["bias"], split=split, heads=heads,
        ))  # fmt: skip

    given = (
        Input("x"),
        Input("x_scale", True),
        Input("w"),
        Input("w_scale", True),
        Input("squares"),
        Input("bias"),
    )
    written = (Input("k_cache", written=True), Input("v_cache", written=True))
    rest = (*map(Input, ("slots", "positions", "table")), Input("q_gamma", True), Input("k_gamma", True))
    return OpSpec(
        name=f"few_rows_heads_{sm_count}_{split}", inputs=(*given, *written, *rest),
        attributes=(), outputs=("out",), check=lambda problem: None, plan=plan,
        infer=lambda problem: {"out": OutputSpec((given_rows(problem).tokens, 512), dtypes.bf16)},
    )  # fmt: skip


# Tokens outside the table; columns that are no whole blocks of four warps; W8A8, two parts, bf16.
@pytest.mark.parametrize(("rows", "columns", "parts"), [(40, 640, 1), (32, 256, 2), (9, 640, 0)])
def test_embed_stream(hopper, rows, columns, parts):  # noqa: F811
    table, gamma = normal((50, columns + 4), BF16, 1)[:, :columns], normal((columns,), BF16, 2)
    tokens = np.random.default_rng(3).integers(0, 50, rows).astype(np.int32)
    tokens[-2:] = -1, 50

    def plan(problem, outputs, device):
        to = rows_of(*(outputs[name] for name in ("out", "scale_out", "squares_out")))
        x = outputs["x_out"]
        return Plan(plan_embed_stream(problem["tokens"], problem["table"], problem["gamma"], x, to, device))

    groups = (rows, columns // 128)
    outputs = {
        "out": OutputSpec((64 if parts == 2 else rows, columns), dtypes.u8 if parts else dtypes.bf16),
        "scale_out": OutputSpec(groups, dtypes.f32),
        "squares_out": OutputSpec(groups, dtypes.f32), "x_out": OutputSpec((rows, columns), dtypes.bf16),
    }  # fmt: skip
    operation = OpSpec(
        name=f"embed_stream_{rows}_{parts}", inputs=tuple(map(Input, ("tokens", "table", "gamma"))), attributes=(),
        outputs=tuple(outputs), check=lambda problem: None, infer=lambda problem: outputs, plan=plan,
    )  # fmt: skip
    with every_check(hopper, 0):
        found = call(operation, tuple(map(hopper.array, (tokens, table, gamma))), (), (None,) * 4)
    got, scale, squares, x = map(hopper.numpy, found)
    truth = np.where(((tokens >= 0) & (tokens < 50))[:, None], table[tokens % 50].astype(np.float64), 0.0)
    np.testing.assert_array_equal(x.astype(np.float64), truth)
    np.testing.assert_allclose(squares, (truth**2).reshape(rows, -1, 128).sum(-1), rtol=1e-5)
    check_rows(
        got[: 64 if parts == 2 else rows - 2], scale[:-2], (truth * gamma.astype(np.float64))[:-2], parts
    )
    places = first_parts(rows) if parts == 2 else np.arange(rows)
    zeros = got[places[-2:]]
    assert not (zeros & 127 if parts else zeros).any()  # of either sign


def test_what_it_does_not_take():
    """Other GPUs, columns that are no whole blocks, caches and positions of other types."""
    x = Rows(dense("x", (64, 256), dtypes.e4m3), dense("x_scale", (64, 2), dtypes.f32))
    w, w_scale = dense("w", (2 * 192, 256), dtypes.e4m3), dense("w_scale", (3, 2), dtypes.f32)
    to = Rows(dense("out", (64, 192), dtypes.e4m3), dense("scale_out", (64, 2), dtypes.f32))
    with pytest.raises(UnsupportedError, match="sm_90a(.|\n)*whole blocks"):
        plan_few_rows(x, w, w_scale, sim_device("sm_80"), to=to)
    cache, index = dense("k_cache", (9, 16, 1, 128), dtypes.f16), dense("slots", (64,), dtypes.i64)
    heads = Heads((cache, cache), index, index, dense("table", (9, 128), dtypes.f32))
    y = dense("y", (64, 384), dtypes.bf16)
    with pytest.raises(UnsupportedError, match="dense bf16 rows(.|\n)*positions not i32"):
        plan_few_rows(x, w, w_scale, sim_device("sm_90a"), y=y, heads=heads)
    with pytest.raises(UnsupportedError, match="rows of e4m3 beside bf16"):
        plan_few_rows(x, dense("w", (384, 256), dtypes.bf16), None, sim_device("sm_90a"), y=y)
    table, gamma, f16_rows = (
        dense("table", (9, 256), dtypes.bf16),
        dense("gamma", (256,), dtypes.bf16),
        Rows(dense("to", (64, 256), dtypes.f16), None, dense("squares", (64, 2), dtypes.f32)),
    )
    tokens, stream = dense("tokens", (64,), dtypes.i32), dense("stream", (64, 256), dtypes.bf16)
    with pytest.raises(UnsupportedError, match="rows of f16 beside bf16"):
        plan_embed_stream(tokens, table, gamma, stream, f16_rows, sim_device("sm_90a"))
    with pytest.raises(UnsupportedError, match="codes have scales"):
        plan_few_rows(Rows(x.values), w, w_scale, sim_device("sm_90a"), y=y)
