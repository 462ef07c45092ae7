"""Plans on a GPU: `cuLaunchKernelEx` with everything but addresses and stream prepared.

Cost of a launch: one `struct.pack_into` of the addresses, then for each step one call into the driver with a
configuration object that is touched only when the stream changes.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

from cki import cache, driver, log, tensor_map
from cki.arguments import ArgumentBlock, lay_out
from cki.device import DeviceInfo
from cki.errors import LaunchError
from cki.launch import Executable, describe_step
from cki.plan import Plan, Step

_INFO = logging.INFO
_is_logging = log.logger.isEnabledFor


class _LaunchBlock:
    """Argument memory and launch configurations: what one call at a time may change."""

    def __init__(self, arguments: ArgumentBlock, configs: list[Any], functions: list[Any]) -> None:
        self.fill = arguments.fill
        self.pack_into, self.memory = arguments.pack_into, arguments.memory
        self.has_addresses_only = arguments.has_addresses_only
        self.launches = list(zip(configs, functions, arguments.parameters))
        self.stream = 0
        self._arguments = arguments  # owns the memory

    def set_stream(self, stream: int) -> None:
        for config, _, _ in self.launches:
            config.hStream = stream
        self.stream = stream


class CudaExecutable(Executable):
    """A plan compiled and loaded on one GPU."""

    def __init__(self, plan: Plan, device: DeviceInfo, slots: Sequence[str]) -> None:
        super().__init__(plan, device, slots)
        self._api = driver.api()
        self._launch_kernel = self._api.cuLaunchKernelEx
        self._layout = lay_out(plan, slots)
        self._functions = [self._load(step) for step in plan.steps]
        self._free: list[_LaunchBlock] = []
        self._many_devices = driver.device_count() > 1

    def _load(self, step: Step) -> Any:
        key, compiled = cache.get(step.kernel, driver.native_arch(self.device.index))
        blocks = step.cluster[0] * step.cluster[1] * step.cluster[2]
        return driver.kernel_handle(key, compiled.cubin, step.kernel.entry, self.device, step.smem, blocks)

    def _new_block(self) -> _LaunchBlock:
        arguments = ArgumentBlock(self._layout, tensor_map.encode)
        return _LaunchBlock(arguments, [self._config(step) for step in self.plan.steps], self._functions)

    def _config(self, step: Step) -> Any:
        api = self._api
        config = api.CUlaunchConfig()
        config.gridDimX, config.gridDimY, config.gridDimZ = step.grid
        config.blockDimX, config.blockDimY, config.blockDimZ = step.block
        config.sharedMemBytes = step.smem
        config.hStream = 0
        attributes = []

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
        config.attrs = attributes
        config.numAttrs = len(attributes)
        return config

    def launch(self, pointers: Sequence[int], stream: int) -> None:
        if _is_logging(_INFO):
            self.log_steps()
        # list.pop and append are atomic: no lock, and two threads never share a block.
        try:
            block = self._free.pop()
        except IndexError:
            block = self._new_block()
        if block.has_addresses_only:
            block.pack_into(block.memory, 0, *pointers)
        else:
            block.fill(pointers)
        if block.stream != stream:
            block.set_stream(stream)
        if self._many_devices and driver.current_device() != self.device.index:
            with driver.on_device(self.device.index):
                self._launch(block)
        else:
            self._launch(block)
        self._free.append(block)

    def _launch(self, block: _LaunchBlock) -> None:
        launch_kernel = self._launch_kernel
        for position, (config, function, parameters) in enumerate(block.launches):
            (status,) = launch_kernel(config, function, parameters, 0)
            if status:
                self._retry_or_raise(status, block, position)

    def _retry_or_raise(self, status: Any, block: _LaunchBlock, position: int) -> None:
        """A thread that has not used CUDA yet has no context: give it one for this launch.  Else raise LaunchError."""
        if status == self._api.CUresult.CUDA_ERROR_INVALID_CONTEXT and driver.current_device() < 0:
            with driver.on_device(self.device.index):
                config, function, parameters = block.launches[position]
                (status,) = self._launch_kernel(config, function, parameters, 0)
            if not status:
                return
        step = self.plan.steps[position]
        raise LaunchError(
            f"{driver.error_text(status)}: {describe_step(step, self.device)}\n"
            "  hint: an error of an earlier kernel in the stream can also surface here"
        )
