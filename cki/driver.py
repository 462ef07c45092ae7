"""The CUDA driver, through `cuda.bindings`: initialisation, devices, contexts, kernel handles.

Modules are loaded as libraries (`cuLibraryLoadData`), which belong to no context: one handle serves every device and
whichever context is current.  Nothing here changes the caller's current device.
"""

from __future__ import annotations

import contextlib
import functools
import os
import threading
from collections.abc import Iterator
from typing import Any

from cki import compiler, config
from cki.device import SUPPORT_TABLE, DeviceInfo, arch_of
from cki.errors import CompileError, DeviceError, LaunchError

#: The oldest driver: libraries without a context and cuLaunchKernelEx came with CUDA 12.
MINIMUM_CUDA = (12, 0)


@functools.cache
def api() -> Any:
    """`cuda.bindings.driver`, initialised; DeviceError that says what is missing."""
    try:
        import cupy_backends.cuda.api.driver  # noqa: F401  (launches, cki.cuda_launch)
        from cuda.bindings import driver
    except ImportError as error:
        raise DeviceError(
            f"the CUDA device needs CuPy and cuda-bindings ({error})", hint=compiler.INSTALL_HINT
        ) from error
    try:
        (status,) = driver.cuInit(0)
    except Exception as error:  # the finder's own errors: no libcuda.so.1
        raise DeviceError(
            "no NVIDIA driver was found (libcuda.so.1)",
            hint='a machine with an NVIDIA GPU, or the simulated device: CKI_DEVICE=sim or `with cki.device("sim"):`',
        ) from error
    if int(status) != 0:
        raise DeviceError(
            f"the CUDA driver does not start: {status.name}",
            hint='`with cki.device("sim"):` runs on the CPU; a process forked after CUDA was used cannot use it again',
        )
    check_driver_version(_value(driver.cuDriverGetVersion()))
    return driver


def check_driver_version(number: int, compiler_version: tuple[int, int] | None = None) -> None:
    """Raise DeviceError for a driver (13000 = CUDA 13.0) that is too old for CKI, or for what NVRTC compiles."""
    version = number // 1000, number % 1000 // 10
    needed = MINIMUM_CUDA
    why = "CKI needs"
    if compiler_version is not None and compiler_version[0] > version[0]:
        needed, why = (
            (compiler_version[0], 0),
            f"code of NVRTC {compiler_version[0]}.{compiler_version[1]} needs",
        )
    if version < needed:
        hint = f"a newer driver; for a CUDA {version[0]} driver: pip install 'cki-runtime[cuda{version[0]}]'"
        raise DeviceError(
            f"the driver supports CUDA {version[0]}.{version[1]}, {why} {needed[0]}.{needed[1]}\n{SUPPORT_TABLE}",
            hint=hint,
        )


#: Whether this process was forked from one that had started the driver: no call of it works here, whatever it answers.
_was_forked = False


def _after_fork_in_child() -> None:
    global _was_forked
    _was_forked = _was_forked or api.cache_info().currsize > 0


os.register_at_fork(after_in_child=_after_fork_in_child)


def error_text(status: Any) -> str:
    """A driver status in words: CUDA_ERROR_INVALID_VALUE (invalid argument)."""
    _, words = api().cuGetErrorString(status)
    text = f"{status.name} ({words.decode() if words else 'unknown'})"
    if _was_forked or status.name == "CUDA_ERROR_NOT_INITIALIZED":
        text += ": a process forked after CUDA was used cannot use it; start processes with spawn"
    return text


def _value(result: tuple[Any, ...]) -> Any:
    if int(result[0]) != 0:
        raise DeviceError(f"CUDA driver: {error_text(result[0])}")
    return result[1] if len(result) == 2 else result[1:]


@functools.cache
def device_count() -> int:
    """GPUs that this process sees."""
    return int(_value(api().cuDeviceGetCount()))


@functools.cache
def device_info(index: int) -> DeviceInfo:
    """What heuristics need to know of a GPU.  Makes no context."""
    if not 0 <= index < device_count():
        raise DeviceError(f"there is no cuda:{index}", hint=f"cuda:0 to cuda:{device_count() - 1}")
    return DeviceInfo(
        kind="cuda",
        index=index,
        name=_device_name(index),
        arch=config.text("CKI_ARCH") or native_arch(index),
        sm_count=_attribute(index, "MULTIPROCESSOR_COUNT"),
        shared_memory_per_block=_attribute(index, "MAX_SHARED_MEMORY_PER_BLOCK_OPTIN"),
        l2_bytes=_attribute(index, "L2_CACHE_SIZE"),
    )


@functools.cache
def native_arch(index: int) -> str:
    """What a GPU's kernels are compiled for, whatever CKI_ARCH says."""
    capability = _attribute(index, "COMPUTE_CAPABILITY_MAJOR"), _attribute(index, "COMPUTE_CAPABILITY_MINOR")
    return arch_of(capability, _device_name(index))


def _device_name(index: int) -> str:
    driver = api()
    return str(_value(driver.cuDeviceGetName(96, _value(driver.cuDeviceGet(index)))).rstrip(b"\0 "), "utf-8")


def _attribute(index: int, name: str) -> int:
    driver = api()
    number = getattr(driver.CUdevice_attribute, f"CU_DEVICE_ATTRIBUTE_{name}")
    return int(_value(driver.cuDeviceGetAttribute(number, _value(driver.cuDeviceGet(index)))))


@functools.cache
def _primary_context(index: int) -> Any:
    return _value(api().cuDevicePrimaryCtxRetain(_value(api().cuDeviceGet(index))))


def current_device() -> int:
    """Index of the current context's device; -1 when this thread has none."""
    status, device = api().cuCtxGetDevice()
    return int(device) if int(status) == 0 else -1


@contextlib.contextmanager
def on_device(index: int) -> Iterator[None]:
    """Run with a context of that device current: the caller's own if it is one, else the primary one; then restore."""
    if current_device() == index:
        yield
        return
    driver = api()
    (status,) = driver.cuCtxPushCurrent(_primary_context(index))
    if int(status) != 0:
        raise DeviceError(f"cuda:{index} cannot be made current: {error_text(status)}")
    try:
        yield
    finally:
        driver.cuCtxPopCurrent()


@contextlib.contextmanager
def allowed_while_capturing() -> Iterator[None]:
    """Loading a kernel is harmless to a stream capture in progress: tell the driver so for this thread."""
    driver = api()
    relaxed = driver.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_RELAXED
    previous = _value(driver.cuThreadExchangeStreamCaptureMode(relaxed))
    try:
        yield
    finally:
        driver.cuThreadExchangeStreamCaptureMode(previous)


_libraries: dict[str, Any] = {}
_shared_memory_limit: dict[tuple[str, str, int], int] = {}
_load_lock = threading.Lock()


def kernel_handle(
    key: str, cubin: bytes, entry: str, device: DeviceInfo, shared_memory: int, cluster_blocks: int
) -> Any:
    """A launchable handle of an entry, loaded on `device` with its attributes set.

    key: identifies the cubin.  shared_memory: dynamic bytes that it will be launched with.
    """
    driver = api()
    with _load_lock, on_device(device.index), allowed_while_capturing():
        library = _libraries.get(key)
        if library is None:
            library = _libraries[key] = _load(cubin, entry)
        kernel = _launchable(
            driver.cuLibraryGetKernel(library, entry.encode()), f"kernel has no entry {entry!r}"
        )
        handle = _value(driver.cuDeviceGet(device.index))
        attributes = driver.CUfunction_attribute
        limit_key = (key, entry, device.index)
        if shared_memory > _shared_memory_limit.get(limit_key, 48 * 1024):
            dynamic = attributes.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
            _launchable(
                driver.cuKernelSetAttribute(dynamic, shared_memory, kernel, handle),
                f"{entry} cannot have {shared_memory} bytes of shared memory on {device}",
            )
            _shared_memory_limit[limit_key] = shared_memory
        if cluster_blocks > 8:
            non_portable = attributes.CU_FUNC_ATTRIBUTE_NON_PORTABLE_CLUSTER_SIZE_ALLOWED
            _launchable(
                driver.cuKernelSetAttribute(non_portable, 1, kernel, handle),
                f"{entry} cannot have clusters of {cluster_blocks} blocks on {device}",
            )
        _launchable(driver.cuKernelGetFunction(kernel), f"{entry} cannot be loaded on {device}")
        return driver.CUfunction(int(kernel))


def _load(cubin: bytes, entry: str) -> Any:
    driver = api()
    status, library = driver.cuLibraryLoadData(cubin, [], [], 0, [], [], 0)
    if int(status) != 0:
        try:
            compiler_version = compiler.cuda_version()
        except CompileError:  # a prebuilt kernel: no compiler here
            compiler_version = None
        check_driver_version(_value(driver.cuDriverGetVersion()), compiler_version)
        raise DeviceError(
            f"{entry}: the driver refuses the compiled kernel: {error_text(status)}\n{SUPPORT_TABLE}"
        )
    return library


def _launchable(result: tuple[Any, ...], what: str) -> Any:
    if int(result[0]) != 0:
        raise LaunchError(f"{what}: {error_text(result[0])}")
    return result[1] if len(result) > 1 else None


def capturing_graph(stream: int) -> Any:
    """The graph that a stream is being captured into, or None."""
    driver = api()
    result = driver.cuStreamGetCaptureInfo(stream)
    status, state, graph = result[0], result[1], result[3]
    if int(status) != 0 or int(state) != int(driver.CUstreamCaptureStatus.CU_STREAM_CAPTURE_STATUS_ACTIVE):
        return None
    return graph


def count_kernel_nodes(graph: Any) -> int:
    """Kernel launches in a graph (None: no graph, no launches)."""
    if graph is None:
        return 0
    driver = api()
    _, count = _value(driver.cuGraphGetNodes(graph, 0))
    nodes, _ = _value(driver.cuGraphGetNodes(graph, count)) if count else ([], 0)
    kernel = int(driver.CUgraphNodeType.CU_GRAPH_NODE_TYPE_KERNEL)
    return sum(int(_value(driver.cuGraphNodeGetType(node))) == kernel for node in nodes)
