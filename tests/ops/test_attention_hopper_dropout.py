"""Dropout in the Hopper attention kernel, asked for by its tiles: the definition, and the generic kernel's bits."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest

import cki
from cki import reference
from cki.heuristics.attention_hopper import HopperTiles
from cki.ops.attention import ATTENTION, plan_attention
from cki.ops.attention_dropout import dropout_of
from cki.ops.attention_hopper import workspace_of
from cki.ops.call import call
from cki.plan import Plan
from cki.reference.dropout import attention_keeps
from tests.compare import assert_close
from tests.ops.attention_cases import plain, qkv
from tests.ops.inputs import BF16, F16
from tests.orders import every_check, orders

SMALL = HopperTiles(2, 32)
_specs: dict[HopperTiles, Any] = {}


def spec_of(tiles: HopperTiles) -> Any:
    """cki.attention's operation with the Hopper kernel and these tiles, on a device of one SM."""

    def plan(problem: Any, outputs: Any, device: Any) -> Plan:
        device = dataclasses.replace(device, sm_count=1)
        steps = plan_attention(
            problem["q"], problem["k"], problem["v"], outputs["out"], lse=outputs["lse"], device=device, tiles=tiles,
            causal=problem.attribute("causal"), window=problem.attribute("window"), dropout=dropout_of(problem),
        )  # fmt: skip
        return Plan(steps, workspace_of(steps))

    return _specs.setdefault(tiles, dataclasses.replace(ATTENTION, plan=plan))


def counters(seed: int = 11, offset: int = 5) -> dict[str, np.ndarray]:
    return {"dropout_seed": np.array([seed]), "dropout_offset": np.array([offset])}


def run(device: Any, tiles: HopperTiles, **named: Any) -> tuple[np.ndarray, np.ndarray]:
    """(out, lse)"""
    named = {n: device.array(t) if isinstance(t, np.ndarray) else t for n, t in named.items()} | {
        "return_lse": True
    }
    inputs = tuple(named.get(item.name) for item in ATTENTION.inputs)
    attributes = tuple(named.get(item.name, item.default) for item in ATTENTION.attributes)
    out, lse = call(spec_of(tiles), inputs, attributes, (None, None))
    return device.numpy(out), device.numpy(lse)


def check(device: Any, q: Any, k: Any, v: Any, tiles: HopperTiles = SMALL, **options: Any) -> np.ndarray:
    out, lse = run(device, tiles, q=q, k=k, v=v, **options)
    truth, true_lse = reference.attention(q, k, v, return_lse=True, **options)
    plain_out, plain_lse = plain(q, k, v, **options)
    assert_close(out, truth, plain_out, "out")
    assert_close(lse, true_lse, plain_lse, "lse")
    return out


@pytest.mark.parametrize(
    ("dtype", "dim", "tiles"),
    [
        (BF16, 16, SMALL), (F16, 80, HopperTiles(2, 128)), (BF16, 128, HopperTiles(2, 112, schedule="dynamic")),
        (BF16, 256, HopperTiles(2, 80)), (F16, 32, HopperTiles(1, 48, 2, False)),
    ],
)  # fmt: skip
def test_dropout(device, dtype, dim, tiles):
    """Batches and heads of their own; tiles of whole and of odd numbers of 16 keys."""
    tensors = qkv(dtype, 150, 200, heads=4 if dim < 80 else 2, kv_heads=2, dim=dim, batch=2)
    check(device, *tensors, tiles, causal=True, dropout_p=0.3, **counters())


def test_under_every_check(device):
    tensors = qkv(BF16, 140, 100, heads=2, dim=16)
    for seed in orders(device, 1):
        with every_check(device, seed):
            check(device, *tensors, causal=True, dropout_p=0.5, **counters(seed))


def test_drops_what_the_generic_kernel_drops(device):
    """The value of key j is unit vector j, so the output is the row of weights; 40 queries take the generic kernel."""
    q, k = np.zeros((1, 40, 2, 64), F16), np.zeros((1, 64, 2, 64), F16)
    v = np.repeat(np.eye(64, dtype=F16)[None, :, None, :], 2, axis=2)
    options = {"dropout_p": 0.5, **counters(3, 4)}
    out, _ = run(device, SMALL, q=q, k=k, v=v, **options)
    arrays = {n: device.array(t) if isinstance(t, np.ndarray) else t for n, t in options.items()}
    generic = device.numpy(cki.attention(*map(device.array, (q, k, v)), **arrays))
    np.testing.assert_array_equal(out > 0, generic > 0)
    for head in range(2):
        np.testing.assert_array_equal(out[0, :, head] > 0, attention_keeps(40, 64, head, 0.5, 3, 4))


def test_what_a_dropped_key_holds_does_not_matter(device):
    """Queries that drop a NaN are repaired without it, and still lose what else they drop."""
    q, k, v = qkv(F16, 70, 64, dim=32, heads=1)
    options = {"dropout_p": 0.5, **counters()}
    clean, _ = run(device, SMALL, q=q, k=k, v=v, **options)
    v[0, 20] = np.nan
    out, _ = run(device, SMALL, q=q, k=k, v=v, **options)
    keeps = attention_keeps(70, 64, 0, 0.5, 11, 5)[:, 20]
    assert keeps.any()
    assert not keeps.all()
    np.testing.assert_array_equal(np.isnan(out[0, :, 0]).all(axis=1), keeps)
    # A repaired row's weights are not rounded to f16: outputs above 4 differ by a unit in the last place, 2^-8.
    np.testing.assert_allclose(
        out[0, ~keeps, 0].astype(np.float32), clean[0, ~keeps, 0].astype(np.float32), atol=2e-3, rtol=2**-10
    )
