"""`python -m cki show-config`: settings, what was found on this machine, and what is supported."""

from __future__ import annotations

import argparse
import importlib.metadata
import os
import platform
import textwrap
from collections.abc import Sequence

from cki import compiler, config
from cki.cli.kernel_cache import describe_directory
from cki.device import ARCH_OF_CAPABILITY, SUPPORT_TABLE
from cki.errors import CompileError, InvalidArgumentError
from cki.nvml import survey, visible_gpus
from cki.sim import toolchain


def main(argv: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m cki show-config", description=__doc__)
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
