"""`python -m cki cache info|clear`: the compiled kernels on disk."""

from __future__ import annotations

import argparse
import contextlib
import shutil
from collections.abc import Sequence
from pathlib import Path

from cki import config
from cki.disk import KernelDirectory, decode


def main(argv: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m cki cache", description=__doc__)
    parser.add_argument("action", choices=("info", "clear"))
    action = parser.parse_args(argv).action
    path = config.cache_dir()
    if action == "clear":
        count = KernelDirectory(path).clear()
        built, _ = _simulated_builds(path)
        shutil.rmtree(Path(path) / "sim", ignore_errors=True)
        print(f"deleted {count} kernels and {built} builds of the simulated device from {path}")
        return 0
    print(describe_directory(path))
    built, size = _simulated_builds(path)
    if built:
        print(f"{Path(path) / 'sim'}: {built} builds of the simulated device, {size / 1e6:.1f} MB")
    prebuilt = config.text("CKI_CUBIN_DIR")
    if prebuilt:
        print(f"prebuilt: {describe_directory(prebuilt)}")
    return 0


def _simulated_builds(path: str) -> tuple[int, int]:
    """Shared objects of the simulated device in a cache, and the bytes of all that it keeps there."""
    built = size = 0
    for file in (Path(path) / "sim").rglob("*"):
        with contextlib.suppress(OSError):  # gone: another process builds
            size += file.stat().st_size if file.is_file() else 0
            built += file.suffix == ".so"
    return built, size


def describe_directory(path: str) -> str:
    """A directory of kernels in one line: how many, how large, for which architectures, how many damaged."""
    directory = KernelDirectory(path)
    files = directory.entries()
    archs: dict[str, int] = {}
    damaged = 0
    for file in files:
        try:
            compiled = decode(file.read_bytes())
        except OSError:
            compiled = None
        if compiled is None:
            damaged += 1
        else:
            archs[compiled.report.arch] = archs.get(compiled.report.arch, 0) + 1
    size = sum(file.stat().st_size for file in files)
    parts = [f"{count} for {arch}" for arch, count in sorted(archs.items())]
    parts += [f"{damaged} damaged (compiled anew when needed)"] if damaged else []
    return f"{path}: {len(files)} kernels, {size / 1e6:.1f} MB" + (f" ({', '.join(parts)})" if parts else "")
