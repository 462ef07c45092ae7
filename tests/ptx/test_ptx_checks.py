"""The kernels of these tests are sound: 100 seeds of every check of the simulated device report nothing."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

import cki
from cki import sim
from cki.loader import TensorMap
from cki.sim import checking
from tests.conftest import DeviceUnderTest
from tests.ptx import test_ptx_cluster, test_ptx_control, test_ptx_copies, test_ptx_memory, test_ptx_wgmma
from tests.ptx.operands import load

SEEDS = 100


def matrices(device: DeviceUnderTest) -> None:
    words = np.arange(256, dtype=np.uint32)
    rows = np.arange(32, dtype=np.int32)
    outputs = [np.zeros(shape, np.uint32) for shape in ((6, 32, 4), (6, 64, 4), (32,))]
    load("matrices.cu", "matrices")(1, 32, words, rows, words[:128].copy(), *outputs)


def tiles(device: DeviceUnderTest) -> None:
    source = np.arange(40 * 64, dtype=np.uint16).reshape(40, 64)
    target = np.zeros_like(source)
    dump = np.zeros(512, np.uint32)
    maps = [TensorMap(array, (16, 64), 128) for array in (source, target)]
    load("tma.cu", "tile_copy")(1, 128, *maps, dump, 2048, 2048, 2, 0, 8, 0, 0, 0, 0, 0, smem=2048)
    np.testing.assert_array_equal(target[8:24], source[8:24])


def wgmma(device: DeviceUnderTest) -> None:
    form = (test_ptx_wgmma.SHARED, test_ptx_wgmma.REGISTERS, test_ptx_wgmma.B_MN_MAJOR)[
        checking.current().seed % 3
    ]
    assert test_ptx_wgmma.multiply(device, "bf16", 64, form, 128) <= test_ptx_wgmma.BOUND["bf16"]


def cluster(device: DeviceUnderTest) -> None:
    test_ptx_cluster.test_cluster(device, 2, 3, 0)


@pytest.mark.parametrize(
    "run",
    [
        matrices, tiles, wgmma, cluster, test_ptx_control.test_control, test_ptx_memory.test_accesses,
        test_ptx_copies.test_cp_async, test_ptx_copies.test_mbarrier, test_ptx_copies.test_bulk,
    ],
    ids=lambda run: run.__name__,
)  # fmt: skip
def test_no_false_report(run: Callable[[DeviceUnderTest], None]) -> None:
    with cki.device("sim") as info:
        device = DeviceUnderTest("sim", info)
        for seed in range(SEEDS):
            with sim.checks(
                adversarial=True, hazards=True, races=seed % 4 != 0, bounds=seed % 4 != 0, seed=seed
            ):
                run(device)
