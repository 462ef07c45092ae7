"""Dropout in float64, with the random numbers that it is defined by: the specification of `cki.dropout_add`."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

Array = NDArray[Any]
Words = NDArray[np.uint32]

_MULTIPLIERS = np.array([0xD2511F53, 0xCD9E8D57], np.uint64)
_WEYL = np.array([0x9E3779B9, 0xBB67AE85], np.uint64)
_LOW = np.uint64(0xFFFFFFFF)
_HALF = np.uint64(32)


def philox_4x32_10(counter: Array, key: Array) -> Words:
    """Philox 4x32-10 (Salmon et al. 2011): random words [n, 4] from counters [n, 4] and a key [2], 32 bits each."""
    c = np.array(counter, np.uint64)
    k = np.array(key, np.uint64)
    for _ in range(10):
        products = c[:, [0, 2]] * _MULTIPLIERS
        high, low = products >> _HALF, products & _LOW
        c = np.stack([high[:, 1] ^ c[:, 1] ^ k[0], low[:, 1], high[:, 0] ^ c[:, 3] ^ k[1], low[:, 0]], 1)
        k = (k + _WEYL) & _LOW
    return c.astype(np.uint32)


def dropout_keeps(shape: tuple[int, ...], p: float, seed: int, offset: int) -> NDArray[np.bool_]:
    """Which elements of a tensor of that shape are kept.

    Element i in row-major order is kept when word i % 4 of Philox with counter (i / 4, offset) and key seed, each 64
    bits, low half first, is at least p * 2^32.
    """
    count = int(np.prod(shape))
    quads = np.arange(-(-count // 4), dtype=np.uint64)
    low, high = int(offset) % 2**32, int(offset) % 2**64 >> 32
    counter = np.stack([quads & _LOW, quads >> _HALF, np.full_like(quads, low), np.full_like(quads, high)], 1)
    words = philox_4x32_10(counter, np.array([int(seed) % 2**32, int(seed) % 2**64 >> 32], np.uint64))
    threshold = min(round(p * 2.0**32), 2**32 - 1)
    keeps: NDArray[np.bool_] = (words.reshape(-1)[:count] >= threshold).reshape(shape)
    return keeps


def attention_keeps(queries: int, keys: int, row: int, p: float, seed: int, offset: int) -> NDArray[np.bool_]:
    """Which weights [queries, keys] of attention are kept; row is batch * heads + head.

    Key j of query i is kept when word j % 16 // 8 * 2 + j % 2 of Philox with counter (j // 16 * 4 + j % 8 // 2, i, row,
    offset mod 2^32) and key seed is at least p * 2^32.
    """
    key = np.arange(keys, dtype=np.uint64)
    place, query = np.meshgrid(key // 16 * 4 + key % 8 // 2, np.arange(queries, dtype=np.uint64))
    others = [np.full(place.size, number, np.uint64) for number in (row, int(offset) % 2**32)]
    counter = np.stack([place.reshape(-1), query.reshape(-1), *others], 1)
    words = philox_4x32_10(counter, np.array([int(seed) % 2**32, int(seed) % 2**64 >> 32], np.uint64))
    chosen = np.take_along_axis(
        words.reshape(queries, keys, 4), (key % 16 // 8 * 2 + key % 2).astype(np.int64)[None, :, None], 2
    )
    keeps: NDArray[np.bool_] = chosen[..., 0] >= min(round(p * 2.0**32), 2**32 - 1)
    return keeps


def dropout_add(x: Array, residual: Array | None, p: float, seed: Any, offset: Any) -> NDArray[np.float64]:
    """x / (1 - p) where it is kept (`dropout_keeps`), else 0; plus residual."""
    values = np.asarray(x).astype(np.float64)
    keeps = dropout_keeps(values.shape, p, int(np.ravel(seed)[0]), int(np.ravel(offset)[0]))
    y: NDArray[np.float64] = np.where(keeps, values / (1.0 - p), 0.0)
    return y if residual is None else y + np.asarray(residual).astype(np.float64)
