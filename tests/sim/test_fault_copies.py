"""Small kernels around copies, barriers and products: each planted fault is reported, the sound versions are clean."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest

import cki
from cki import sim
from cki.errors import SimulationError
from cki.loader import TensorMap

KERNELS = Path(__file__).parent / "kernels" / "small_faults.cu"


def gemm(entry: str, fault: int) -> None:
    """A 64x64x64 product; raises when it is wrong."""
    rng = np.random.default_rng(0)
    a, b = (rng.standard_normal((64, 64)).astype(ml_dtypes.bfloat16) for _ in range(2))
    c = np.full((64, 64), np.nan, np.float32)
    cki.load(KERNELS, entry=entry, constants={"kFault": fault})(1, 128, a, b, c)
    np.testing.assert_allclose(c, a.astype(np.float32) @ b.astype(np.float32).T, atol=1e-4)


def sync_gemm(fault: int) -> None:
    gemm("sync_gemm", fault)


def stored_gemm(fault: int) -> None:
    gemm("stored_gemm", fault)


def doubled(fault: int) -> None:
    """2 x by TMA; raises when it is wrong."""
    x = np.random.default_rng(0).standard_normal((128, 32)).astype(np.float32)
    out = np.full_like(x, np.nan)
    maps = [TensorMap(array, (32, 32), 0) for array in (x, out)]
    cki.load(KERNELS, entry="doubled", constants={"kFault": fault})(1, 128, *maps)
    np.testing.assert_array_equal(out, 2 * x)


ADVERSARIAL = {"adversarial": True, "hazards": True}
RACES = {"races": True}
FAULTS = [
    pytest.param(
        sync_gemm, 1, ADVERSARIAL, "ldmatrix reads .* the target of a copy in flight", id="no-cp_async-wait"
    ),
    pytest.param(sync_gemm, 1, RACES, "ldmatrix reads", id="no-cp_async-wait-race"),
    pytest.param(sync_gemm, 2, RACES, "ldmatrix reads", id="no-barrier-before-ldmatrix"),
    pytest.param(stored_gemm, 3, RACES, "without a fence.proxy.async", id="no-proxy-fence-before-wgmma"),
    pytest.param(doubled, 3, RACES, "without a fence.proxy.async", id="no-proxy-fence-before-store"),
    pytest.param(
        stored_gemm, 4, ADVERSARIAL, "written while a wgmma on them is in flight", id="accumulators-touched"
    ),
    pytest.param(
        doubled, 5, ADVERSARIAL, "was overwritten before bulk_wait_group_read", id="store-source-overwritten"
    ),
    pytest.param(stored_gemm, 6, {}, "127 of 128", id="deadlocked-named-barrier"),
    pytest.param(doubled, 7, {}, "used before mbarrier.init", id="mbarrier-not-initialised"),
    pytest.param(doubled, 8, ADVERSARIAL, "more arrivals than its count", id="over-arrival"),
]


@pytest.mark.parametrize(("run", "fault", "checks", "words"), FAULTS)
def test_fault_is_reported(
    run: Callable[[int], None], fault: int, checks: dict[str, bool], words: str
) -> None:
    for seed in range(5):
        with (
            cki.device("sim"),
            sim.checks(**checks, seed=seed),
            pytest.raises(SimulationError, match=words) as raised,
        ):
            run(fault)
        assert "small_faults.cu:" in str(raised.value)


@pytest.mark.parametrize("run", [sync_gemm, stored_gemm, doubled])
def test_sound_kernel_gives_no_report(run: Callable[[int], None]) -> None:
    for seed in range(100):
        with (
            cki.device("sim"),
            sim.checks(adversarial=True, hazards=True, races=True, bounds=seed % 2 == 1, seed=seed),
        ):
            run(0)
