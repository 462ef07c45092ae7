"""`python -m cki show-config`, `list-kernels` and `cache`: what CKI sees, what it has, and what it keeps on disk."""

from __future__ import annotations

import argparse
import contextlib
import importlib.metadata
import os
import platform
import shutil
import textwrap
from collections.abc import Sequence
from pathlib import Path

from cki import compiler, config, registry
from cki.device import ARCH_OF_CAPABILITY, SUPPORT_TABLE
from cki.disk import KernelDirectory, decode
from cki.errors import CompileError, InvalidArgumentError
from cki.kernel import ARCHITECTURES
from cki.nvml import survey, visible_gpus
from cki.sim import toolchain


def show_config(argv: Sequence[str]) -> int:
    """Settings, what was found on this machine, and what is supported."""
    parser = argparse.ArgumentParser(prog="python -m cki show-config", description=show_config.__doc__)
    parser.parse_args(argv)
    print(settings_table())
    print()
    for name, value in found().items():
        print(f"{name:<16}{value}")
    print()
    print(SUPPORT_TABLE)
    return 0


def settings_table() -> str:
    """Every CKI_* variable: value, where it comes from, meaning.  A bad value is shown with what is expected."""
    lines = []
    for setting in config.SETTINGS:
        try:
            value, problem = config.text(setting.name), ""
        except InvalidArgumentError:
            value, problem = os.environ[setting.name], f"  <- not valid: {setting.expected}"
        origin = "set" if setting.name in os.environ else "default"
        lines.append(f"{setting.name:<16}{value!r} ({origin}){problem}")
        lines += textwrap.wrap(setting.meaning, 100, initial_indent=" " * 16, subsequent_indent=" " * 16)
    lines += [f"{name:<16}is set, but CKI has no such variable" for name in config.unknown_names()]
    return "\n".join(lines)


def found() -> dict[str, str]:
    """What this machine has."""
    seen = survey()
    gpus = [
        f"{gpu.name} ({gpu.capability[0]}.{gpu.capability[1]}, {ARCH_OF_CAPABILITY.get(gpu.capability, 'no kernels')})"
        for gpu in visible_gpus()
    ]
    driver = f"{seen.driver}, CUDA {seen.cuda_version[0]}.{seen.cuda_version[1]}" if seen.driver else "none"
    return {
        "cki": f"{importlib.import_module('cki').__version__}, Python {platform.python_version()}",
        "GPUs": "; ".join(gpus) or "none",
        "driver": driver,
        "NVRTC": compiler.fingerprint() or f"none: {compiler.INSTALL_HINT}",
        "CUDA headers": ", ".join(compiler.cuda_include_dirs())
        or "none (only users' own kernels may need them)",
        "host compiler": _host_compiler(),
        "cache": describe_directory(config.cache_dir()),
        **{name: _version(name) for name in ("cupy", "cuda-bindings", "numpy", "torch", "tensorflow", "jax")},
    }


def _host_compiler() -> str:
    try:
        return toolchain.find_compiler().command
    except CompileError as error:
        return str(error).replace("\n", "\n" + " " * 16)


def _version(name: str) -> str:
    names = {"cupy": ("cupy-cuda13x", "cupy-cuda12x", "cupy"), "tensorflow": ("tensorflow", "tensorflow-cpu")}
    for distribution in names.get(name, (name,)):
        try:
            return f"{importlib.metadata.version(distribution)} ({distribution})"
        except importlib.metadata.PackageNotFoundError:
            continue
    return "none"


def cache(argv: Sequence[str]) -> int:
    """`info` or `clear`: the compiled kernels on disk."""
    parser = argparse.ArgumentParser(prog="python -m cki cache", description=cache.__doc__)
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


def list_kernels(argv: Sequence[str]) -> int:
    """The kernels that stand for all, with their compile-time choices."""
    parser = argparse.ArgumentParser(prog="python -m cki list-kernels", description=list_kernels.__doc__)
    parser.add_argument("family", nargs="?", choices=sorted(registry.FAMILIES), help="default: all")
    parser.add_argument("--arch", default="sm_90a", choices=ARCHITECTURES, help="default sm_90a")
    options = parser.parse_args(argv)
    families = [options.family] if options.family else list(registry.FAMILIES)
    for family in families:
        specs = registry.representative_specs(family, options.arch)
        print(f"{family}: {len(specs)} kernels for {options.arch}")
        for spec in specs:
            print(f"  {registry.describe(spec)}  [{spec.source}; {', '.join(spec.archs)}]")
    return 0
