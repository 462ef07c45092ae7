"""Misused instructions end the launch, or are reported, with the numbers that are wrong and the kernel's line."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

import cki
from cki import sim
from cki.errors import SimulationError
from cki.loader import TensorMap

KERNEL = Path(__file__).parent / "kernels" / "misuse.cu"

MISUSES = {
    1: "misaligned address .*: an access of 16 bytes",
    2: "cp.async of 16 bytes: shared 0x[0-9a-f]+8 .* must be multiples",
    3: "a source of 9 bytes for a copy of 8",
    4: "row address 0x[0-9a-f]+ is not a multiple of 16",
    5: "mbarrier at shared 0x[0-9a-f]+: the address must be a multiple of 8",
    6: "wait for parity 2",
    7: "innermost coordinate 2 of 4-byte elements: the offset must be a multiple of 16 bytes",
    8: "tensor store at coordinate -1 of dimension 1",
    9: "a 3-D copy through a tensor map of rank 2",
    10: "bulk copy of 24 bytes",
    11: "must be a multiple of 128",
    12: "was overwritten by ordinary stores",
    13: "setmaxnreg",
    14: "which is a live mbarrier",
    15: "the thread exits while this bulk store may still read",
    16: "the threads of a warpgroup disagree",
    17: "is not a shared memory address",
    18: "the thread exits with this wgmma in flight",
    19: "setmaxnreg.dec to 256 registers, where a thread of a block of 128 begins with 255 at most",
}


def run(fault: int) -> None:
    memory = np.zeros((64, 64), np.float32)
    kernel = cki.load(KERNEL, constants={"kFault": fault})
    with cki.device("sim"):
        kernel(1, 128, TensorMap(memory, (8, 16), 0), memory)


@pytest.mark.parametrize("fault", MISUSES)
def test_misuse_is_reported(fault: int) -> None:
    with (
        sim.checks(adversarial=True, hazards=True),
        pytest.raises(SimulationError, match=MISUSES[fault]) as raised,
    ):
        run(fault)
    assert "misuse.cu:" in str(raised.value)


def test_the_kernel_without_misuse_is_clean() -> None:
    with sim.checks(adversarial=True, hazards=True, races=True):
        run(0)


def shares(producer: int, consumer: int) -> None:
    path = Path(__file__).parent / "kernels" / "register_pool.cu"
    seen = np.zeros(1, np.int32)
    with cki.device("sim"):
        cki.load(path, constants={"kProducer": producer, "kConsumer": consumer})(1, 384, seen)
    assert seen[0] == 1


def test_a_block_may_use_the_registers_that_it_began_with() -> None:
    shares(40, 232)  # 504: three warpgroups of 168


def test_warps_that_ask_for_more_registers_than_the_block_has_are_reported() -> None:
    """On a GPU the last increase waits for ever: 48 + 2 * 232 = 512, of 504."""
    with pytest.raises(SimulationError, match="12 warps of 168.* waits for ever") as raised:
        shares(48, 232)
    assert "register_pool.cu:" in str(raised.value)
