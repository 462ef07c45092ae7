"""Plans on a GPU: launches with everything but addresses and stream prepared.

A launch that is repeated is one generated function of straight-line code: `launch(stream, p0, p1, ...)` writes the
addresses with one `struct.pack_into` and then calls the driver once a step.  Steps that need no launch attribute go
through CuPy's `launchKernel` (0.09 us above the driver), the others through `cuLaunchKernelEx` of cuda.bindings, with a
configuration object that is touched only when the stream changes.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import Any, NoReturn

from cupy_backends.cuda.api.driver import CUDADriverError, launchKernel

from cki import cache, driver, log, tensor_map
from cki.arguments import ArgumentBlock, lay_out
from cki.device import DeviceInfo
from cki.errors import LaunchError
from cki.launch import Executable, Launcher, describe_step
from cki.plan import Plan, Step, TensorMapArg

_INFO = logging.INFO
_is_logging = log.logger.isEnabledFor

#: What one call at a time may change: the address words, the block that owns them, and for each step the address of
#: its parameters' addresses, or a function of the stream that launches it.
_LaunchBlock = tuple[Any, ...]


class CudaExecutable(Executable):
    """A plan compiled and loaded on one GPU."""

    def __init__(self, plan: Plan, device: DeviceInfo, slots: Sequence[str]) -> None:
        super().__init__(plan, device, slots)
        self._api = driver.api()
        self._layout = lay_out(plan, slots)
        self.functions = [self._load(step) for step in plan.steps]
        self._free: list[_LaunchBlock] = []
        self._many_devices = driver.device_count() > 1
        self._straight: Launcher | None = None
        self._was_launched = False

    def _load(self, step: Step) -> Any:
        key, compiled = cache.get(step.kernel, driver.native_arch(self.device.index))
        blocks = step.cluster[0] * step.cluster[1] * step.cluster[2]
        return driver.kernel_handle(key, compiled.cubin, step.kernel.entry, self.device, step.smem, blocks)

    def statements(
        self, names: dict[str, Any], pointers: Sequence[str], finish: str, repeated: bool = False
    ) -> list[str]:
        if repeated:
            from cki.replay import repeated_statements

            return repeated_statements(self, names, pointers, finish)
        layout, count = self._layout, len(self.plan.steps)
        names |= {
            "is_logging": _is_logging, "log_steps": self.log_steps, "take": self._free.pop, "put": self._free.append,
            "new_block": self._new_block, "pack_into": ArgumentBlock.packer(layout), "launch_kernel": launchKernel,
            "DriverError": CUDADriverError, "recover": self._recover,
        }  # fmt: skip

        def word(address: tuple[int, int]) -> str:
            slot, offset = address
            return f"{pointers[slot]} + {offset}" if offset else pointers[slot]

        listed = "".join(f"{pointer}, " for pointer in pointers)
        prepared = [f"step{index}" for index in range(count)]
        lines = [f"if is_logging({_INFO}): log_steps()"]
        if self._many_devices:
            names |= {"current_device": driver.current_device, "elsewhere": self._launch_elsewhere}
            lines += [
                f"if current_device() != {self.device.index}:",
                f"    elsewhere(({listed}), stream)",
                f"    {finish}",
            ]
        lines += [
            # list.pop and append are atomic: no lock, and two threads never share a block.
            "try: block = take()",
            "except IndexError: block = new_block()",
            f"memory, arguments, {''.join(f'{step}, ' for step in prepared)} = block",
            f"pack_into(memory, 0, {', '.join(map(word, layout.addresses))})",
        ]
        if layout.maps:
            mapped = ", ".join(word(address) for _, address, _ in layout.maps)
            lines.append(f"if arguments.map_addresses != [{mapped}]: arguments.fill_maps(({listed}))")
        lines += ["try:", "    done = 0"]
        for index, (step, function) in enumerate(zip(self.plan.steps, self.functions)):
            if index:
                lines.append(f"    done = {index}")
            if self._attributes(step):
                lines.append(f"    step{index}(stream)")
            else:
                geometry = ", ".join(map(str, (*step.grid, *step.block, step.smem)))
                lines.append(f"    launch_kernel({int(function)}, {geometry}, stream, step{index}, 0)")
        return [
            *lines, "except DriverError as error: recover(error, block, done, stream)", "put(block)", finish,
        ]  # fmt: skip

    def _new_block(self) -> _LaunchBlock:
        arguments = ArgumentBlock(self._layout, self._encode_map)
        steps = zip(self.plan.steps, self.functions, arguments.parameters)
        return arguments.memory, arguments, *(self._prepared(*step) for step in steps)

    def _prepared(self, step: Step, function: Any, parameters: int) -> int | Callable[[int], None]:
        """A step's part of a block."""
        attributes = self._attributes(step)
        if not attributes:
            return parameters
        config = self._api.CUlaunchConfig()
        config.gridDimX, config.gridDimY, config.gridDimZ = step.grid
        config.blockDimX, config.blockDimY, config.blockDimZ = step.block
        config.sharedMemBytes = step.smem
        config.hStream = 0
        config.attrs = attributes
        config.numAttrs = len(attributes)
        launch_extended, last = self._api.cuLaunchKernelEx, 0

        def launch(stream: int) -> None:
            nonlocal last
            if stream != last:
                config.hStream = last = stream
            (status,) = launch_extended(config, function, parameters, 0)
            if status:
                raise CUDADriverError(int(status))

        return launch

    def _attributes(self, step: Step) -> list[Any]:
        api = self._api
        attributes: list[Any] = []

        def attribute(name: str) -> Any:
            item = api.CUlaunchAttribute()
            item.id = getattr(api.CUlaunchAttributeID, f"CU_LAUNCH_ATTRIBUTE_{name}")
            attributes.append(item)
            return item.value

        if step.cluster != (1, 1, 1):
            sizes = attribute("CLUSTER_DIMENSION").clusterDim
            sizes.x, sizes.y, sizes.z = step.cluster
        if step.programmatic and self.device.arch not in ("sm_80", "sm_89"):
            attribute("PROGRAMMATIC_STREAM_SERIALIZATION").programmaticStreamSerializationAllowed = 1
        if step.cooperative:
            attribute("COOPERATIVE").cooperative = 1
        return attributes

    def launch(self, pointers: Sequence[int], stream: int) -> None:
        if self._straight is None:
            if not self._was_launched:  # a problem that never comes again is not worth a function
                self._was_launched = True
                self._launch_plainly(pointers, stream)
                return
            self._straight = self.launcher()
        self._straight(stream, *pointers)

    def _launch_plainly(self, pointers: Sequence[int], stream: int) -> None:
        """What the generated function does."""
        if _is_logging(_INFO):
            self.log_steps()
        if self._many_devices and driver.current_device() != self.device.index:
            self._launch_elsewhere(pointers, stream)
            return
        block = self._new_block()
        block[1].fill(pointers)
        try:
            done = 0
            for done in range(len(self.plan.steps)):
                self._launch_step(done, block, stream)
        except CUDADriverError as error:
            self._recover(error, block, done, stream)
        self._free.append(block)

    def _encode_map(self, address: int, argument: TensorMapArg) -> bytes:
        try:
            return tensor_map.encode(address, argument)
        except tensor_map.NoContextError:  # as for launches, below: this thread has not used CUDA yet
            with driver.on_device(self.device.index):
                return tensor_map.encode(address, argument)

    def _launch_step(self, position: int, block: _LaunchBlock, stream: int) -> None:
        step, prepared = self.plan.steps[position], block[2 + position]
        if callable(prepared):
            prepared(stream)
        else:
            function = int(self.functions[position])
            launchKernel(function, *step.grid, *step.block, step.smem, stream, prepared, 0)

    def _launch_elsewhere(self, pointers: Sequence[int], stream: int) -> None:
        with driver.on_device(self.device.index):
            self.launch(pointers, stream)

    def _recover(self, error: CUDADriverError, block: _LaunchBlock, done: int, stream: int) -> None:
        """After a refused launch: the rest again, if all that lacks is a context; else LaunchError."""
        if error.status != self._api.CUresult.CUDA_ERROR_INVALID_CONTEXT or driver.current_device() >= 0:
            self._refuse(error, done)
        # This thread has not used CUDA yet, so it has no context: give it one for these launches.
        with driver.on_device(self.device.index):
            for position in range(done, len(self.plan.steps)):
                try:
                    self._launch_step(position, block, stream)
                except CUDADriverError as later:
                    self._refuse(later, position)

    def _refuse(self, error: CUDADriverError, position: int) -> NoReturn:
        status = self._api.CUresult(error.status)
        raise LaunchError(
            f"{driver.error_text(status)}: {describe_step(self.plan.steps[position], self.device)}\n"
            "  hint: an error of an earlier kernel in the stream can also surface here"
        ) from None
