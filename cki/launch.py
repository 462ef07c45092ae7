"""From a plan to something that runs: `prepare(plan, device, slots)` compiles its kernels and packs its arguments.

The result is called with one base address for each slot (inputs, outputs, workspace) and a stream; it writes the
addresses into an argument block (`cki.arguments`) and launches each step.  Executables hold no tensor and may be used
from several threads at once.
"""

from __future__ import annotations

import functools
import logging
import os
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from cki import log, source, tensor_map
from cki.arguments import ArgumentBlock, lay_out
from cki.device import DeviceInfo
from cki.errors import LaunchError
from cki.generated import define
from cki.kernel import KernelSpec
from cki.plan import Plan, Step

if TYPE_CHECKING:
    from cki.sim import SimKernel

_INFO = logging.INFO

#: (stream, address of slot 0, address of slot 1, ...) -> all steps launched.
Launcher = Callable[..., None]


class Executable(ABC):
    """A plan bound to a device, with addresses still open."""

    def __init__(self, plan: Plan, device: DeviceInfo, slots: Sequence[str]) -> None:
        self.plan = plan
        self.device = device
        self.slots = tuple(slots)

    @abstractmethod
    def launch(self, pointers: Sequence[int], stream: int) -> None:
        """Run all steps on `stream`: `pointers` holds a base address for each slot.  Does not wait (CUDA)."""

    def launcher(self, repeated: bool = False) -> Launcher:
        """`launch` as a function that may be kept.  repeated: for a caller that often passes the same addresses."""
        names: dict[str, Any] = {}
        pointers = [f"p{index}" for index in range(len(self.slots))]
        body = self.statements(names, pointers, "return", repeated)
        made: Launcher = define("launch", ", ".join(["stream", *pointers]), body, names)
        return made

    def statements(
        self, names: dict[str, Any], pointers: Sequence[str], finish: str, repeated: bool = False
    ) -> list[str]:
        """`launch` as source code for a function's end, where the variable `stream` holds the handle.

        names: gets the objects that it refers to.  pointers: the variables of the slots' addresses.  finish: the
        function's last statement.
        """
        names["launch_steps"] = self.launch
        return [f"launch_steps([{', '.join(pointers)}], stream)", finish]

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
    flags = [
        word for word, on in (("cooperative", step.cooperative), ("programmatic", step.programmatic)) if on
    ]
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
        problems.append(
            f"{step.smem} bytes of shared memory, the device has {device.shared_memory_per_block}"
        )
    if step.smem < 0:
        problems.append(f"{step.smem} bytes of shared memory")
    return problems


def prepare(plan: Plan, device: DeviceInfo, slots: Sequence[str], sizes: Sequence[int] = ()) -> Executable:
    """Compile what a plan needs (or take it from the caches) and lay out its arguments.

    slots: the names of the memory in the order in which `launch` gets base addresses.  sizes: bytes of each, which
    the simulated device's bounds check uses.
    """
    log.configure()
    for step in plan.steps:
        problems = check_geometry(step, device)
        if problems:
            listed = "".join(f"\n  - {problem}" for problem in problems)
            raise LaunchError(f"kernel {step.kernel.entry} cannot be launched on {device}{listed}")
    if device.kind == "sim":
        return SimExecutable(plan, device, slots, sizes)
    from cki.cuda_launch import CudaExecutable

    return CudaExecutable(plan, device, slots)


class SimExecutable(Executable):
    """Steps run by the simulated device; a launch returns when the kernel has ended."""

    def __init__(
        self, plan: Plan, device: DeviceInfo, slots: Sequence[str], sizes: Sequence[int] = ()
    ) -> None:
        super().__init__(plan, device, slots)
        self._sizes = tuple(sizes)
        self._layout = lay_out(plan, slots)
        self._kernels = [sim_kernel(step.kernel) for step in plan.steps]

    def launch(self, pointers: Sequence[int], stream: int) -> None:
        from cki import sim

        is_logging = log.logger.isEnabledFor(_INFO)
        block = ArgumentBlock(self._layout, tensor_map.encode_simulated)
        block.fill(pointers)
        extents = [(pointer, size) for pointer, size in zip(pointers, self._sizes) if size]
        for step, kernel, parameters in zip(self.plan.steps, self._kernels, block.arrays):
            if is_logging:  # one by one: a launch takes its time here
                log.logger.info("%s", describe_step(step, self.device))
            sim.launch(
                kernel, step.grid, step.block, parameters,
                smem=step.smem, cluster=step.cluster, cooperative=step.cooperative, extents=extents,
            )  # fmt: skip


def sim_kernel(spec: KernelSpec) -> SimKernel:
    """A kernel built for the simulated device: the package's once a process, a user's file when it changed."""
    path = source.source_path(spec)
    return _sim_kernel(spec, path.stat().st_mtime_ns if os.path.isabs(spec.source) else 0)


@functools.lru_cache(maxsize=1024)
def _sim_kernel(spec: KernelSpec, modified: int) -> SimKernel:
    from cki import sim

    path = source.source_path(spec)
    text = f'{source.prelude(spec)}#line 1 "{path}"\n{source.read(path)}'
    return sim.compile_kernel(text, spec.entry, name=spec.source, include_dirs=[path.parent])
