"""The Makefile's help, the CI script, and the scripts that make calls before anything is installed."""

from __future__ import annotations

import importlib.util
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


def script(name: str):
    spec = importlib.util.spec_from_file_location(name, ROOT / ".ci" / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_make_shows_its_targets():
    shown = subprocess.run(
        ["make", "-C", str(ROOT), "--no-print-directory"], capture_output=True, text=True, check=True
    )
    targets = [line.split()[1] for line in shown.stdout.splitlines()]
    wanted = [
        "demo", "demo-llm", "test", "test-old-tensorflow", "test-gpu", "bench", "compile-all", "wheel", "lint",
        "format", "clean",
    ]  # fmt: skip
    assert [target for target in targets if target != "help"] == wanted


@pytest.mark.parametrize("target", ["demo", "demo-llm", "test", "lint", "compile-all"])
def test_targets_make_their_environment(target, tmp_path):
    """From nothing, the first steps check Python, make the environment and install the package into it."""
    command = ["make", "-C", str(ROOT), "-n", target, f"VENV={tmp_path / 'venv'}"]
    planned = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    steps = ["check_python.py", "-m venv", "install --quiet --editable .", str(tmp_path / "venv/bin")]
    places = [planned.index(step) for step in steps[:3]]
    assert places == sorted(places)
    assert steps[3] in planned


@pytest.mark.parametrize("target", ["test-gpu", "bench"])
def test_gpu_targets_install_nothing(target):
    command = ["make", "-C", str(ROOT), "-n", target, "GPU_PYTHON=some-python"]
    planned = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    assert "some-python" in planned
    assert "pip" not in planned


def test_the_versions_of_python_are_the_same_everywhere():
    package = (ROOT / "pyproject.toml").read_text()
    oldest, newest = re.search(r'^requires-python = ">=3\.(\d+),<3\.(\d+)"', package, re.MULTILINE).groups()
    words = f"3.{oldest} to 3.{int(newest) - 1}"
    for name in ("README.md", "Makefile", ".ci/check_python.py"):
        assert words in (ROOT / name).read_text(), f"{name} does not say {words}"
    checked = f"OLDEST, NEWEST = (3, {oldest}), (3, {int(newest) - 1})"
    assert checked in (ROOT / ".ci" / "check_python.py").read_text()


def test_ci_runs_lint_and_tests():
    text = (ROOT / ".ci" / "run").read_text()
    assert "make lint\nmake test\n" in text
    assert "set -euo pipefail" in text


@pytest.mark.parametrize(
    ("version", "extra"),
    [(0, ""), (11080, ""), (12000, ",cuda12"), (12090, ",cuda12"), (13000, ",cuda13"), (13010, ",cuda13")],
)
def test_extra_for_a_driver(version, extra):
    assert script("cuda_extra").extra(version) == extra


def test_no_driver_means_no_extra(monkeypatch):
    module = script("cuda_extra")

    def missing(name):
        raise OSError(name)

    monkeypatch.setattr(module.ctypes, "CDLL", missing)
    assert module.driver_version() == 0


@pytest.mark.parametrize("version", [(3, 9), (3, 14), (2, 7)])
def test_other_pythons_are_refused_by_name(version, monkeypatch):
    monkeypatch.setattr(sys, "version_info", (*version, 0, "final", 0))
    with pytest.raises(SystemExit, match=r"CKI needs Python 3\.10 to 3\.13; .* is {}\.{}".format(*version)):
        script("check_python")


def test_this_python_is_fine():
    script("check_python")
