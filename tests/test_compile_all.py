"""Every kernel compiles for every architecture that it declares: no spills, no ptxas notes, registers within budget.

No GPU needed.  Every second kernel is compiled for sm_90a and every twelfth for the other architectures, and at least
one of each entry: a full round takes a quarter of an hour of processor time.  `make compile-all` is that round.
"""

from __future__ import annotations

import pytest

from cki import cache, registry
from cki.cli.compile_kernels import complaints_about
from cki.kernel import ARCHITECTURES, KernelSpec

_EVERY = {"sm_90a": 2}


def chosen(family: str, arch: str) -> list[KernelSpec]:
    """The kernels of a family that this test compiles for an architecture."""
    specs = registry.representative_specs(family, arch)
    first_of_entry = {spec.entry: spec for spec in reversed(specs)}
    return list(dict.fromkeys([*first_of_entry.values(), *specs[:: _EVERY.get(arch, 12)]]))


@pytest.mark.slow
@pytest.mark.parametrize("arch", ARCHITECTURES)
@pytest.mark.parametrize("family", registry.FAMILIES)
def test_family_compiles(family: str, arch: str) -> None:
    specs = chosen(family, arch)
    assert specs, f"{family} has no kernel for {arch}"
    failures = []
    for spec in specs:
        report = cache.get(spec, arch)[1].report
        failures += [
            f"{registry.describe(spec)}: {complaint}" for complaint in complaints_about(spec, report)
        ]
    assert not failures, "\n".join(failures)


@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_specs_state_their_kernels_exactly(arch: str) -> None:
    """params of every spec agree in number and kind with the declaration in the source."""
    from cki.signature import find_entry, parse_parameters

    for spec in registry.all_specs(arch):
        text = cache.request(spec, arch)[1]
        _, parameters = find_entry(text, spec.entry, spec.source)
        letters = "".join(p.letter for p in parse_parameters(parameters, dict(spec.constants), spec.entry))
        assert letters == spec.params, registry.describe(spec)
