"""`python -m cki list-kernels [FAMILY]`: the kernels that stand for all, with their compile-time choices."""

from __future__ import annotations

import argparse
from collections.abc import Sequence

from cki import registry
from cki.kernel import ARCHITECTURES


def main(argv: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m cki list-kernels", description=__doc__)
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
