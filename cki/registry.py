"""All kernels of the package: each operation's file names the specialisations that stand for the rest.

A family is modules of `cki.ops` with a function `representative_specs(arch) -> list[KernelSpec]`.  `list-kernels`,
`compile`, `dump` and the compile test walk over them.
"""

from __future__ import annotations

from importlib import import_module

from cki.errors import InvalidArgumentError
from cki.kernel import ARCHITECTURES, KernelSpec

#: Family -> its modules.
FAMILIES = {
    "norm": ("norm",), "attention": ("attention_kernels",), "varlen": ("varlen",), "linear": ("linear",),
    "linear_decode": ("linear_decode",), "encoder": ("encoder",), "encoder_inputs": ("encoder_inputs",),
    "embedding": ("embedding",), "merge": ("merge",), "rope": ("rope",), "paged": ("paged",),
    "pointwise": ("pointwise", "pointwise_softmax", "pointwise_quantize", "pointwise_dropout", "norm_quantize"),
    "sampling": ("sampling",), "gather_cache": ("gather_cache",),
}  # fmt: skip


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
    modules = [import_module(f"cki.ops.{name}") for name in FAMILIES[family]]
    return [spec for module in modules for spec in module.representative_specs(arch) if arch in spec.archs]


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
