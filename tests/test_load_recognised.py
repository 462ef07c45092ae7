"""`cki.load` in the steady state: arguments that are recognised get the same words, others the same errors."""

from __future__ import annotations

import math
import struct
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

import cki
from cki.adapter import adapter_of
from cki.errors import DeviceError, InvalidArgumentError, InvalidTypeError, SimulationError
from cki.load_arguments import TensorMap, number_word, reader, signature
from cki.loader import Kernel
from cki.ops.spec import Problem
from cki.signature import Parameter

torch = pytest.importorskip("torch")
pytestmark = pytest.mark.torch

Seen = tuple[Kernel, Any, Any]
SCALE = """
extern "C" __global__ void scale(const float* x, float* y, float factor, int n) {
  const int i = blockIdx.x * blockDim.x + threadIdx.x;
  if (i < n) y[i] = x ? factor * x[i] : factor;
}
"""
NUMBERS = [
    ("i", -1), ("i", -(2**31)), ("i", 2**31 - 1), ("I", 2**32 - 1), ("q", -5), ("q", 2**63 - 1), ("Q", 2**64 - 1),
    ("f", 0.1), ("f", -0.0), ("f", 3), ("f", math.inf), ("d", 0.1), ("d", -1e300), ("d", 7),
    ("i", np.int8(-3)), ("I", np.uint64(9)), ("q", np.int64(-(2**63))), ("f", np.float32(0.1)), ("d", np.float16(0.5)),
]  # fmt: skip


def recognised(kernel: Kernel, *args: Any, grid: Any = 4, block: Any = 64, **options: Any) -> None:
    """A launch that must not need another look at its arguments."""
    examine = Kernel._examine
    Kernel._examine = None  # type: ignore[assignment, method-assign]
    try:
        kernel(grid, block, *args, **options)
    finally:
        Kernel._examine = examine  # type: ignore[method-assign]


@pytest.fixture
def seen() -> Iterator[Seen]:
    """A kernel that has been launched on such tensors three times (once for torch to be met at all)."""
    kernel, x, y = cki.load(SCALE), torch.arange(200.0), torch.zeros(200)
    with cki.device("sim"):
        for _ in range(3):
            kernel(4, 64, x, y, 2.0, 200)
        yield kernel, x, y


def test_addresses_and_numbers_may_change(seen: Seen) -> None:
    kernel, _, _ = seen
    for factor, n in [(2.0, 200), (-0.5, 199), (math.inf, 3), (1e-40, 0), (0.1, -1)]:
        other, result = torch.randn(200), torch.zeros(200)
        recognised(kernel, other, result, factor, n)
        expected = np.zeros(200, np.float32)
        expected[: max(n, 0)] = np.float32(factor) * other.numpy()[: max(n, 0)]
        np.testing.assert_array_equal(result.numpy(), expected)


@pytest.mark.parametrize(
    ("geometry", "words"),
    [
        ({"grid": 4.0}, "grid is 4.0"),
        ({"block": True}, "block is True"),
        ({"grid": (4, 1.0)}, "grid is"),
        ({"grid": ()}, "grid is"),
        ({"smem": 0.0}, "smem is 0.0"),
        ({"cluster": True}, "cluster is True"),
        ({"block": (1024, 2)}, "2048 threads"),
        ({"grid": 0}, "three positive sizes"),
    ],
)
def test_geometry_is_checked_on_each_call(seen: Seen, geometry: dict[str, Any], words: str) -> None:
    kernel, x, y = seen
    with pytest.raises((InvalidTypeError, InvalidArgumentError), match=words):
        recognised(kernel, x, y, 2.0, 200, **geometry)


@pytest.mark.parametrize("grid", [2, (2,), (1, 2), (1, 1, 2), [2, 1], np.array([2]), np.int64(2)])
def test_another_geometry(seen: Seen, grid: Any) -> None:
    kernel, x, y = seen
    y.zero_()
    kernel(grid, 100, x, y, 3.0, 200)
    blocks = grid if isinstance(grid, (int, np.integer)) else grid[0]
    assert torch.equal(y[: blocks * 100], 3 * x[: blocks * 100]) and not y[blocks * 100 :].any()


def bad_arguments() -> list[tuple[type[Exception], str, Any]]:
    return [
        (InvalidTypeError, "n is bool", lambda x, y: (x, y, 2.0, True)),
        (InvalidTypeError, "n is 200.0", lambda x, y: (x, y, 2.0, 200.0)),
        (InvalidArgumentError, "n is 2147483648, out of range of int", lambda x, y: (x, y, 2.0, 2**31)),
        (InvalidArgumentError, "factor is 1e[+]300, out of range of float", lambda x, y: (x, y, 1e300, 200)),
        (InvalidArgumentError, "factor is 1000*, out of range of float", lambda x, y: (x, y, 10**400, 200)),
        (InvalidTypeError, "factor is str", lambda x, y: (x, y, "2", 200)),
        (InvalidTypeError, "x is a f64 tensor", lambda x, y: (x.double(), y, 2.0, 200)),
        (InvalidTypeError, "y requires grad", lambda x, y: (x, y.requires_grad_(), 2.0, 200)),
        (InvalidTypeError, "x is a lazy negation", lambda x, y: (x._neg_view(), y, 2.0, 200)),
        (InvalidTypeError, "different frameworks", lambda x, y: (x.numpy(), y, 2.0, 200)),
        (InvalidTypeError, "x is of type list", lambda x, y: ([1.0], y, 2.0, 200)),
        (InvalidTypeError, "given 3 arguments", lambda x, y: (x, y, 2.0)),
        (InvalidTypeError, "given 5 arguments", lambda x, y: (x, y, 2.0, 200, 1)),
    ]


@pytest.mark.parametrize(("kind", "words", "args"), bad_arguments())
def test_what_is_refused_at_first_is_refused_later(
    seen: Seen, kind: type[Exception], words: str, args: Any
) -> None:
    kernel, x, y = seen
    for _ in range(2):
        with pytest.raises(kind, match=words):
            kernel(4, 64, *args(x, y), smem=0)


def test_other_kinds_of_arguments_take_turns(seen: Seen) -> None:
    """Sizes, alignments, classes of numbers, null pointers: each kind gets its own words, also after many others."""
    kernel, _, _ = seen
    memory = torch.randn(300)
    for turn in range(3):
        for start, size in [(0, 200), (1, 199), (2, 64), *((0, length) for length in range(1, 12))]:
            y = torch.zeros(size)
            kernel(4, 64, memory[start : start + size], y, np.float32(turn), np.int64(size))
            assert torch.equal(y, turn * memory[start : start + size])
        y = torch.zeros(200)
        kernel(4, 64, None, y, turn, 200)
        assert (y == turn).all()
    recognised(kernel, memory[:11], torch.zeros(11), np.float32(1), np.int64(11))
    assert len(kernel._recent) <= 8


def test_a_tensor_where_a_null_pointer_was(seen: Seen) -> None:
    kernel, x, y = seen
    for _ in range(3):
        kernel(4, 64, None, y, 7.0, 200)
        kernel(4, 64, x, y, 7.0, 200)
        assert torch.equal(y, 7 * x)


def test_numpy_arrays_go_by_their_signature() -> None:
    kernel, x = cki.load(SCALE), np.arange(200, dtype=np.float32)
    with cki.device("sim"):
        for factor in (2.0, 3.0, 4.0):
            y = np.zeros_like(x)
            kernel(4, 64, x, y, factor, 200)
            np.testing.assert_array_equal(y, factor * x)
        y.flags.writeable = False
        with pytest.raises(InvalidArgumentError, match="y is read-only"):
            kernel(4, 64, x, y, 2.0, 200)
        assert len(kernel._kinds) == 1 and not kernel._recent


def test_cpu_tensors_outside_the_simulated_device_are_refused_again(seen: Seen) -> None:
    kernel, x, y = seen
    with cki.device("cuda"), pytest.raises(DeviceError, match="current device is cuda"):
        kernel(4, 64, x, y, 2.0, 200)


def test_bounds_follow_the_tensors(seen: Seen) -> None:
    kernel, x, y = seen
    with cki.sim.checks(bounds=True):
        recognised(kernel, x, y, 2.0, 200)
        for _ in range(3):
            with pytest.raises(SimulationError, match="OUT OF BOUNDS"):
                kernel(4, 64, x, torch.zeros(199), 2.0, 200)


@pytest.mark.parametrize(("letter", "value"), NUMBERS)
def test_a_recognised_number_has_the_word_of_an_examined_one(letter: str, value: Any) -> None:
    parameters = (Parameter("x", "P"), Parameter("value", letter))
    x = torch.zeros(4)
    read = reader(adapter_of(x), parameters, (x, type(value)(1)))
    problem = Problem({}, {})
    word = number_word(parameters[1], value, problem)
    assert not problem.violations and read is not None
    assert read((x, value)) == [x.data_ptr(), word]
    plain = float(value) if letter in "fd" else int(value)
    assert word.to_bytes(8, "little").startswith(struct.pack("<" + letter, plain))


def test_tensor_maps_are_recognised_with_their_box() -> None:
    parameters = (Parameter("map", "T"), Parameter("y", "P"))
    x, y = torch.zeros(8, 64), torch.zeros(4)
    read = reader(adapter_of(x), parameters, (TensorMap(x, (8, 32)), y))
    assert read is not None
    assert read((TensorMap(x.clone(), (8, 32)), y)) is not None
    for other in (TensorMap(x, (8, 16)), TensorMap(x, (8, 32), 64), TensorMap(x[:4], (8, 32)), x, None):
        assert read((other, y)) is None
    assert read((TensorMap(x, np.array([8, 32])), y)) is None  # type: ignore[arg-type]
    assert signature(parameters, (TensorMap(x, (8, 32.0)), y)) is None  # type: ignore[arg-type]
