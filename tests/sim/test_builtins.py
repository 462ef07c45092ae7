"""CUDA's built-ins outside of warps and barriers: integers, floats, indices, atomics, variables, shared addresses."""

from __future__ import annotations

import math

import numpy as np
import pytest

from cki.sim import Checks
from tests.sim.harness import kernel, report, run

FILE = "builtins.cu"
M32 = 0xFFFFFFFF


def test_integer_functions():
    x = 0x12345670
    u = np.zeros(64, np.uint32)
    run(kernel(FILE, "integers"), 1, 1, u, x)
    signed_product = (-5 * x) >> 32
    dp4a = 7 + 1 * 3 + (-1) * 4 + 2 * 5 + (-2) * 6
    expected = [
        bin(x).count("1"), 3, 32, 5, 0, int(f"{x:032b}"[::-1], 2), (x * 0x87654321) >> 32, signed_product & M32,
        (x >> 24 | 0xA5A5A5A5 << 8) & M32, (x >> 8 | 0xA5A5A5A5 << 24) & M32, 0x76321256, 0x00000000,
        dp4a & M32, 2 + 5, 2 + 4 * 16, -2 & M32, -3 & M32, 3, 0x7FFFFFFF, 0, 0x3F800000, 16 + 256 * 16, 8 + 256 * 8,
        12 + 256 * 4, 4321,
    ]  # fmt: skip
    assert u[: len(expected)].tolist() == expected


def test_float_functions():
    x = 1.25
    f = np.zeros(32, np.float32)
    run(kernel(FILE, "floats"), 1, 1, f, x)
    expected = [
        1 / math.sqrt(x), math.erf(x), math.tanh(x), math.exp(x), math.log(x), 2**x, math.log2(x), 1 / x, 1.0, 0.0,
        x * x - 1, math.pi, x, x * x - 1, 0.5 * (1 + math.erf(x / math.sqrt(2))),
    ]  # fmt: skip
    np.testing.assert_allclose(f[: len(expected)], expected, rtol=3e-7)


def test_indices_in_three_dimensions():
    u = np.zeros(2 * 3 * 2 * 24, np.uint32)
    run(kernel(FILE, "indices"), (2, 3, 2), (4, 3, 2), u)
    expected = [
        b << 16 | z << 8 | y << 4 | x for b in range(12) for z in range(2) for y in range(3) for x in range(4)
    ]
    assert u.tolist() == expected


@pytest.mark.parametrize(
    "checks", [Checks(), *(Checks(adversarial=True, seed=s) for s in range(3)), Checks.all(1)]
)
def test_atomics_of_many_blocks(checks):
    n = 8 * 64
    i = np.array([0, 0, -1000, 1000], np.int32)
    u = np.array([M32, 0, 0, 0, 0, 0], np.uint32)
    f = np.zeros(1, np.float32)
    q = np.zeros(1, np.uint64)
    run(kernel(FILE, "atomics"), 8, 64, i, u, f, q, checks=checks)
    assert i.tolist() == [n, -2 * n, n - 101, 101 - n]
    assert u.tolist() == [0, M32, int(np.bitwise_xor.reduce(np.arange(n))), n % 10, 0, n]
    assert f[0] == n / 2
    assert q[0] == n << 32


def test_device_and_constant_variables():
    f = np.zeros(1, np.float32)
    run(kernel(FILE, "variables"), 1, 1, f, np.array([0.5], np.float32), checks=Checks(bounds=True))
    assert f[0] == 8.5


def test_assert_and_trap():
    built = kernel(FILE, "asserts")
    run(built, 1, 1, 1)
    assert "assertion failed: n == 1 at builtins.cu" in report(built, 1, 1, 3, checks=Checks())


def test_shared_layout():
    u = np.zeros(4, np.uint32)
    run(kernel(FILE, "shared_layout"), 1, 32, u, smem=64, checks=Checks.all())
    assert u[0] % 1024 == 0
    assert u[0] >= 1024  # the first KB is the system's
    assert u[1:].tolist() == [0, 0, 5]
