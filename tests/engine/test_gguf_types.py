"""Quantised numbers of GGUF files, against ggml's definition element by element and the `gguf` package."""

from __future__ import annotations

import numpy as np
import pytest

from cki.engine.gguf_types import OTHER_TYPES, TYPES, floats

gguf = pytest.importorskip("gguf")

QUANTISED = ("Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q4_K", "Q5_K", "Q6_K")


def half(block: bytes, begin: int) -> np.float32:
    return np.frombuffer(block[begin : begin + 2], np.float16)[0].astype(np.float32)


def number(block: bytes, kind: str, i: int) -> float:
    """Number i of a block, from ggml's definition of the types."""
    if kind == "Q6_K":
        half_, place, part = i // 128, i % 32, i % 128 // 32
        low = block[64 * half_ + place + 32 * (part % 2)] >> 4 * (part // 2) & 15
        high = block[128 + 32 * half_ + place] >> 2 * part & 3
        scale = np.float32(np.frombuffer(block[192:208], np.int8)[i // 16]) * half(block, 208)
        return scale * np.float32((low | high << 4) - 32)
    scale = half(block, 0)
    if kind == "Q8_0":
        return scale * np.float32(np.frombuffer(block[2:], np.int8)[i])
    if kind.endswith("K"):
        s, j, run = block[4:16], i // 32, block[-128:]
        six, top = (
            (s[j] & 63, s[j + 4] & 63)
            if j < 4
            else (s[j + 4] & 15 | s[j - 4] >> 6 << 4, s[j + 4] >> 4 | s[j] >> 6 << 4)
        )
        code = run[j // 2 * 32 + i % 32] >> 4 * (j % 2) & 15
        code |= (block[16 + i % 32] >> j & 1) << 4 if kind == "Q5_K" else 0
        return scale * np.float32(six) * np.float32(code) - half(block, 2) * np.float32(top)
    code = block[-16:][i % 16] >> 4 * (i // 16) & 15
    if kind[:2] == "Q5":
        code |= (int.from_bytes(block[-20:-16], "little") >> i & 1) << 4
    if kind.endswith("0"):
        return scale * np.float32(code - (8 if kind == "Q4_0" else 16))
    return scale * np.float32(code) + half(block, 2)


@pytest.mark.parametrize("kind", QUANTISED)
def test_quantised_types(kind):
    """Blocks of any bytes, but for scales that are finite."""
    block = next(found for found in TYPES.values() if found.name == kind)
    rng = np.random.default_rng(len(kind))
    rows, blocks = 3, 2
    raw = rng.integers(0, 256, (rows, blocks, block.bytes), np.uint8)
    places = {"Q6_K": (208,), "Q8_0": (0,), "Q4_0": (0,), "Q5_0": (0,)}.get(kind, (0, 2))
    for begin in places:
        raw[:, :, begin : begin + 2] = rng.normal(size=(rows, blocks, 1)).astype(np.float16).view(np.uint8)
    flat = raw.reshape(rows, -1)
    found = floats(flat, block)
    assert found.dtype == np.float32
    places = range(block.elements)
    expected = [
        [number(raw[r, b].tobytes(), kind, i) for b in range(blocks) for i in places] for r in range(rows)
    ]
    np.testing.assert_array_equal(found, np.array(expected, np.float32))
    theirs = gguf.quants.dequantize(flat, gguf.GGMLQuantizationType[kind])
    np.testing.assert_array_equal(found, theirs)


def test_table_of_types_is_ggmls():
    theirs = {int(kind): kind.name for kind in gguf.GGMLQuantizationType}
    assert {**OTHER_TYPES, **{number: kind.name for number, kind in TYPES.items()}}.items() <= theirs.items()
    for number_, kind in TYPES.items():
        assert (kind.elements, kind.bytes) == gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType(number_)]


@pytest.mark.parametrize("rows", [1, 15, 16, 700])
def test_large_tensors_are_read_in_parts(rows):
    """Of 4096 columns 16 rows are a part, and many parts are shared by threads."""
    block = next(found for found in TYPES.values() if found.name == "Q8_0")
    blocks = np.zeros((rows, 128, block.bytes), np.uint8)
    blocks[:, :, :2] = np.array([2.0], np.float16).view(np.uint8)
    blocks[:, :, 2:] = (np.arange(rows)[:, None, None] + np.arange(128)[:, None]) % 100
    expected = np.repeat((np.arange(rows)[:, None] + np.arange(128)) % 100 * 2.0, 32, axis=1)
    np.testing.assert_array_equal(floats(blocks.reshape(rows, -1), block), expected)


def test_a_tensor_without_rows():
    block = next(found for found in TYPES.values() if found.name == "Q4_0")
    assert floats(np.zeros((0, 36), np.uint8), block).shape == (0, 64)
