"""`python -m cki dump KERNEL --info|--source|--ptx|--sass`: what a kernel compiles to.

KERNEL is an entry name of `list-kernels`, or a family; --index picks one of several specialisations.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import shutil
import subprocess
import tempfile
from collections.abc import Sequence

from cki import background, cache, compiler, registry
from cki.errors import DeviceError, InvalidArgumentError
from cki.kernel import ARCHITECTURES, KernelSpec


def main(argv: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m cki dump", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("kernel", metavar="KERNEL")
    what = parser.add_mutually_exclusive_group(required=True)
    for flag, words in (
        ("info", "registers, spills, shared memory of all specialisations"), ("source", "the text that is compiled"),
        ("ptx", "PTX"), ("sass", "machine code; needs nvdisasm"),
    ):  # fmt: skip
        what.add_argument(f"--{flag}", action="store_const", dest="what", const=flag, help=words)
    parser.add_argument("--arch", choices=ARCHITECTURES, help="default: this machine's GPU, else sm_90a")
    parser.add_argument("--index", type=int, default=0, help="which specialisation, counted from 0")
    options = parser.parse_args(argv)
    arch = options.arch or next(iter(background.architectures()), "sm_90a")
    specs = registry.find(options.kernel, arch)
    if options.what == "info":
        for index, spec in enumerate(specs):
            print(f"{index:3} {info_line(spec, arch)}")
        return 0
    if not 0 <= options.index < len(specs):
        raise InvalidArgumentError(
            f"--index {options.index}: {options.kernel} has {len(specs)} specialisations"
        )
    spec = specs[options.index]
    print(f"// {registry.describe(spec)} for {arch}")
    print({"source": source_text, "ptx": ptx_text, "sass": sass_text}[options.what](spec, arch))
    return 0


def info_line(spec: KernelSpec, arch: str) -> str:
    """ptxas's report of a kernel in one line."""
    _, compiled = cache.get(spec, arch)
    kernel = compiled.report.kernel(spec.entry)
    notes = "".join(f"\n      {message}" for message in compiled.report.messages)
    return (
        f"{kernel.registers:3} registers, {kernel.static_shared_bytes} bytes static shared, "
        f"{kernel.spill_store_bytes}/{kernel.spill_load_bytes} bytes spilled, {len(compiled.cubin)} bytes of cubin: "
        f"{registry.describe(spec)}{notes}"
    )


def source_text(spec: KernelSpec, arch: str) -> str:
    """Prelude, headers and kernel as one text."""
    return cache.request(spec, arch)[1]


def ptx_text(spec: KernelSpec, arch: str) -> str:
    """PTX of the kernel."""
    _, text, options = cache.request(spec, arch)
    return compiler.ptx(text, spec.source, arch, options)


def sass_text(spec: KernelSpec, arch: str) -> str:
    """Machine code with the source lines it comes from."""
    tool = find_nvdisasm()
    _, compiled = cache.get(spec, arch)
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(compiled.cubin)
        file.flush()
        result = subprocess.run([tool, "-g", "-c", file.name], capture_output=True, text=True, check=False)
    if result.returncode != 0:
        raise DeviceError(f"{tool} failed: {result.stderr.strip()}", hint="nvdisasm of CUDA 13.2 or later")
    return result.stdout


def find_nvdisasm() -> str:
    """The disassembler: of the wheel nvidia-cuda-nvdisasm, else on PATH."""
    try:
        files = importlib.metadata.files("nvidia-cuda-nvdisasm") or []
    except importlib.metadata.PackageNotFoundError:
        files = []
    for file in files:
        if file.name == "nvdisasm":
            return str(file.locate())
    found = shutil.which("nvdisasm")
    if found is None:
        raise DeviceError(
            "nvdisasm was not found", hint="pip install nvidia-cuda-nvdisasm, or a CUDA toolkit on PATH"
        )
    return found
