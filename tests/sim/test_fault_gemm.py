"""The Hopper GEMM (TMA ring, wgmma) on the simulated device: right when sound, and each planted fault is reported.

K is at least twice the ring, else a stage is never used a second time and the faults of its reuse do not show.
"""

from __future__ import annotations

from pathlib import Path

import ml_dtypes
import numpy as np
import pytest

import cki
from cki import sim
from cki.errors import SimulationError
from cki.loader import TensorMap

KERNEL = Path(__file__).parent / "kernels" / "wgmma_gemm.cu"
ADVERSARIAL = {"adversarial": True, "hazards": True}
RACES = {"races": True}

#: fault -> a check that finds it, and words of its report
FAULTS = {
    1: (ADVERSARIAL, "wgmma issued while its operand"),
    2: (ADVERSARIAL, "no wgmma_wait_group covers it|accumulator|still reads"),
    3: (ADVERSARIAL, "more arrivals than its count|target of another copy|still reads"),
    4: (ADVERSARIAL, "still reads|wgmma issued while its operand"),
    5: (RACES, "an mbarrier operation on"),
    6: (ADVERSARIAL, "expect_tx names too few bytes"),
    7: (ADVERSARIAL, "without wgmma_fence"),
    8: (ADVERSARIAL, "wgmma issued while its operand"),
    9: (ADVERSARIAL, "no wgmma_wait_group covers it|still reads|without wgmma_fence|DEADLOCK"),
}


def multiply(m: int, n: int, k: int, stages: int, fault: int = 0) -> float:
    """The largest error of a product of random matrices on the simulated device."""
    rng = np.random.default_rng(0)
    a, b = (rng.standard_normal((rows, k)).astype(ml_dtypes.bfloat16) for rows in (m, n))
    c = np.full((m, n), np.nan, np.float32)
    kernel = cki.load(KERNEL, constants={"kStages": stages, "kFault": fault})
    with cki.device("sim"):
        kernel(
            (n // 64, m // 64), 256, TensorMap(a, (64, 64)), TensorMap(b, (64, 64)), c, n, k,
            smem=2 * stages * 8192 + 16 * stages,
        )  # fmt: skip
    return float(np.max(np.abs(c - a.astype(np.float64) @ b.astype(np.float64).T)))


@pytest.mark.parametrize(
    ("m", "n", "k", "stages"), [(64, 64, 256, 2), (128, 64, 448, 3), (64, 128, 640, 2), (128, 192, 576, 4)]
)
def test_product(m: int, n: int, k: int, stages: int) -> None:
    assert multiply(m, n, k, stages) < 1e-4


def test_sound_kernel_gives_no_report() -> None:
    for seed in range(100):
        with sim.checks(adversarial=True, hazards=True, seed=seed):
            assert multiply(64, 64, 256 + 64 * (seed % 3), 2) < 1e-4


def test_sound_kernel_has_no_race() -> None:
    for seed in range(20):
        with sim.checks(adversarial=True, hazards=True, races=True, seed=seed):
            assert multiply(64, 64, 256, 2) < 1e-4


@pytest.mark.parametrize("fault", FAULTS)
def test_fault_is_reported(fault: int) -> None:
    checks, words = FAULTS[fault]
    missed = []
    for seed in range(8):
        with sim.checks(**checks, seed=seed):
            try:
                multiply(64, 64, 256, 2, fault)
                missed.append(seed)
            except SimulationError as error:
                report = str(error)
    assert not missed, f"seeds {missed} found nothing"
    assert any(word in report for word in words.split("|")), report
    assert "wgmma_gemm.cu:" in report


@pytest.mark.parametrize("fault", FAULTS)
def test_fault_is_reported_in_plain_order(fault: int) -> None:
    """The race check needs neither late copies nor a lucky schedule."""
    with sim.checks(hazards=True, races=True), pytest.raises(SimulationError, match="wgmma_gemm.cu:"):
        multiply(64, 64, 256, 2, fault)
