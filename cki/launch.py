"""From a plan to something that runs: `prepare(plan, device, slots)` compiles its kernels and packs its arguments.

The result is called with one base address for each slot (inputs, outputs, workspace) and a stream; it writes the
addresses into its argument block (`cki.arguments`) and launches each step.  Executables hold no tensor and are
used from several threads at once: each call takes an argument block from a free list and gives it back.
"""

from __future__ import annotations

import functools
import logging
from abc import ABC, abstractmethod
from collections.abc import Sequence

from cki import log
from cki.arguments import ArgumentBlock, ArgumentLayout, EncodeTensorMap, lay_out
from cki.device import DeviceInfo
from cki.errors import LaunchError
from cki.kernel import KernelSpec
from cki.plan import Plan, Step

_INFO = logging.INFO


class Executable(ABC):
    """A plan bound to a device, with addresses still open."""

    def __init__(self, plan: Plan, device: DeviceInfo, slots: Sequence[str]) -> None:
        self.plan = plan
        self.device = device
        self.slots = tuple(slots)

    @abstractmethod
    def launch(self, pointers: Sequence[int], stream: int) -> None:
        """Run all steps on `stream`: `pointers` holds a base address for each slot.  Does not wait (CUDA)."""

    def log_steps(self) -> None:
        """One line a step: kernel, constants, geometry, reason."""
        for step in self.plan.steps:
            log.logger.info("%s", describe_step(step, self.device))


def describe_step(step: Step, device: DeviceInfo) -> str:
    """A step in one line, as CKI_LOG shows it."""
    constants = ", ".join(f"{name}={value}" for name, value in step.kernel.constants)
    text = f"launch {step.kernel.entry}<{constants}> grid={step.grid} block={step.block} smem={step.smem}"
    if step.cluster != (1, 1, 1):
        text += f" cluster={step.cluster}"
    flags = [word for word, on in (("cooperative", step.cooperative), ("programmatic", step.programmatic)) if on]
    return f"{text}{''.join(f' {word}' for word in flags)} on {device}: {step.reason or 'only choice'}"


def check_geometry(step: Step, device: DeviceInfo) -> list[str]:
    """Every limit of the device that a step's geometry breaks."""
    problems = []
    grid, block, cluster = step.grid, step.block, step.cluster
    threads = block[0] * block[1] * block[2]
    for what, sizes in (("grid", grid), ("block", block), ("cluster", cluster)):
        if len(sizes) != 3 or any(size < 1 for size in sizes):
            problems.append(f"{what} {sizes} is not three positive sizes")
    if problems:
        return problems
    if grid[0] > 2**31 - 1 or grid[1] > 65535 or grid[2] > 65535:
        problems.append(f"grid {grid} is over the limit (2147483647, 65535, 65535)")
    if block[0] > 1024 or block[1] > 1024 or block[2] > 64:
        problems.append(f"block {block} is over the limit (1024, 1024, 64)")
    if threads > 1024:
        problems.append(f"block {block} has {threads} threads, the limit is 1024")
    if any(size % part for size, part in zip(grid, cluster)):
        problems.append(f"grid {grid} is not a multiple of cluster {cluster}")
    blocks = cluster[0] * cluster[1] * cluster[2]
    if blocks > 16:
        problems.append(f"cluster {cluster} has {blocks} blocks, the limit is 16")
    if blocks > 1 and device.arch in ("sm_80", "sm_89"):
        problems.append(f"cluster {cluster} needs sm_90 or later, the device is {device.arch}")
    if step.smem > device.shared_memory_per_block:
        problems.append(f"{step.smem} bytes of dynamic shared memory, the device has {device.shared_memory_per_block}")
    return problems


def prepare(plan: Plan, device: DeviceInfo, slots: Sequence[str]) -> Executable:
    """Compile what a plan needs (or take it from the caches) and lay out its arguments.

    slots: the names of the memory in the order in which `launch` gets base addresses.
    """
    log.configure()
    for step in plan.steps:
        problems = check_geometry(step, device)
        if problems:
            listed = "".join(f"\n  - {problem}" for problem in problems)
            raise LaunchError(f"kernel {step.kernel.entry} cannot be launched on {device}{listed}")
    if device.kind == "sim":
        return SimExecutable(plan, device, slots)
    from cki.cuda_launch import CudaExecutable

    return CudaExecutable(plan, device, slots)


class BlockPool:
    """Argument blocks of one executable: taken for a call, given back after it.

    `list.pop` and `list.append` are atomic, so no lock is needed and a fork at any moment leaves it usable.
    """

    def __init__(self, layout: ArgumentLayout, encode: EncodeTensorMap) -> None:
        self._layout = layout
        self._encode = encode
        self._free: list[ArgumentBlock] = []

    def take(self) -> ArgumentBlock:
        try:
            return self._free.pop()
        except IndexError:
            return ArgumentBlock(self._layout, self._encode)

    def give_back(self, block: ArgumentBlock) -> None:
        self._free.append(block)


class SimExecutable(Executable):
    """Steps run by the simulated device; a launch returns when the kernel has ended."""

    def __init__(self, plan: Plan, device: DeviceInfo, slots: Sequence[str]) -> None:
        super().__init__(plan, device, slots)
        from cki import sim

        self._blocks = BlockPool(lay_out(plan, slots), functools.lru_cache(maxsize=256)(sim.encode_tensor_map))
        for step in plan.steps:
            sim.compile_kernel(step.kernel, arch=device.arch)

    def launch(self, pointers: Sequence[int], stream: int) -> None:
        from cki import sim

        if log.logger.isEnabledFor(_INFO):
            self.log_steps()
        block = self._blocks.take()
        block.fill(pointers)
        for step, parameters in zip(self.plan.steps, block.parameters):
            # Looked up at each launch: the checks in force decide which build of the kernel runs.
            kernel = sim.compile_kernel(step.kernel, arch=self.device.arch)
            sim.launch(
                kernel, step.grid, step.block, parameters, smem=step.smem, cluster=step.cluster, cooperative=step.cooperative
            )  # fmt: skip
        self._blocks.give_back(block)


__all__ = ["BlockPool", "Executable", "KernelSpec", "SimExecutable", "check_geometry", "describe_step", "prepare"]
