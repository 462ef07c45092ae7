"""All kernels of the package: each operation's file names the specialisations that stand for the rest.

A family is a module of `cki.ops` with a function `representative_specs(arch) -> list[KernelSpec]`.  `list-kernels`,
`compile`, `dump` and the compile test walk over them.
"""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module

from cki.errors import InvalidArgumentError
from cki.kernel import ARCHITECTURES, KernelSpec

#: Family -> its module.
FAMILIES = {
    "norm": "cki.ops.norm",
    "attention": "cki.ops.attention_kernels",
    "varlen": "cki.ops.varlen",
    "linear": "cki.ops.linear",
    "linear_decode": "cki.ops.linear_decode",
    "encoder": "cki.ops.encoder",
    "encoder_inputs": "cki.ops.encoder_inputs",
    "embedding": "cki.ops.embedding",
    "merge": "cki.ops.merge",
    "rope": "cki.ops.rope",
    "paged": "cki.ops.paged",
    "pointwise": "cki.ops.pointwise_kernels",
    "sampling": "cki.ops.sampling",
    "gather_cache": "cki.ops.gather_cache",
}


def representative_specs(family: str, arch: str) -> list[KernelSpec]:
    """The kernels of a family for an architecture, without those that do not compile for it."""
    if family not in FAMILIES:
        raise InvalidArgumentError(
            f"there is no kernel family {family!r}", hint=f"one of {', '.join(FAMILIES)}"
        )
    if arch not in ARCHITECTURES:
        raise InvalidArgumentError(
            f"there is no architecture {arch!r}", hint=f"one of {', '.join(ARCHITECTURES)}"
        )
    specs: Callable[[str], list[KernelSpec]] = import_module(FAMILIES[family]).representative_specs
    return [spec for spec in specs(arch) if arch in spec.archs]


def all_specs(arch: str) -> dict[KernelSpec, str]:
    """Every kernel for an architecture and the family that named it first."""
    found: dict[KernelSpec, str] = {}
    for family in FAMILIES:
        for spec in representative_specs(family, arch):
            found.setdefault(spec, family)
    return found


def find(name: str, arch: str) -> list[KernelSpec]:
    """The kernels of that entry name, or of that family.  InvalidArgumentError when there is none."""
    specs = all_specs(arch)
    found = [spec for spec in specs if spec.entry == name] or [
        s for s, family in specs.items() if family == name
    ]
    if not found:
        names = sorted({spec.entry for spec in specs})
        raise InvalidArgumentError(
            f"there is no kernel {name!r} for {arch}", hint=f"one of {', '.join(names)}"
        )
    return found


def describe(spec: KernelSpec) -> str:
    """A kernel and its compile-time choices in one line."""
    return f"{spec.entry}<{', '.join(f'{name}={value}' for name, value in spec.constants)}>"
