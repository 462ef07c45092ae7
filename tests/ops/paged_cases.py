"""What the tests of paged and decode attention share: caches, the plain computation, one checked call."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np

from cki import reference
from cki.heuristics.paged import DecodeConfig, DecodeShape, choose_decode
from cki.ops.call import call
from cki.ops.paged import PAGED_ATTENTION, paged_attention, plan_problem
from cki.plan import Plan
from cki.reference.paged import dequantized, gathered
from tests.compare import assert_close
from tests.ops.attention_cases import plain
from tests.ops.inputs import E4M3, normal

TENSORS = ("sinks", "alibi_slopes")


def paged_cache(
    lengths: Any, block_size: int, kv_heads: int, dim: int, dtype: Any, *, value_dim: int = 0, seed: int = 0,
    scales: int = 0, spare: int = 3,
) -> tuple[tuple[np.ndarray, ...], np.ndarray]:  # fmt: skip
    """(cache, block_table): blocks in random order, NaN wherever no key lies, garbage in the table past each length.

    scales: 0 none, 1 of heads, 3 of tokens, for an e4m3 cache.
    """
    generator = np.random.default_rng(seed)
    needed = [-(-length // block_size) for length in lengths]
    blocks = sum(needed) + spare
    ids = generator.permutation(blocks).tolist()
    table = generator.choice([-1, 2**31 - 1, -7, blocks, 0], (len(lengths), max([*needed, 1]) + 2)).astype(
        np.int32
    )
    value_dim = value_dim or dim
    arrays = [
        np.full((blocks, block_size, kv_heads, d), np.nan, np.float32).astype(dtype) for d in (dim, value_dim)
    ]
    token_scales = [np.full((blocks, block_size, kv_heads), np.nan, np.float32) for _ in range(2)]
    for b, length in enumerate(lengths):
        for column in range(needed[b]):
            block = table[b, column] = ids.pop()
            count = min(block_size, length - column * block_size)
            for i, (array, spread) in enumerate(zip(arrays, (1.5, 1.0))):
                factor = 50.0 if dtype == E4M3 else 1.0
                array[block, :count] = (
                    generator.standard_normal(array[block, :count].shape) * spread * factor
                ).astype(dtype)
                token_scales[i][block, :count] = np.exp(generator.uniform(-5, -3, (count, kv_heads)))
    if scales == 0:
        return tuple(arrays), table
    if scales == 1:
        token_scales = [np.exp(generator.uniform(-5, -3, kv_heads)).astype(np.float32) for _ in range(2)]
    return (*arrays, *token_scales), table


def plain_paged(
    q: np.ndarray, cache: Any, table: np.ndarray, lengths: Any, window: Any = (-1, -1), **options: Any
) -> Any:
    """(out, lse) as one computes it sequence by sequence in q's type; e4m3 keys and values are rounded to that type."""
    keys, values = dequantized(*cache)
    outs, lses = [], []
    reach = table.shape[1] * keys.shape[1]
    for b, length in enumerate(np.clip(lengths, 0, reach).tolist()):
        k, v = (gathered(t, table[b], length).astype(q.dtype)[None] for t in (keys, values))
        out, lse = plain(q[b : b + 1], k, v, causal=True, window=(window[0], -1), **options)
        outs.append(out[0])
        lses.append(lse[0])
    return np.stack(outs), np.stack(lses)


def check_paged(
    device: Any,
    q: np.ndarray,
    cache: Any,
    table: np.ndarray,
    lengths: Any,
    *,
    run: Any = None,
    **options: Any,
) -> tuple[np.ndarray, np.ndarray]:
    """One call against the reference; run: in place of `cki.paged_attention`."""
    device = device.holding(*(t.dtype for t in cache))
    lengths = np.asarray(lengths, np.int32) if not isinstance(lengths, np.ndarray) else lengths
    tensors = {n: device.array(o) if n in TENSORS else o for n, o in options.items()}
    arguments = (
        device.array(q),
        tuple(device.array(t) for t in cache),
        device.array(table),
        device.array(lengths),
    )
    out, lse = (device.numpy(t) for t in (run or paged_attention)(*arguments, return_lse=True, **tensors))
    truth, truth_lse = reference.paged_attention(q, cache, table, lengths, return_lse=True, **options)
    options.pop("deterministic", None)
    plain_out, plain_lse = plain_paged(q, cache, table, lengths, **options)
    assert_close(out, truth, plain_out, "out")
    assert_close(lse, truth_lse, plain_lse, "lse")
    return out, lse


def configured(counters: Any = None, sm_count: int = 132, **changes: Any) -> Any:
    """`cki.paged_attention` with changes to the heuristic's configuration, on a device of some SMs; not dealt unless
    the changes say so."""
    changes = {"dealt": False, "by_lengths": False, "cluster": False, **changes}

    def choose(shape: DecodeShape, device: Any) -> DecodeConfig:
        return dataclasses.replace(
            choose_decode(shape, dataclasses.replace(device, sm_count=sm_count)), **changes
        )

    def plan(problem: Any, outputs: Any, device: Any) -> Plan:
        return plan_problem(problem, outputs, device, choose)

    spec = dataclasses.replace(PAGED_ATTENTION, plan=plan)

    def run(
        q: Any, cache: Any, table: Any, lengths: Any, *, scale: Any = None, window: Any = (-1, -1),
        softcap: float = 0.0, sinks: Any = None, alibi_slopes: Any = None, return_lse: bool = False,
    ) -> Any:  # fmt: skip
        scales = cache[2:] if len(cache) == 4 else (None, None)
        inputs = (q, *cache[:2], table, lengths, *scales, sinks, alibi_slopes, counters)
        return call(spec, inputs, (scale, window, softcap, False, return_lse), (None, None))

    return run


__all__ = ["E4M3", "check_paged", "configured", "normal", "paged_cache", "plain_paged"]
