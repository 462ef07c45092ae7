"""The wheel and an editable install hold all of CKI, and run a kernel far from the checkout."""

from __future__ import annotations

import email
import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from tests.packaging.environments import (
    ROOT,
    build_wheel,
    copy_project,
    make_environment,
    pip,
    run_python,
)

DEVICE_SUFFIXES = {".cu", ".cuh", ".h", ".cpp", ".S"}
FRAMEWORKS = ("cupy", "torch", "tensorflow", "keras", "jax", "transformers", "numba", "pycuda")

#: The cache of the whole test run.  Its keys are the device sources' contents: what was built from the checkout serves
#: an installed copy exactly when that copy holds the same files.
CACHE = os.environ["CKI_CACHE_DIR"]

RUN_A_KERNEL = """
import numpy as np
import cki
x = np.random.default_rng(0).normal(size=(5, 96)).astype(np.float32)
with cki.device("sim"):
    y = cki.layer_norm(x)
expected = (x - x.mean(-1, keepdims=True)) / np.sqrt(x.var(-1, keepdims=True) + 1e-5)
assert isinstance(y, np.ndarray)
assert np.abs(y - expected).max() < 1e-5, np.abs(y - expected).max()
print(cki.__file__)
"""


@pytest.fixture(scope="module")
def wheel(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("wheel")
    return build_wheel(copy_project(folder / "project"), folder)


@pytest.fixture(scope="module")
def contents(wheel) -> dict[str, zipfile.ZipInfo]:
    with zipfile.ZipFile(wheel) as archive:
        return {entry.filename: entry for entry in archive.infolist()}


def test_wheel_is_pure_and_under_a_megabyte(wheel):
    assert wheel.name.endswith("-py3-none-any.whl")
    assert wheel.stat().st_size < 1_000_000


def test_wheel_holds_every_module(contents):
    expected = {path.relative_to(ROOT).as_posix() for path in (ROOT / "cki").rglob("*.py")}
    for name in ("adapters", "cuda_src"):
        expected |= {f"cki/{path.relative_to(ROOT).as_posix()}" for path in (ROOT / name).glob("*.py")}
    missing = expected - contents.keys()
    assert not missing, f"add the packages of these to [tool.setuptools] packages: {sorted(missing)}"
    assert "cki/py.typed" in contents


def test_wheel_holds_all_device_code(contents):
    expected = {
        f"cki/{path.relative_to(ROOT).as_posix()}"
        for path in (ROOT / "cuda_src").rglob("*")
        if path.suffix in DEVICE_SUFFIXES
    }
    assert expected, "the checkout holds device code"
    assert not expected - contents.keys()


def test_wheel_installs_nothing_but_cki(contents):
    assert {name.split("/")[0] for name in contents} == {"cki", "cki_runtime-0.1.0.dist-info"}


def test_metadata(wheel):
    with zipfile.ZipFile(wheel) as archive:
        metadata = email.message_from_bytes(archive.read("cki_runtime-0.1.0.dist-info/METADATA"))
    required = [line for line in metadata.get_all("Requires-Dist", []) if "extra ==" not in line]
    assert sorted(line.split(">")[0] for line in required) == ["ml_dtypes", "numpy"]
    assert {"cuda12", "cuda13", "demo", "test", "lint"} <= set(metadata.get_all("Provides-Extra", []))
    assert metadata["License-Expression"] == "MIT"


@pytest.fixture(scope="module")
def installed(wheel, tmp_path_factory) -> Path:
    """A clean interpreter with NumPy, ml_dtypes and the wheel."""
    python = make_environment(tmp_path_factory.mktemp("clean") / "venv")
    pip("install", "--no-index", "--no-deps", str(wheel), python=python)
    return python


def test_wheel_runs_a_kernel_in_a_clean_environment(installed, tmp_path):
    where = run_python(installed, RUN_A_KERNEL, tmp_path, CKI_CACHE_DIR=CACHE)
    assert Path(where.strip()).is_relative_to(installed.parents[1])


def test_import_needs_and_imports_no_framework(installed, tmp_path):
    code = "import sys, cki, cki.adapters, cki.cuda_src; print(*sys.modules)"
    loaded = {name.split(".")[0] for name in run_python(installed, code, tmp_path).split()}
    assert not loaded & set(FRAMEWORKS)


def test_import_leaves_installed_frameworks_alone(tmp_path):
    """In the test environment, where frameworks are installed, `import cki` loads none of them."""
    code = f"import sys; sys.path.insert(0, {str(ROOT)!r}); import cki; print(*sys.modules)"
    loaded = {name.split(".")[0] for name in run_python(Path(sys.executable), code, tmp_path).split()}
    assert not loaded & (set(FRAMEWORKS) - {"cupy"})


def test_command_line_is_installed(installed, tmp_path):
    done = subprocess.run(
        [str(installed.parent / "cki"), "list-kernels"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert "layer_norm" in done.stdout


def test_editable_install_finds_adapters_and_device_code(tmp_path):
    project = copy_project(tmp_path / "project")
    python = make_environment(tmp_path / "venv", ("numpy", "ml_dtypes", "setuptools"))
    pip(
        "install",
        "--no-index",
        "--no-deps",
        "--no-build-isolation",
        "--editable",
        str(project),
        python=python,
    )
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    code = "import cki, cki.adapters, cki.cuda_src; print(cki.adapters.__path__[0]); print(cki.cuda_src.__path__[0])"
    adapters, cuda_src = run_python(python, code, elsewhere).split()
    assert Path(adapters) == project / "adapters"
    assert Path(cuda_src) == project / "cuda_src"
    run_python(python, RUN_A_KERNEL, elsewhere, CKI_CACHE_DIR=CACHE)
