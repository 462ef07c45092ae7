"""Every kernel compiles for every architecture that it declares: no spills, no ptxas notes, registers within budget.

No GPU needed.  Of each entry every fourth kernel is compiled for sm_90a and every twelfth for the other architectures:
a full round takes a quarter of an hour of processor time.  `make compile-all` is that round.  The heaviest kernels come
first, so that those which are nearest to a spill are always among them.
"""

from __future__ import annotations

import functools

import pytest

from cki import cache, registry
from cki._checkout import cuda_src
from cki.cli.compile_kernels import complaints_about
from cki.dtypes import DType
from cki.kernel import ARCHITECTURES, KernelSpec

_EVERY = {"sm_90a": 4}
#: Families that take long, in parts for two processes.
_PARTS = {"attention": 2, "linear": 2}
FAMILY_PARTS = [(family, part) for family in registry.FAMILIES for part in range(_PARTS.get(family, 1))]


def weight(spec: KernelSpec) -> tuple[int, int]:
    """Which of an entry's kernels needs more registers: wide rows of large types, then how many features are on."""
    constants = [value for _, value in spec.constants]
    types = sum(value.itemsize for value in constants if isinstance(value, DType))
    widest = max((value for value in constants if type(value) is int), default=0)
    return max(types, 1) * widest, sum(value is True for value in constants)


def chosen(family: str, arch: str) -> list[KernelSpec]:
    """The kernels of a family that this test compiles for an architecture."""
    of_entry: dict[str, list[KernelSpec]] = {}
    for spec in registry.representative_specs(family, arch):
        of_entry.setdefault(spec.entry, []).append(spec)
    ordered = [sorted(specs, key=weight, reverse=True) for specs in of_entry.values()]
    return [spec for specs in ordered for spec in specs[:: _EVERY.get(arch, 12)]]


@pytest.mark.slow
@pytest.mark.parametrize("arch", ARCHITECTURES)
@pytest.mark.parametrize(("family", "part"), FAMILY_PARTS)
def test_family_compiles(family: str, part: int, arch: str) -> None:
    specs = chosen(family, arch)[part :: _PARTS.get(family, 1)]
    assert specs, f"{family} has no kernel for {arch}"
    failures = []
    for spec in specs:
        report = cache.get(spec, arch)[1].report
        failures += [
            f"{registry.describe(spec)}: {complaint}" for complaint in complaints_about(spec, report)
        ]
    assert not failures, "\n".join(failures)


@pytest.mark.parametrize("family", ["attention", "varlen"])
def test_the_kernel_nearest_to_a_spill_is_compiled_for_every_architecture(family: str) -> None:
    """fp32 rows of 256 columns with every feature: the registers of the generic kernel are full."""
    for arch in ARCHITECTURES:
        heavy = next(dict(spec.constants) for spec in chosen(family, arch) if spec.entry == "attention")
        assert (heavy["kHeadDim"], heavy["Element"].name, heavy["kSoftcap"]) == (256, "f32", True), arch


def test_specs_state_their_kernels_exactly() -> None:
    """params of every spec agree in number and kind with the declaration in the source."""
    from cki.signature import find_entry, parse_parameters

    @functools.cache
    def declared(path: str, entry: str) -> str:
        return find_entry((cuda_src() / path).read_text(encoding="utf-8"), entry, path)[1]

    for spec in {spec for arch in ARCHITECTURES for spec in registry.all_specs(arch)}:
        parameters = declared(spec.source, spec.entry)
        letters = "".join(p.letter for p in parse_parameters(parameters, dict(spec.constants), spec.entry))
        assert letters == spec.params, registry.describe(spec)
