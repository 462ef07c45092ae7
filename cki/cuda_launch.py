"""Plans on a GPU: launches with everything but addresses and stream prepared.

Cost of a launch: one `struct.pack_into` of the addresses, then for each step one call into the driver.  Steps that need
no launch attribute go through CuPy's `launchKernel` (0.13 us above the driver), the others through
`cuLaunchKernelEx` of cuda.bindings (0.33 us), with a configuration object that is touched only when the stream changes.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Sequence
from typing import Any, NoReturn

from cupy_backends.cuda.api.driver import CUDADriverError, launchKernel

from cki import cache, driver, log, tensor_map
from cki.arguments import ArgumentBlock, lay_out
from cki.device import DeviceInfo
from cki.errors import LaunchError
from cki.launch import Executable, describe_step
from cki.plan import Plan, Step

_INFO = logging.INFO
_is_logging = log.logger.isEnabledFor


#: (stream, address of the parameters' addresses, 0) -> one launch; raises CUDADriverError.
Launcher = Callable[[int, int, int], None]


class _LaunchBlock:
    """Argument memory and launchers: what one call at a time may change."""

    __slots__ = ("_arguments", "fill", "has_addresses_only", "launches", "memory", "pack_into")

    def __init__(self, arguments: ArgumentBlock, launchers: Sequence[Launcher]) -> None:
        self.fill = arguments.fill
        self.pack_into, self.memory = arguments.pack_into, arguments.memory
        self.has_addresses_only = arguments.has_addresses_only
        self.launches = tuple(zip(launchers, arguments.parameters))
        self._arguments = arguments  # owns the memory


class _ExtendedLauncher:
    """A launch with attributes: clusters, programmatic or cooperative launch."""

    __slots__ = ("_config", "_function", "_launch", "_stream")

    def __init__(self, api: Any, config: Any, function: Any) -> None:
        self._launch = api.cuLaunchKernelEx
        self._config, self._function, self._stream = config, function, 0

    def __call__(self, stream: int, parameters: int, extra: int) -> None:
        if stream != self._stream:
            self._config.hStream = self._stream = stream
        (status,) = self._launch(self._config, self._function, parameters, extra)
        if status:
            raise CUDADriverError(int(status))


class CudaExecutable(Executable):
    """A plan compiled and loaded on one GPU."""

    def __init__(self, plan: Plan, device: DeviceInfo, slots: Sequence[str]) -> None:
        super().__init__(plan, device, slots)
        self._api = driver.api()
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
        launchers = [
            self._launcher(step, function) for step, function in zip(self.plan.steps, self._functions)
        ]
        return _LaunchBlock(arguments, launchers)

    def _launcher(self, step: Step, function: Any) -> Launcher:
        attributes = self._attributes(step)
        if not attributes:
            return functools.partial(launchKernel, int(function), *step.grid, *step.block, step.smem)
        config = self._api.CUlaunchConfig()
        config.gridDimX, config.gridDimY, config.gridDimZ = step.grid
        config.blockDimX, config.blockDimY, config.blockDimZ = step.block
        config.sharedMemBytes = step.smem
        config.hStream = 0
        config.attrs = attributes
        config.numAttrs = len(attributes)
        return _ExtendedLauncher(self._api, config, function)

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
        if self._many_devices and driver.current_device() != self.device.index:
            with driver.on_device(self.device.index):
                self._launch(block, stream)
        else:
            self._launch(block, stream)
        self._free.append(block)

    def repeated(self) -> Callable[[list[int], int], None]:
        from cki.replay import RepeatedLaunch

        return RepeatedLaunch(self)

    def _launch(self, block: _LaunchBlock, stream: int) -> None:
        done = 0
        try:
            for launch, parameters in block.launches:
                launch(stream, parameters, 0)
                done += 1
        except CUDADriverError as error:
            if error.status != self._api.CUresult.CUDA_ERROR_INVALID_CONTEXT or driver.current_device() >= 0:
                self._refuse(error, done)
        else:
            return
        # This thread has not used CUDA yet, so it has no context: give it one for these launches.
        with driver.on_device(self.device.index):
            for position, (launch, parameters) in enumerate(block.launches[done:], done):
                try:
                    launch(stream, parameters, 0)
                except CUDADriverError as error:
                    self._refuse(error, position)

    def _refuse(self, error: CUDADriverError, position: int) -> NoReturn:
        status = self._api.CUresult(error.status)
        raise LaunchError(
            f"{driver.error_text(status)}: {describe_step(self.plan.steps[position], self.device)}\n"
            "  hint: an error of an earlier kernel in the stream can also surface here"
        ) from None
