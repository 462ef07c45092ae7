"""ldmatrix, stmatrix, movmatrix: which element goes where, by the figures of the PTX manual."""

from __future__ import annotations

import numpy as np
import pytest

from tests.ptx.operands import load

ROWS, FORMS = 64, ((1, False), (2, False), (4, False), (1, True), (2, True), (4, True))


@pytest.fixture
def case(device):
    """memory [64 rows][8 halves], row of each lane, registers [32 lanes][4][2 halves], and the kernel's outputs."""
    rng = np.random.default_rng(3)
    memory = rng.integers(0, 1 << 16, (ROWS, 8), np.uint16)
    row_of_lane = rng.permutation(ROWS)[:32].astype(np.int32)
    registers = rng.integers(0, 1 << 16, (32, 4, 2), np.uint16)
    loaded = device.array(np.zeros((6, 32, 4), np.uint32))
    stored = device.empty((6, ROWS, 4), np.uint32)
    moved = device.empty((32,), np.uint32)
    load("matrices.cu", "matrices")(
        1, 32, device.array(memory.view(np.uint32)), device.array(row_of_lane),
        device.array(registers.view(np.uint32).reshape(32, 4)), loaded, stored, moved,
    )  # fmt: skip
    device.synchronize()
    return memory, row_of_lane, registers, device.numpy(loaded), device.numpy(stored), device.numpy(moved)


def fragment(matrix: np.ndarray, transpose: bool) -> np.ndarray:
    """[32 lanes][2 halves] of an 8x8 matrix: lane l holds row l/4, columns 2(l%4) and +1, of it or of its transpose."""
    return (matrix.T if transpose else matrix).reshape(32, 2)


def test_ldmatrix(case) -> None:
    memory, row_of_lane, _, loaded, _, _ = case
    for form, (count, transpose) in enumerate(FORMS):
        for i in range(count):
            matrix = memory[row_of_lane[8 * i : 8 * i + 8]]
            actual = np.ascontiguousarray(loaded[form, :, i]).view(np.uint16).reshape(32, 2)
            form_name = f"x{count} transpose={transpose} matrix {i}"
            np.testing.assert_array_equal(actual, fragment(matrix, transpose), err_msg=form_name)


def test_stmatrix(case) -> None:
    _, row_of_lane, registers, _, stored, _ = case
    for form, (count, transpose) in enumerate(FORMS):
        expected = np.full((ROWS, 8), 0xFFFF, np.uint16)
        for i in range(count):
            matrix = registers[:, i].reshape(8, 8)
            expected[row_of_lane[8 * i : 8 * i + 8]] = matrix.T if transpose else matrix
        np.testing.assert_array_equal(
            stored[form].view(np.uint16), expected, err_msg=f"x{count} transpose={transpose}"
        )


def test_movmatrix(case) -> None:
    _, _, registers, _, _, moved = case
    matrix = registers[:, 0].reshape(8, 8)
    np.testing.assert_array_equal(moved.view(np.uint16).reshape(32, 2), fragment(matrix, True))
