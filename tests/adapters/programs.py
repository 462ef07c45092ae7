"""Programs in processes of their own: what a fresh interpreter, another process or a fork does."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def run_program(
    program: str | Path, *arguments: str, timeout: float = 300, **environment: str
) -> subprocess.CompletedProcess[str]:
    """Run a file, or the text of a program, with this checkout in front of its path."""
    command = [str(program)] if isinstance(program, Path) else ["-c", program]
    path = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    return subprocess.run(
        [sys.executable, *command, *arguments], capture_output=True, text=True, timeout=timeout, check=False,
        env={**os.environ, "PYTHONPATH": path, **environment},
    )  # fmt: skip


def output_of(program: str | Path, *arguments: str, **environment: str) -> str:
    """What it prints; it must end well."""
    done = run_program(program, *arguments, timeout=300, **environment)
    assert done.returncode == 0, done.stderr
    return done.stdout
