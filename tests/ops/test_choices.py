"""`cki.choices()`: what is remembered of each problem, and why it was chosen."""

from __future__ import annotations

import numpy as np
import pytest

import cki
from cki.errors import InvalidArgumentError, InvalidTypeError

X = np.zeros((5, 24), np.float32)


def new(before, operation=None):
    return cki.choices(operation)[len(before) :]


def test_a_problem_is_listed_once_with_its_kernel_and_the_reason():
    with cki.device("sim"):
        before = cki.choices("softmax")
        for _ in range(3):
            cki.softmax(X[:3, :23])
        cki.softmax(X[:2, :23])
        first, second = new(before, "softmax")
    assert first.operation == "softmax" and first.tensors[0] == "x f32[3, 23]" and "sim" in first.device
    assert second.tensors[0] == "x f32[2, 23]"
    (launch,) = first.launches
    assert launch.startswith("launch softmax") and "grid=" in launch and launch.rpartition(": ")[2]
    assert str(first).startswith("softmax(x f32[3, 23]") and launch in str(first)


def test_another_device_is_another_choice():
    before = cki.choices("softmax")
    for arch in ("sm_80", "sm_90a"):
        with cki.device("sim", arch=arch):
            cki.softmax(X[:4, :22])
    devices = [choice.device for choice in new(before, "softmax")]
    assert len(devices) == len(set(devices)) == 2


def test_nothing_to_compute_and_wrong_types():
    with cki.device("sim"):
        before = cki.choices()
        cki.softmax(X[:0])
        assert new(before) == []
    with pytest.raises(InvalidTypeError, match="operation is a int, not str or None"):
        cki.choices(3)


def test_an_operation_that_is_not_there_is_refused():
    with pytest.raises(InvalidArgumentError, match=r"operation is 'soft_max'\n  hint: one of .*softmax"):
        cki.choices("soft_max")
    assert cki.choices("encoder") == [] or cki.choices("encoder")[0].operation == "encoder"
