"""Tensor copies: the raw tile in shared memory, and what a store or an addition leaves in global memory."""

from __future__ import annotations

import numpy as np
import pytest

from cki.loader import TensorMap
from tests.ptx.operands import load

# shape and box from the outermost dimension to the innermost, element type, swizzle, coordinates of the box
CASES = [
    pytest.param((100,), (64,), np.float32, 0, (16,), id="1d"),
    pytest.param((50,), (32,), np.uint16, 0, (40,), id="1d-clipped"),
    pytest.param((40, 64), (16, 64), np.uint16, 128, (8, 0), id="2d-swizzle-128"),
    pytest.param((40, 64), (16, 32), np.uint16, 64, (8, 32), id="2d-swizzle-64"),
    pytest.param((40, 64), (16, 16), np.uint16, 32, (8, 48), id="2d-swizzle-32"),
    pytest.param((40, 72), (16, 32), np.uint16, 0, (36, 56), id="2d-clipped"),
    pytest.param((40, 72), (16, 64), np.uint16, 128, (-5, -24), id="2d-before-the-start"),
    pytest.param((40, 72), (16, 64), np.uint16, 128, (200, 0), id="2d-outside"),
    pytest.param((6, 20, 32), (2, 8, 32), np.float32, 128, (1, 15, 0), id="3d"),
    pytest.param((3, 4, 10, 16), (2, 2, 8, 16), np.float32, 64, (2, 1, 5, 0), id="4d"),
    pytest.param((12, 64), (8, 16), np.uint16, 128, (3, 32), id="2d-box-narrower-than-swizzle"),
    pytest.param((10, 41), (4, 16), np.float32, 64, (2, 32), id="2d-clipped-inside-16-bytes"),
    pytest.param((3, 2, 4, 6, 16), (2, 1, 2, 4, 16), np.uint8, 0, (1, 1, 3, 4, 0), id="5d"),
]


def swizzle(address: np.ndarray, span: int) -> np.ndarray:
    """The permutation of byte addresses, from its description in the PTX manual: chunk bits XOR row bits."""
    mask = {0: 0x00, 32: 0x10, 64: 0x30, 128: 0x70}[span]
    return address ^ ((address >> 3) & mask)


def box_of(tensor: np.ndarray, box: tuple[int, ...], at: tuple[int, ...]) -> tuple[np.ndarray, np.ndarray]:
    """The box's elements with zeros outside the tensor, and which of them lie inside."""
    grids = np.meshgrid(*(np.arange(b) + c for b, c in zip(box, at)), indexing="ij")
    inside = np.logical_and.reduce([(g >= 0) & (g < size) for g, size in zip(grids, tensor.shape)])
    clipped = tuple(np.clip(g, 0, size - 1) for g, size in zip(grids, tensor.shape))
    return np.where(inside, tensor[clipped], tensor.dtype.type(0)), inside


@pytest.mark.parametrize(("shape", "box", "dtype", "span", "at"), CASES)
def test_load_and_store(device, shape, box, dtype, span, at) -> None:
    check_tile(device, shape, box, dtype, span, at, add=False)


@pytest.mark.parametrize(
    ("shape", "box", "dtype", "span", "at"), [case for case in CASES if case.values[2] == np.float32]
)
def test_load_and_add(device, shape, box, dtype, span, at) -> None:
    check_tile(device, shape, box, dtype, span, at, add=True)


def check_tile(device, shape, box, dtype, span, at, *, add: bool) -> None:
    """Load one box, look at it in shared memory, store or add it through a second map, look at global memory."""
    rng = np.random.default_rng(8)
    itemsize = np.dtype(dtype).itemsize
    pad = (-shape[-1] * itemsize) % 16 // itemsize  # rows are multiples of 16 bytes
    full = (*shape[:-1], shape[-1] + pad)
    source, target = (rng.integers(1, 200, full).astype(dtype) for _ in range(2))
    inner = (*(slice(None) for _ in shape[:-1]), slice(0, shape[-1]))
    on_device, out = device.array(source), device.array(target)
    row_bytes = box[-1] * itemsize
    pitch, rows = span or row_bytes, int(np.prod(box[:-1]))  # a row narrower than the swizzle keeps its pitch
    dump = device.empty((rows * pitch // 4,), np.uint32)
    writes = min(at) >= 0  # the hardware takes no store at negative coordinates
    load("tma.cu", "tile_copy")(
        1, 128, TensorMap(on_device[inner], box, span), TensorMap(out[inner], box, span), dump, rows * row_bytes,
        rows * pitch, len(shape), *[*at[::-1], 0, 0, 0, 0][:5], int(add) if writes else 2, len(shape) % 2,
        smem=(rows * pitch + 1023) // 1024 * 1024,
    )  # fmt: skip
    device.synchronize()
    expected, _ = box_of(source[inner], box, at)
    tile = np.full(rows * pitch, 0xCD, np.uint8)
    places = np.arange(rows)[:, None] * pitch + np.arange(row_bytes)
    tile[swizzle(places.ravel(), span)] = np.ascontiguousarray(expected).view(np.uint8).ravel()
    np.testing.assert_array_equal(device.numpy(dump).view(np.uint8), tile)

    # A store writes whole units of 16 bytes: the padding behind the extent too, with the zeros of the load.
    _, written = box_of(target, box, at)
    after = target.copy()
    if writes:
        grids = np.meshgrid(*(np.arange(b) + c for b, c in zip(box, at)), indexing="ij")
        where = tuple(g[written] for g in grids)
        after[where] = after[where] + expected[written] if add else expected[written]
    np.testing.assert_array_equal(device.numpy(out), after)
