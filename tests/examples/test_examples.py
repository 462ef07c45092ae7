"""Every example runs, and what it computes agrees with the framework it computes beside."""

from __future__ import annotations

import importlib.util
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
EXAMPLES = sorted((ROOT / "examples").glob("*.py"))

#: Largest difference allowed, for the dtype each example uses: what two sound kernels may differ by.
BOUNDS = {"use_with_torch": 0.07, "use_with_cupy": 5e-3, "keras_encoder": 1e-2}
NEEDS = {
    "use_with_torch": "torch", "use_with_transformers": "transformers", "use_with_tensorflow": "tensorflow",
    "use_with_jax": "jax", "keras_encoder": "tensorflow", "use_with_pycuda": "pycuda",
}  # fmt: skip
GPU_ONLY = {"use_with_cupy", "use_with_pycuda"}


def _cases():
    for path in EXAMPLES:
        marks = []
        if path.stem not in GPU_ONLY:
            marks = [getattr(pytest.mark, NEEDS[path.stem])] if path.stem in NEEDS else []
            yield pytest.param(path, "sim", id=f"{path.stem}-sim", marks=marks)
        if path.stem != "use_with_numpy":
            yield pytest.param(path, "cuda", id=f"{path.stem}-cuda", marks=[*marks, pytest.mark.gpu])


@pytest.mark.parametrize(("path", "kind"), list(_cases()))
def test_example(path, kind, tmp_path):
    framework = NEEDS.get(path.stem)
    if framework and importlib.util.find_spec(framework) is None:
        pytest.skip(f"{framework} is not installed")
    # With CUDA_VISIBLE_DEVICES empty an example takes its CPU way, also on a machine with a GPU.
    hidden = {"CUDA_VISIBLE_DEVICES": ""} if kind == "sim" else {}
    paths = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH", "")]))
    environment = {**os.environ, **hidden, "PYTHONPATH": paths, "TF_CPP_MIN_LOG_LEVEL": "3"}
    done = subprocess.run(
        [sys.executable, str(path)],
        cwd=tmp_path,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    differences = [
        float(value) for value in re.findall(r"largest difference\s+([-+.\deE]+|nan|inf)", done.stdout)
    ]
    if path.stem.startswith("use_with"):
        assert differences, done.stdout
    for difference in differences:
        assert difference <= BOUNDS.get(path.stem, 1e-4), done.stdout


@pytest.mark.parametrize("name", sorted(GPU_ONLY))
def test_what_a_gpu_example_lacks_is_said_in_a_line(name, tmp_path):
    done = subprocess.run(
        [sys.executable, str(ROOT / "examples" / f"{name}.py")],
        cwd=tmp_path,
        env={**os.environ, "CUDA_VISIBLE_DEVICES": "", "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 1
    assert done.stderr.startswith("this example needs ") and done.stderr.count("\n") == 1


def test_each_framework_has_an_example():
    names = {path.stem.removeprefix("use_with_") for path in EXAMPLES}
    assert {"numpy", "cupy", "pycuda", "torch", "transformers", "tensorflow", "jax"} <= names
