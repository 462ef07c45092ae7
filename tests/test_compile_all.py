"""Every kernel compiles for every architecture that it declares: no spills, no ptxas notes, registers within budget.

No GPU needed.  The kernels go to the tests' own cache, so a second run is quick.
"""

from __future__ import annotations

import pytest

from cki import cache, registry
from cki.cli.compile_kernels import complaints_about
from cki.kernel import ARCHITECTURES


@pytest.mark.slow
@pytest.mark.parametrize("arch", ARCHITECTURES)
@pytest.mark.parametrize("family", registry.FAMILIES)
def test_family_compiles(family: str, arch: str) -> None:
    specs = registry.representative_specs(family, arch)
    assert specs, f"{family} has no kernel for {arch}"
    failures = []
    for spec in specs:
        report = cache.get(spec, arch)[1].report
        failures += [f"{registry.describe(spec)}: {complaint}" for complaint in complaints_about(spec, report)]
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
