"""Keras 3 layers on each of Keras's backends: `keras_checks` in a process for each."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest

CHECKS = Path(__file__).with_name("keras_checks.py")
ROOT = CHECKS.parents[2]
NAMES = [
    line.removeprefix("def check_").partition("(")[0]
    for line in CHECKS.read_text().splitlines()
    if line.startswith("def check_")
]


def run(backend, directory, *names):
    """What the program prints for these checks, all without names."""
    for package in ("keras", backend):
        if importlib.util.find_spec(package) is None:
            pytest.skip(f"{package} is not installed")
    environment = {
        **os.environ, "KERAS_BACKEND": backend, "CKI_DEVICE": "sim", "TF_CPP_MIN_LOG_LEVEL": "3",
        "PYTHONPATH": os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH", "")])),
        "CUDA_VISIBLE_DEVICES": "",
    }  # fmt: skip
    command = [sys.executable, str(CHECKS), str(directory), *names]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr
    return done.stdout


def require(printed, names):
    failures = [part.partition("end ")[0] for part in printed.split("failed ")[1:]]
    assert not failures, "\n".join(failures)
    assert {line.split()[1] for line in printed.splitlines() if line.startswith("ok ")} == set(names)


@pytest.mark.parametrize(
    "backend",
    [pytest.param(name, marks=getattr(pytest.mark, name)) for name in ("torch", "tensorflow", "jax")],
)
def test_on_backend(backend, tmp_path):
    require(run(backend, tmp_path), NAMES)


@pytest.mark.tensorflow
@pytest.mark.torch
def test_a_saved_model_moves_between_backends(tmp_path):
    run("torch", tmp_path, "save_load_and_predict")
    (tmp_path / "torch.keras").rename(tmp_path / "moved.keras")
    (tmp_path / "torch.npy").rename(tmp_path / "moved.npy")
    require(run("tensorflow", tmp_path, "models_in_the_directory"), ["models_in_the_directory"])
    assert len(list(tmp_path.glob("*.keras"))) == 1
