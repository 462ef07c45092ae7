"""Clean environments for the packaging tests: the built wheel, and interpreters that hold nothing but NumPy.

All works offline: the project is copied, built with the setuptools at hand, and installed without dependencies;
NumPy and ml_dtypes come as links into the running environment.
"""

from __future__ import annotations

import importlib.metadata
import os
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PACKAGED = ("cki", "adapters", "cuda_src", "pyproject.toml", "LICENSE")


def copy_project(target: Path) -> Path:
    """A copy of what a build reads, so that building leaves nothing in the checkout."""
    target.mkdir()
    for name in PACKAGED:
        source = ROOT / name
        if source.is_dir():
            shutil.copytree(
                source, target / name, ignore=shutil.ignore_patterns("__pycache__", "*.so", "*.o")
            )
        else:
            shutil.copy2(source, target / name)
    return target


def pip(*arguments: str, python: Path | None = None) -> None:
    """Runs pip offline, for another interpreter where one is given."""
    which = ["--python", str(python)] if python else []
    command = [sys.executable, "-m", "pip", "--disable-pip-version-check", *which, *arguments]
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=_environment())
    assert done.returncode == 0, done.stdout + done.stderr


def build_wheel(project: Path, target: Path) -> Path:
    """The wheel of a project copy, as `make wheel` builds and packs it."""
    pip("wheel", "--no-index", "--no-build-isolation", "--no-deps", "--wheel-dir", str(target), str(project))
    (wheel,) = target.glob("cki_runtime-*.whl")
    subprocess.run([sys.executable, str(ROOT / ".ci" / "pack_wheel.py"), str(wheel)], check=True)
    return wheel


def make_environment(target: Path, distributions: tuple[str, ...] = ("numpy", "ml_dtypes")) -> Path:
    """A virtual environment without pip that holds links to some installed distributions; returns its Python."""
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(target)], check=True)
    version = f"python{sys.version_info.major}.{sys.version_info.minor}"
    packages = target / "lib" / version / "site-packages"
    for name in distributions:
        for top in _top_levels(name):
            (packages / top.name).symlink_to(top)
    return target / "bin" / "python"


def _top_levels(name: str) -> set[Path]:
    """The files and folders that a distribution has at the top of site-packages."""
    site = Path(sysconfig.get_path("platlib")).resolve()
    files = importlib.metadata.distribution(name).files or []
    return {site / file.parts[0] for file in files if file.parts[0] not in ("..", "__pycache__")}


def run_python(python: Path, code: str, folder: Path, **variables: str) -> str:
    """What `python -c code` prints when it is run in `folder`, outside any checkout."""
    environment = _environment() | variables
    done = subprocess.run(
        [str(python), "-c", code], cwd=folder, env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def _environment() -> dict[str, str]:
    ours = ("CKI_", "PYTHON", "VIRTUAL_ENV")
    return {name: value for name, value in os.environ.items() if not name.startswith(ours)}
