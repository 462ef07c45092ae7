"""The README's Python blocks run, and what it says of versions is what the package says."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

import cki
from cki.device import SUPPORT_TABLE

ROOT = Path(__file__).resolve().parents[2]
README = (ROOT / "README.md").read_text(encoding="utf-8")
BLOCKS = re.findall(r"^```python\n(.*?)^```", README, re.MULTILINE | re.DOTALL)
FRAMEWORKS = ("numpy", "cupy", "torch", "tensorflow", "jax")


def framework_of(block: str) -> str:
    """The framework that a block shows: what it imports first."""
    return re.search(r"^import (\w+)", block).group(1)


def _cases():
    for number, block in enumerate(BLOCKS, 1):
        framework = framework_of(block)
        marks = [getattr(pytest.mark, framework)] if framework in ("torch", "tensorflow", "jax") else []
        if framework != "cupy":
            yield pytest.param(block, "sim", id=f"{number}-{framework}-sim", marks=marks)
        if framework != "numpy":
            yield pytest.param(
                block, "cuda", id=f"{number}-{framework}-cuda", marks=[*marks, pytest.mark.gpu]
            )


@pytest.mark.parametrize(("block", "kind"), list(_cases()))
def test_block_runs(block, kind, tmp_path):
    framework = pytest.importorskip(framework_of(block)).__name__
    if kind == "sim":
        block = block.replace('device="cuda"', 'device="cpu"')
        if framework != "jax":  # whose calls may keep a process from ending
            with cki.device("sim"):
                exec(block, {})
            return
    paths = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH", "")]))
    environment = {**os.environ, "PYTHONPATH": paths, "CKI_DEVICE": kind, "TF_CPP_MIN_LOG_LEVEL": "3"}
    if kind == "sim":
        environment["CUDA_VISIBLE_DEVICES"] = ""
    done = subprocess.run(
        [sys.executable, "-c", block],
        cwd=tmp_path,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
        timeout=300,  # a process that does not end at its end
    )
    assert done.returncode == 0, done.stderr


def test_every_framework_is_shown():
    assert [framework_of(block) for block in BLOCKS[: len(FRAMEWORKS)]] == list(FRAMEWORKS)
    assert any("cki.load(" in block for block in BLOCKS)


def test_two_commands_come_first():
    commands = re.findall(r"^    make (\w+)", README, re.MULTILINE)
    assert commands[:2] == ["demo", "test"]


def test_support_table_is_the_packages():
    for line in SUPPORT_TABLE.splitlines()[1:7]:
        gpu, capability, arch, driver = re.split(r"\s{2,}", line)[:4]
        number = driver.split()[0]
        row = next((row for row in README.splitlines() if row.startswith(f"| {gpu} |")), None)
        assert row is not None, gpu
        assert [cell.strip() for cell in row.split("|")[2:4]] == [capability, arch]
        assert row.split("|")[4].split()[0] == number


def test_links_lead_somewhere():
    targets = re.findall(r"\]\(([^)#:]+)\)", README)
    assert targets
    assert not [target for target in targets if not (ROOT / target).exists()]


def test_version_is_stated_once():
    (declared,) = re.findall(r'^version = "(.*)"', (ROOT / "pyproject.toml").read_text(), re.MULTILINE)
    assert declared == cki.__version__
