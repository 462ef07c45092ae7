"""The example in docs/simulated_device.md runs, and its fault is reported as the page says."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pytest

from cki import sim
from tests.sim.harness import run

PAGE = (Path(__file__).parents[2] / "docs" / "simulated_device.md").read_text()


def test_example_and_its_report():
    names: dict[str, object] = {}
    for block in re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL):
        exec(block, names)
    x = names["x"]
    assert isinstance(x, np.ndarray)
    assert np.array_equal(names["y"], x[::-1])
    (promised,) = re.findall(r"^RACE .*$", PAGE, re.MULTILINE)
    source = str(names["source"])
    assert "__syncthreads();" in source
    faulty = sim.compile_kernel(source.replace("__syncthreads();", ""), "reverse")
    with pytest.raises(sim.SimulationError) as error:
        run(faulty, 1, 64, x, np.empty_like(x), checks=sim.Checks(races=True))
    assert promised in str(error.value)
