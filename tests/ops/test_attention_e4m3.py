"""Attention of e4m3 codes with descales: the Hopper kernel and the generic one against the float64 reference."""

from __future__ import annotations

import dataclasses
import functools
import math
from typing import Any

import numpy as np
import pytest

import cki
from cki import dtypes, reference
from cki.device import sim_device
from cki.errors import InvalidArgumentError, InvalidTypeError, UnsupportedError
from cki.heuristics.attention_e4m3 import E4m3Tiles
from cki.heuristics.attention_hopper import HopperTiles
from cki.operand import dense
from cki.ops import varlen
from cki.ops.attention import ATTENTION, OPTIONS, PackedSequences, plan_attention
from cki.ops.attention_dropout import dropout_of
from cki.ops.attention_e4m3 import Descales, descales_of, values_workspace
from cki.ops.attention_hopper import workspace_of
from cki.ops.call import call
from cki.plan import Plan
from cki.reference.attention import visible_keys
from tests.compare import assert_close
from tests.ops.inputs import BF16, E4M3, F16, F32, normal
from tests.ops.varlen_cases import offsets
from tests.orders import every_check, orders

#: Two warpgroups that take turns, rings of two stages that are walked through often.
SMALL = E4m3Tiles(2, 32)
LAZY = E4m3Tiles(2, 32, lazy=True)
#: The 16-bit kernel, of codes as f16.
CONVERTED = HopperTiles(2, 32)
_specs: dict[E4m3Tiles | HopperTiles, Any] = {}


@pytest.fixture(name="device")
def device_that_holds_e4m3(device):
    """With arrays of e4m3 on the GPU too."""
    return device.holding(E4M3)


def spec_of(tiles: E4m3Tiles | HopperTiles) -> Any:
    """cki.attention's operation with the Hopper kernel and these tiles, on a device of one SM."""

    def plan(problem: Any, outputs: Any, device: Any) -> Plan:
        device = dataclasses.replace(device, sm_count=1)
        options = {n: problem.attribute(n) for n in OPTIONS if n != "deterministic"}
        tensors = {n: problem.get(n) for n in ("bias", "mask", "sinks", "alibi_slopes")}
        steps = plan_attention(
            problem["q"], problem["k"], problem["v"], outputs["out"], lse=outputs.get("lse"), device=device,
            tiles=tiles, descales=descales_of(problem), dropout=dropout_of(problem), **options, **tensors,
        )  # fmt: skip
        return Plan(steps, (*workspace_of(steps), *values_workspace(steps)))

    return _specs.setdefault(tiles, dataclasses.replace(ATTENTION, plan=plan))


def codes(
    queries: int, keys: int, heads: int = 2, kv_heads: int = 1, dim: int = 32, value_dim: int = 0, batch: int = 1,
    seed: int = 0,
) -> tuple[dict[str, np.ndarray], dict[str, np.ndarray]]:  # fmt: skip
    """(q, k and v, their descales): codes that use the range of e4m3, of numbers of about 1.5 (v: 1)."""
    rng = np.random.default_rng(seed)
    shapes = {
        "q": (batch, queries, heads, dim), "k": (batch, keys, kv_heads, dim),
        "v": (batch, keys, kv_heads, value_dim or dim),
    }  # fmt: skip
    tensors, descales = {}, {}
    for name, shape in shapes.items():
        scale = rng.uniform(0.008, 0.02, (batch, kv_heads)).astype(np.float32)
        per_head = np.repeat(scale, shape[2] // kv_heads, axis=1)[:, None, :, None]
        values = rng.standard_normal(shape) * (1.0 if name == "v" else 1.5) / per_head
        tensors[name] = np.clip(values, -448, 448).astype(E4M3)
        descales[f"{name}_descale"] = scale
    return tensors, descales


def tensor_core_products(q: np.ndarray, k: np.ndarray) -> np.ndarray:
    """[batch, heads, queries, keys] from [batch, tokens, heads, dim] as Hopper adds e4m3 products: 32 products and the
    sum so far are cut to 14 bits of the largest of them and added (DeepSeek-V3, arXiv 2412.19437, 3.3.2), and the sum
    is kept with 13 bits after the first (SageAttention2, arXiv 2411.10958, section 3)."""
    q, k = q.transpose(0, 2, 1, 3)[:, :, :, None], k.transpose(0, 2, 1, 3)[:, :, None]
    total = np.zeros(np.broadcast_shapes(q.shape, k.shape)[:-1], np.float32)
    for first in range(0, q.shape[-1], 32):
        terms = q[..., first : first + 32] * k[..., first : first + 32]
        unit = _last_of_14_bits(np.maximum(np.abs(terms).max(axis=-1), np.abs(total)))
        total = (np.trunc(terms / unit[..., None]).sum(axis=-1) + np.trunc(total / unit)) * unit
        unit = _last_of_14_bits(np.abs(total))
        total = np.trunc(total / unit) * unit
    return total


def _last_of_14_bits(values: np.ndarray) -> np.ndarray:
    """What the last of 14 bits, the first one set, stands for."""
    return np.exp2(np.floor(np.log2(np.maximum(values, np.float32(1e-30)))) - 13).astype(np.float32)


def plain(
    q: np.ndarray, k: np.ndarray, v: np.ndarray, q_descale: Any, k_descale: Any, v_descale: Any, out_dtype: str,
    causal: bool = False, causal_alignment: str = "bottom_right", scale: float | None = None,
    window: tuple[int, int] = (-1, -1), softcap: float = 0.0, sinks: Any = None, alibi_slopes: Any = None,
) -> tuple[np.ndarray, np.ndarray]:  # fmt: skip
    """(out, lse) with whole matrices: scores as the tensor core adds them, the softmax in fp32, the exponentials
    rounded to e4m3 for the product with the codes of v."""
    batch, queries, heads, dim = q.shape
    keys, kv_heads = k.shape[1:3]
    group = heads // kv_heads
    of_q, of_k, of_v = (
        np.repeat(np.broadcast_to(d, (batch, kv_heads)), group, axis=1)[:, :, None, None]
        for d in (q_descale, k_descale, v_descale)
    )
    q, k, v = (t.astype(np.float32) for t in (q, k, v))
    k, v = np.repeat(k, group, axis=2), np.repeat(v, group, axis=2)
    logits = tensor_core_products(q, k) * (of_q * of_k)
    logits *= np.float32(1.0 / math.sqrt(dim) if scale is None else scale)
    if softcap > 0:
        logits = np.float32(softcap) * np.tanh(logits / np.float32(softcap))
    visible, position = visible_keys(queries, keys, causal, causal_alignment, window)
    if alibi_slopes is not None:
        logits -= alibi_slopes[:, None, None] * np.abs(position[:, None] - np.arange(keys)).astype(np.float32)
    logits = np.where(visible, logits, np.float32(-np.inf))
    largest = logits.max(axis=-1, initial=-np.inf)
    if sinks is not None:
        largest = np.maximum(largest, sinks[:, None])
    subtract = np.where(np.isfinite(largest), largest, np.float32(0.0))
    weights = np.exp(logits - subtract[..., None])
    total = weights.sum(axis=-1, dtype=np.float32)
    if sinks is not None:
        total = total + np.exp(sinks[:, None] - subtract)
    with np.errstate(divide="ignore"):
        lse = np.where(total > 0, subtract + np.log(total), np.float32(-np.inf))
    hidden = ~visible.any(axis=0)
    v = np.where(hidden[:, None, None], np.float32(0.0), v)
    out = np.einsum("bhij,bjhd->bhid", weights.astype(E4M3).astype(np.float32), v)
    out = out / np.where(total > 0, total, np.float32(1.0))[..., None] * of_v
    return out.transpose(0, 2, 1, 3).astype({"bf16": BF16, "f16": F16}[out_dtype]), lse


def expected(
    case: tuple[dict[str, np.ndarray], dict[str, np.ndarray]], out_dtype: str = "bf16", **options: Any
) -> tuple[np.ndarray, ...]:
    """out and lse, then those of the plain computation."""
    tensors, descales = case
    truth = reference.attention(**tensors, **descales, **options, return_lse=True)
    return (*truth, *plain(**tensors, **descales, out_dtype=out_dtype, **options))


def check(
    device: Any, case: tuple[dict[str, np.ndarray], dict[str, np.ndarray]], tiles: Any = None,
    given: dict[str, Any] | None = None, out_dtype: str = "bf16", wanted: tuple[np.ndarray, ...] = (), **options: Any,
) -> np.ndarray:  # fmt: skip
    """Runs e4m3 attention, with tiles the Hopper kernel, and holds out and lse against the bound; returns out.

    wanted: what `expected` says, where it is known.
    """
    tensors, descales = case
    on_device = {n: device.array(t) for n, t in {**tensors, **descales}.items()} | (given or {})
    extra = {n: device.array(t) if isinstance(t, np.ndarray) else t for n, t in options.items()}
    if tiles is None:
        got, lse = cki.attention(**on_device, **extra, out_dtype=out_dtype, return_lse=True)
    else:
        named = {**on_device, **extra, "return_lse": True, "out_dtype": out_dtype}
        inputs = tuple(named.get(item.name) for item in ATTENTION.inputs)
        attributes = tuple(named.get(item.name, item.default) for item in ATTENTION.attributes)
        got, lse = call(spec_of(tiles), inputs, attributes, (None, None))
    truth, true_lse, plain_out, plain_lse = wanted or expected(case, out_dtype, **options)
    result = device.numpy(got)
    assert result.dtype == plain_out.dtype
    assert_close(result, truth, plain_out, "out")
    assert_close(device.numpy(lse), true_lse, plain_lse, "lse")
    return result


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(("queries", "keys"), [(1, 1), (31, 33), (63, 65), (65, 15), (129, 129), (200, 300)])
def test_sizes(device, queries, keys, causal):
    case = codes(queries, keys)
    wanted = expected(case, causal=causal)
    for tiles in (SMALL, LAZY):
        check(device, case, tiles, wanted=wanted, causal=causal)


@pytest.mark.parametrize(
    ("case", "schedule", "consumers", "causal", "lazy"),
    [(0, "dynamic", 2, True, False), (1, "single", 2, True, True), (2, "fixed", 1, False, False)],
)
def test_rings_and_turns_under_every_check(device, case, schedule, consumers, causal, lazy):
    """Rings of two stages walked through more than twice, several tiles of queries a block where it persists."""
    tensors = codes(64 * consumers + 10, 150, heads=3, dim=16)
    tiles = E4m3Tiles(consumers, 32, schedule=schedule, lazy=lazy)
    wanted = expected(tensors, causal=causal)
    for seed in orders(device, case):
        with every_check(device, seed):
            check(device, tensors, tiles, wanted=wanted, causal=causal)


# Rows of 32, 64 and 128 bytes and more, a value dimension of its own; wide values in parts.
@pytest.mark.parametrize(
    ("dim", "value_dim", "lazy"),
    [(16, 16, True), (64, 48, False), (80, 112, True), (128, 128, False), (144, 32, False), (192, 256, True)],
)  # fmt: skip
def test_head_dims(device, dim, value_dim, lazy):
    tiles = E4m3Tiles(2, 128, lazy=lazy)
    check(device, codes(70, 150, dim=dim, value_dim=value_dim), tiles, causal=True)


@pytest.mark.parametrize(
    ("tiles", "causal"),
    [(E4m3Tiles(2, 192, 2), False), (E4m3Tiles(2, 96, 4), True), (E4m3Tiles(1, 64, lazy=True), True)],
)
def test_tiles(device, tiles, causal):
    check(device, codes(130, 450, dim=64), tiles, causal=causal)


@pytest.mark.parametrize("tiles", [None, SMALL])
def test_groups_and_batches(device, tiles):
    """Each batch and KV head has its own descales."""
    check(device, codes(70, 70, heads=6, kv_heads=2, batch=3, seed=1), tiles, causal=True, out_dtype="f16")


# Eager and lazy differ in the softmax alone, so that what goes into the logits is tested by one of them.
FEATURES: list[tuple[dict[str, Any], tuple[E4m3Tiles, ...]]] = [
    ({"scale": 0.0}, (SMALL, LAZY)), ({"scale": -0.4}, (SMALL, LAZY)), ({"scale": 3.0}, (SMALL, LAZY)),
    ({"softcap": 2.0, "causal": True}, (SMALL,)),
    ({"sinks": np.array([1.0, -2.0], np.float32), "window": (40, 3)}, (SMALL, LAZY)),
    ({"window": (5, -1), "causal_alignment": "top_left"}, (LAZY,)),
    ({"alibi_slopes": np.array([0.5, 0.03], np.float32), "window": (60, 10)}, (LAZY,)),
]  # fmt: skip


@pytest.mark.parametrize(("options", "hopper"), FEATURES, ids=[" ".join(options) for options, _ in FEATURES])
def test_features(device, options, hopper):
    """Few queries take the generic kernel."""
    check(device, codes(40, 150, dim=16), None, **options)
    case = codes(100, 150, dim=16)
    wanted = expected(case, **options)
    for tiles in hopper:
        check(device, case, tiles, wanted=wanted, **options)


def test_lse_changes_no_bits(device):
    """It is of the weights before they are rounded, the normaliser of the others."""
    case, tiles = codes(140, 170, dim=32), LAZY
    wanted = check(device, case, tiles, causal=True)
    named = {n: device.array(t) for n, t in {**case[0], **case[1]}.items()} | {"causal": True}
    inputs = tuple(named.get(item.name) for item in ATTENTION.inputs)
    attributes = tuple(named.get(item.name, item.default) for item in ATTENTION.attributes)
    out = call(spec_of(tiles), inputs, attributes, (None,))
    np.testing.assert_array_equal(device.numpy(out), wanted)


def test_more_queries_than_keys(device):
    out = check(device, codes(300, 70, dim=16), SMALL, causal=True)
    assert not out[:, : 300 - 70].any()


@pytest.mark.parametrize("tiles", [None, SMALL, LAZY])
def test_only_queries_that_see_a_nan_get_it(device, tiles):
    tensors, descales = codes(50 if tiles is None else 140, 150, dim=16)
    tensors["k"].view(np.uint8)[0, 149] = tensors["v"].view(np.uint8)[0, 120, 0, 3] = 0x7F
    options = {"window": (20, 10)}
    truth = reference.attention(**tensors, **descales, **options)
    assert np.isnan(truth).any() and not np.isnan(truth).all()
    on_device = {n: device.array(t) for n, t in {**tensors, **descales}.items()}
    inputs = tuple(on_device.get(item.name) for item in ATTENTION.inputs)
    spec = ATTENTION if tiles is None else spec_of(tiles)
    named = {**options, "return_lse": True}
    attributes = tuple(named.get(item.name, item.default) for item in ATTENTION.attributes)
    out = device.numpy(call(spec, inputs, attributes, (None, None))[0])
    np.testing.assert_array_equal(np.isnan(out), np.isnan(truth))
    finite = np.isfinite(truth)
    assert np.max(np.abs(out.astype(np.float64)[finite] - truth[finite])) < 0.1


@pytest.mark.parametrize(("block_size", "tiles"), [(0, None), (5, None), (16, None), (0, CONVERTED)])
def test_packed_sequences(device, block_size, tiles):
    """Each sequence and KV head has its own descales; in a cache, too.  Rows of no sequence behind the last."""
    queries, keys = (9, 0, 40, 1), (30, 8, 40, 0)
    cases = [codes(n, m, heads=4, kv_heads=2, dim=32, seed=i) for i, (n, m) in enumerate(zip(queries, keys))]
    wanted = [expected(case, causal=True, softcap=20.0) for case in cases]
    tensors = {n: np.concatenate([case[0][n][0] for case in cases]) for n in "qkv"}
    tensors["q"] = np.pad(tensors["q"], ((0, 3), (0, 0), (0, 0)))
    tensors |= {f"{n}_descale": np.concatenate([case[1][f"{n}_descale"] for case in cases]) for n in "qkv"}
    tensors["cu_seqlens_q"], tensors["cu_seqlens_k"] = offsets(queries), offsets(keys)
    if block_size:
        tensors["block_table"] = np.arange(4 * 8, dtype=np.int32)[::-1].reshape(4, 8).copy()
        for n in "kv":
            cache = np.full((32, block_size, 2, 32), np.nan, E4M3)
            for b, count in enumerate(keys):
                for key in range(count):
                    at = tensors["block_table"][b, key // block_size], key % block_size
                    cache[at] = tensors[n][tensors["cu_seqlens_k"][b] + key]
            tensors[n] = cache
        tensors["seq_lens"] = np.array(keys, np.int32)
        del tensors["cu_seqlens_k"]
    on_device = {n: device.array(t) for n, t in tensors.items()}
    given = {**on_device, "causal": True, "softcap": 20.0, "return_lse": True, "out_dtype": "bf16"}
    spec = dataclasses.replace(varlen.VARLEN_ATTENTION, plan=functools.partial(varlen.plan, tiles=tiles))
    inputs = tuple(given.get(item.name) for item in spec.inputs)
    attributes = tuple(given.get(item.name, item.default) for item in spec.attributes)
    out, lse = map(device.numpy, call(spec, inputs, attributes, (None, None)))
    truth, true_lse = reference.varlen_attention(**tensors, causal=True, softcap=20.0, return_lse=True)
    assert out.dtype == BF16
    assert not out[50:].any() and np.isneginf(lse[:, 50:]).all()
    for b, begin in enumerate(offsets(queries)[:-1]):
        rows = slice(begin, begin + queries[b])
        assert_close(out[rows], truth[rows], wanted[b][2][0], "out")
        assert_close(lse[:, rows], true_lse[:, rows], wanted[b][3][0], "lse")


def test_descales_of_zero_and_nan(device):
    """Zero makes all weights alike, NaN the result, of their own batch."""
    tensors, descales = codes(70, 70, batch=3, dim=16)
    descales["q_descale"][1] = 0
    out = check(device, (tensors, descales), SMALL, causal=True)
    descales["k_descale"][2] = np.nan
    on_device = {n: device.array(t) for n, t in {**tensors, **descales}.items()}
    spoilt = device.numpy(cki.attention(**on_device, causal=True))
    assert np.isnan(spoilt[2]).all()
    assert np.isfinite(out).all()
    assert np.isfinite(spoilt[:2]).all()


def test_large_codes_take_the_other_form_of_the_exponent(device):
    tensors, descales = codes(70, 100, dim=64)
    descales["q_descale"] = descales["q_descale"] * np.float32(3000)
    check(device, (tensors, descales), SMALL)
    check(device, (tensors, descales), LAZY)


def test_references_that_follow_late_and_early(device):
    """Keys that grow along the walk, by less and by more than a reference tolerates, some rows more than others."""
    tensors, descales = codes(70, 700, heads=1, dim=32)
    growth = np.exp2(np.linspace(1, -6, 700))[None, :, None, None]
    tensors["k"] = (tensors["k"].astype(np.float32) * growth).clip(-448, 448).astype(E4M3)
    descales["q_descale"] = descales["q_descale"] * np.float32(8)
    check(device, (tensors, descales), LAZY)
    check(device, (tensors, descales), LAZY, causal=True)


@pytest.mark.parametrize("dim", [5, 34, 20, 8])
def test_rows_of_any_size_take_the_generic_kernel(device, dim):
    """Copies of 1, 2, 4 and 8 bytes."""
    check(device, codes(20, 75, dim=dim), causal=True)


@pytest.mark.parametrize(
    ("dim", "tiles"), [(5, CONVERTED), (64, HopperTiles(2, 32, heads=2, splits=3)), (24, CONVERTED)]
)
def test_codes_as_f16(device, dim, tiles):
    """The 16-bit Hopper kernel, with descales of each batch and KV head."""
    case = codes(70, 150, heads=4, kv_heads=2, dim=dim, value_dim=40, batch=2, seed=2)
    sinks = np.array([1.0, -2.0, 0.0, 0.5], np.float32)
    check(device, case, tiles, causal=True, window=(90, -1), sinks=sinks)


@pytest.mark.parametrize("hidden_by", ["mask", "bias"])
def test_codes_as_f16_with_a_bias_a_mask_and_dropout(device, hidden_by):
    tensors, descales = codes(70, 100, heads=4, kv_heads=2, batch=2, seed=3)
    tensors["k"].view(np.uint8)[0, 7] = tensors["v"].view(np.uint8)[0, 7] = 0x7F  # NaN behind a hidden key
    bias, mask = normal((1, 4, 70, 100), F32, 3), np.ones((2, 1, 1, 100), bool)
    bias[..., 7], mask[..., 7] = (-np.inf, True) if hidden_by == "bias" else (0.0, False)
    options = {"bias": bias, "mask": mask, "dropout_p": 0.3}
    options |= {"dropout_seed": np.array([3]), "dropout_offset": np.array([4])}
    named = {**tensors, **descales, **options}
    named = {n: device.array(t) if isinstance(t, np.ndarray) else t for n, t in named.items()}
    inputs = tuple(named.get(item.name) for item in ATTENTION.inputs)
    attributes = tuple(named.get(item.name, item.default) for item in ATTENTION.attributes)
    out = device.numpy(call(spec_of(CONVERTED), inputs, attributes, (None,))).astype(np.float64)
    truth = reference.attention(**tensors, **descales, **options)
    assert np.max(np.abs(out - truth)) < 0.006 * np.max(np.abs(truth))


def test_bytes_layouts_and_bias_in_the_generic_kernel(device):
    """uint8 with the bits of e4m3, heads before tokens in memory, one descale for all batches, a bias and dropout."""
    tensors, descales = codes(40, 60, heads=4, kv_heads=2, batch=2)
    descales = {n: t[0] for n, t in descales.items()}
    given = {
        n: device.array(np.ascontiguousarray(t.swapaxes(1, 2)).view(np.uint8)).swapaxes(1, 2)
        for n, t in tensors.items()
    }
    check(device, (tensors, descales), given=given)
    bias = normal((1, 4, 40, 60), F32, 3)
    options = {"bias": bias, "dropout_p": 0.3, "dropout_seed": np.array([3]), "dropout_offset": np.array([4])}
    on_device = {n: device.array(t) for n, t in {**tensors, **descales}.items()}
    on_device |= {n: device.array(t) if isinstance(t, np.ndarray) else t for n, t in options.items()}
    out = device.numpy(cki.attention(**on_device)).astype(np.float64)
    truth = reference.attention(**tensors, **descales, **options)
    assert np.max(np.abs(out - truth)) < 0.02 * np.max(np.abs(truth))


def test_a_batch_alone_has_its_bits(device):
    tensors, descales = codes(150, 200, heads=2, batch=2)
    options = {"causal": True, "causal_alignment": "top_left"}
    both = check(device, (tensors, descales), SMALL, **options)
    alone = {n: t[:1] for n, t in tensors.items()}, {n: t[:1] for n, t in descales.items()}
    np.testing.assert_array_equal(check(device, alone, SMALL, **options)[0], both[0])


def test_deterministic_chunks_of_a_prompt(device):
    """A causal prompt at once, and its last 30 queries alone, by the kernel that long prompts take."""
    tensors, descales = codes(130, 130, dim=32)
    on_device = {n: device.array(t) for n, t in {**tensors, **descales}.items()}
    whole = device.numpy(cki.attention(**on_device, causal=True, deterministic=True))
    last = on_device | {"q": device.array(tensors["q"][:, 100:])}
    np.testing.assert_array_equal(
        device.numpy(cki.attention(**last, causal=True, deterministic=True)), whole[:, 100:]
    )


def plan(device: Any, shape: tuple[int, ...] = (2, 512, 8, 128), **options: Any) -> Any:
    q, k, v = (dense(n, shape, dtypes.e4m3) for n in "qkv")
    scale = dense("descale", (shape[2],), dtypes.f32)
    return plan_attention(
        q,
        k,
        v,
        dense("out", shape, dtypes.bf16),
        device=device,
        descales=Descales(scale, scale, scale),
        **options,
    )


def test_which_kernel():
    hopper, ampere = sim_device("sm_90a"), sim_device("sm_80")
    assert [step.kernel.entry for step in plan(hopper)] == ["transpose_e4m3_values", "attention_e4m3"]
    for steps in (plan(ampere), plan(ampere, (2, 512, 8, 40)), plan(hopper, (2, 32, 8, 128))):
        assert [step.kernel.entry for step in steps] == ["attention"]
    mask = dense("mask", (1, 1, 512, 512), dtypes.bool_)
    for steps in (plan(hopper, (2, 512, 8, 40)), plan(hopper, mask=mask)):
        entries = [step.kernel.entry for step in steps]
        assert (entries[0], entries[-1]) == ("codes_to_f16", "attention_hopper")
    lengths, table = dense("lengths", (2,), dtypes.i32), dense("table", (2, 64), dtypes.i32)
    for block_table, entry in ((None, "attention_hopper"), (table, "attention")):
        packed = PackedSequences(dense("offsets", (3,), dtypes.i32), lengths, block_table, 512)
        assert plan(hopper, (1, 1024, 8, 128), packed=packed)[-1].kernel.entry == entry
    with pytest.raises(UnsupportedError, match="multiple of 16"):
        plan(hopper, (2, 512, 8, 40), tiles=E4m3Tiles(2, 128))
    assert E4m3Tiles(2, 128).shared_memory(128, 128) < HopperTiles(2, 128).shared_memory(128, 128)


def test_every_broken_rule_is_named(device):
    tensors, descales = codes(4, 4, batch=2)
    good = {n: device.array(t) for n, t in {**tensors, **descales}.items()}
    half = device.array(normal((2, 4, 2, 32), F16, 1))
    with pytest.raises(InvalidArgumentError, match=r"out_dtype is 'f32'[\s\S]*without k_descale, v_descale"):
        cki.attention(good["q"], good["k"], good["v"], q_descale=good["q_descale"], out_dtype="f32")
    with pytest.raises(InvalidArgumentError, match=r"k_descale has shape \(2,\)"):
        cki.attention(**{**good, "k_descale": device.array(np.ones(2, np.float32))})
    with pytest.raises(InvalidTypeError, match=r"v_descale is f16"):
        cki.attention(**{**good, "v_descale": device.array(np.ones((2, 1), np.float16))})
    with pytest.raises(InvalidTypeError, match=r"k has dtype f16[\s\S]*q has dtype e4m3, k has dtype f16"):
        cki.attention(**{**good, "k": half[:, :, :1]})
    with pytest.raises(InvalidArgumentError, match=r"q_descale beside q of dtype f16"):
        cki.attention(half, half, half, q_descale=good["q_descale"])
    with pytest.raises(InvalidArgumentError, match=r"out_dtype is 'bf16' beside q of dtype f16"):
        cki.attention(half, half, half, out_dtype="bf16")
    packed = {n: good[n][0] for n in "qkv"} | {"cu_seqlens_q": device.array(offsets([3, 1]))}
    with pytest.raises(InvalidArgumentError, match=r"without q_descale, k_descale, v_descale"):
        cki.varlen_attention(**packed)
    descale = device.array(np.ones((3, 1), np.float32))
    with pytest.raises(InvalidArgumentError, match=r"k_descale has shape \(3, 1\)[\s\S]*\(2, 1\) or \(1,\)"):
        cki.varlen_attention(**packed, q_descale=descale, k_descale=descale, v_descale=descale)
