"""A plan over memory that never moves: compiled once, launched by one call, on a GPU replayed as one graph."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor

from cki import cache, driver, dtypes
from cki.device import DeviceInfo
from cki.engine.device_memory import DeviceTensors
from cki.engine.device_weights import HasView
from cki.kernel import KernelSpec
from cki.launch import prepare, sim_kernel
from cki.memory.views import CacheTensor
from cki.operand import Operand
from cki.plan import Plan, Step, TensorMapArg


class Workspace:
    """Temporary memory by slot, shared by programs that run one after the other.

    A program that needs more of a slot than there is gets a new piece; those made before keep theirs.
    """

    def __init__(self, device: DeviceInfo) -> None:
        self._device = device
        self._tensors: dict[str, CacheTensor] = {}

    @property
    def nbytes(self) -> int:
        """Bytes of the pieces that new programs use."""
        return sum(tensor.view.size for tensor in self._tensors.values())

    def take(self, plan: Plan) -> dict[str, CacheTensor]:
        """Memory for every slot of a plan's workspace."""
        for slot, nbytes in plan.workspace:
            if slot not in self._tensors or self._tensors[slot].view.size < nbytes:
                self._tensors[slot] = DeviceTensors(self._device, [(slot, (nbytes,), dtypes.u8)])[slot]
        return {slot: self._tensors[slot] for slot, _ in plan.workspace}


class StepProgram:
    """A plan's launches on fixed addresses.

    memory: a tensor for each slot that the plan names, kept alive here.  num_kernels: launches.
    """

    def __init__(self, plan: Plan, device: DeviceInfo, memory: Mapping[str, HasView]) -> None:
        slots = sorted({operand.slot for step in plan.steps for operand in _operands(step)})
        self._kept = [memory[slot] for slot in slots]
        views = [tensor.view for tensor in self._kept]
        sizes = [view.size * view.dtype.itemsize for view in views]
        self._pointers = [view.ptr for view in views]
        compile_together(plan, device)
        self._executable = prepare(plan, device, slots, sizes)
        self._device = device
        self._graph: object = None
        self.num_kernels = len(plan.steps)

    @property
    def is_captured(self) -> bool:
        """Whether `launch` replays a graph."""
        return self._graph is not None

    def capture(self) -> None:
        """Record the launches as one CUDA graph, which `launch` replays from now on; nothing runs here.

        The simulated device has no graphs: there the launches themselves are repeated.
        """
        if self._device.kind == "cuda" and self._graph is None:
            from cki.replay import ExecutableGraph

            self._graph = ExecutableGraph(self._executable, self._pointers)

    def launch(self, stream: int, *, as_graph: bool = True) -> None:
        """Run the step on a stream; does not wait.  as_graph: by its graph, if there is one."""
        if self._graph is None or not as_graph:
            self._executable.launch(self._pointers, stream)
            return
        from cupy_backends.cuda.api.runtime import graphLaunch

        with driver.on_device(self._device.index):
            graphLaunch(self._graph.handle, stream)  # type: ignore[attr-defined]


def compile_together(plan: Plan, device: DeviceInfo) -> None:
    """Build a plan's kernels side by side, where they are not built yet: the compilers leave Python's lock alone."""
    kernels = list(dict.fromkeys(step.kernel for step in plan.steps))

    def build(kernel: KernelSpec) -> None:
        if device.kind == "sim":
            sim_kernel(kernel)
        else:
            cache.get(kernel, driver.native_arch(device.index))

    with ThreadPoolExecutor(os.cpu_count()) as pool:
        list(pool.map(build, kernels))


def _operands(step: Step) -> Iterator[Operand]:
    for argument in step.args:
        if isinstance(argument, Operand):
            yield argument
        elif isinstance(argument, TensorMapArg):
            yield argument.operand
