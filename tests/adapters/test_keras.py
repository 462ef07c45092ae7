"""Keras 3 layers on each of Keras's backends: `keras_checks` in a process for each."""

from __future__ import annotations

import importlib.util
import os
from pathlib import Path

import pytest

from tests.adapters.programs import run_program

CHECKS = Path(__file__).with_name("keras_checks.py")
NAMES = [
    line.removeprefix("def check_").partition("(")[0]
    for line in CHECKS.read_text().splitlines()
    if line.startswith("def check_")
]


#: What does not depend on the backend is checked on one.
FOR_JAX = [name for name in NAMES if name not in ("grouped_queries_without_biases", "refusals")]


def check(backend, directory, device="sim", names=NAMES):
    """Run the program; every check must hold."""
    for package in ("keras", backend):
        if importlib.util.find_spec(package) is None:
            pytest.skip(f"{package} is not installed")
    environment = {
        "KERAS_BACKEND": backend, "CKI_DEVICE": device, "TF_CPP_MIN_LOG_LEVEL": "3",
        # Like the kernels of the simulated device, XLA's programs are kept from run to run.
        "JAX_COMPILATION_CACHE_DIR": os.path.join(os.environ["CKI_CACHE_DIR"], "jax"),
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0", "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES": "-1",
        **({"CUDA_VISIBLE_DEVICES": ""} if device == "sim" else {}),
    }  # fmt: skip
    done = run_program(CHECKS, str(directory), *names, timeout=900, **environment)
    assert done.returncode == 0, done.stderr
    failures = [part.partition("end ")[0] for part in done.stdout.split("failed ")[1:]]
    assert not failures, "\n".join(failures)
    assert {line.split()[1] for line in done.stdout.splitlines() if line.startswith("ok ")} == set(names)


@pytest.mark.torch
@pytest.mark.tensorflow
def test_on_torch_and_tensorflow(tmp_path):
    """The second program also loads the first one's model."""
    check("torch", tmp_path)
    for file in ("torch.keras", "torch.npy"):
        assert (tmp_path / file).exists()
    check("tensorflow", tmp_path)


@pytest.mark.jax
def test_on_jax(tmp_path):
    check("jax", tmp_path, names=FOR_JAX)


@pytest.mark.gpu
@pytest.mark.parametrize(
    "backend",
    [pytest.param(name, marks=getattr(pytest.mark, name)) for name in ("torch", "tensorflow", "jax")],
)
def test_on_a_gpu(backend, tmp_path):
    check(backend, tmp_path, device="cuda")
