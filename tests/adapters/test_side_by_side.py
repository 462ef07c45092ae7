"""TensorFlow, PyTorch and a transformers model in one process at the same time: `side_by_side` in a process of its own.

On a GPU machine with several GPUs torch's tensors and the model are on the last one.
"""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest

from tests.adapters.programs import run_program

PROGRAM = Path(__file__).with_name("side_by_side.py")
pytestmark = [pytest.mark.torch, pytest.mark.tensorflow, pytest.mark.transformers]


def run(order, rounds, **environment):
    for package in ("torch", "tensorflow", "transformers"):
        if importlib.util.find_spec(package) is None:
            pytest.skip(f"{package} is not installed")
    done = run_program(PROGRAM, order, str(rounds), **environment)
    assert (done.returncode, done.stdout) == (0, "right\n"), (
        f"ended with {done.returncode}\n{done.stderr[-8000:]}"
    )


def test_on_the_simulated_device():
    run("torch", 2, CKI_DEVICE="sim", CUDA_VISIBLE_DEVICES="")


@pytest.mark.gpu
@pytest.mark.parametrize("order", ["tensorflow", "torch"])
def test_on_gpus(order):
    run(order, 20)
