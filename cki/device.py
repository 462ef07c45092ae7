"""Devices: what heuristics need to know of one, and which one a call runs on.

A tensor on a GPU decides its own device.  What the caller chooses is the *kind*: the CUDA device (default), or the
simulated device, which runs the same kernels on CPU tensors: `CKI_DEVICE=sim`, or `with cki.device("sim"):`.
"""

from __future__ import annotations

import functools
from contextvars import ContextVar, Token
from dataclasses import dataclass
from types import TracebackType

from cki import config
from cki.errors import DeviceError, InvalidArgumentError


@dataclass(frozen=True)
class DeviceInfo:
    """kind: "cuda" or "sim".  arch: "sm_90a" and the like.  Sizes in bytes."""

    kind: str
    index: int
    name: str
    arch: str
    sm_count: int
    shared_memory_per_block: int
    l2_bytes: int

    def __str__(self) -> str:
        if self.kind == "sim":
            return f"simulated device ({self.arch})"
        return f"cuda:{self.index} ({self.name}, {self.arch})"


#: Compute capability -> the architecture whose kernels it runs.  An "a" architecture runs on that one capability only.
ARCH_OF_CAPABILITY = {
    (8, 0): "sm_80", (8, 6): "sm_80", (8, 7): "sm_80", (8, 9): "sm_89",
    (9, 0): "sm_90a", (10, 0): "sm_100a", (12, 0): "sm_120a",
}  # fmt: skip

#: What the simulated device stands for, by architecture: (model, SMs, shared memory a block in bytes, L2 in bytes).
_SIMULATED = {
    "sm_80": ("A100", 108, 163 * 1024, 40 << 20),
    "sm_89": ("L40S", 142, 99 * 1024, 96 << 20),
    "sm_90a": ("H200", 132, 227 * 1024, 60 << 20),
    "sm_100a": ("B200", 148, 227 * 1024, 126 << 20),
    "sm_120a": ("RTX PRO 6000", 188, 99 * 1024, 128 << 20),
}

SUPPORT_TABLE = """\
GPU                          compute capability   kernels built for   CUDA driver
A100, A30                    8.0                  sm_80               525 (CUDA 12) or newer
A10, A40, RTX 30, Orin       8.6, 8.7             sm_80               525 (CUDA 12) or newer
L4, L40, RTX 40              8.9                  sm_89               525 (CUDA 12) or newer
H100, H200, GH200            9.0                  sm_90a              525 (CUDA 12) or newer
B200, GB200                  10.0                 sm_100a             570 (CUDA 12.8) or newer
RTX 50, RTX PRO Blackwell    12.0                 sm_120a             570 (CUDA 12.8) or newer
Kernels compiled by NVRTC 13 (extra `cuda13`) need driver 580 (CUDA 13.0) or newer."""


def arch_of(capability: tuple[int, int], name: str) -> str:
    """The architecture whose kernels a GPU of that compute capability runs; DeviceError when none does."""
    arch = ARCH_OF_CAPABILITY.get(capability)
    if arch is None:
        major, minor = capability
        raise DeviceError(
            f"{name} has compute capability {major}.{minor}, for which no kernels are built\n{SUPPORT_TABLE}"
        )
    return arch


def sim_device(arch: str | None = None) -> DeviceInfo:
    """The simulated device, standing for a GPU of that architecture (default: CKI_SIM_ARCH)."""
    arch = arch or config.text("CKI_SIM_ARCH")
    if arch not in _SIMULATED:
        raise InvalidArgumentError(
            f"the simulated device has no architecture {arch!r}", hint=f"one of {', '.join(_SIMULATED)}"
        )
    model, sm_count, shared_memory, l2_bytes = _SIMULATED[arch]
    return DeviceInfo("sim", 0, f"simulated {model}", arch, sm_count, shared_memory, l2_bytes)


def cuda_device(index: int) -> DeviceInfo:
    """The CUDA device of that index.  Makes no context.  DeviceError when there is none, or it is not usable."""
    from cki import driver

    return driver.device_info(index)


_current: ContextVar[DeviceInfo | None] = ContextVar("cki_device", default=None)
_CUDA = DeviceInfo("cuda", -1, "the GPU that holds the tensors", "", 0, 0, 0)


@functools.cache
def _default() -> DeviceInfo:
    return sim_device() if config.text("CKI_DEVICE") == "sim" else _CUDA


def current() -> DeviceInfo:
    """The device chosen by `with cki.device(...)`, else by CKI_DEVICE.  For CUDA its index is -1: tensors decide."""
    return _current.get() or _default()


class device:
    """Context manager: operations inside run on that kind of device.

    name: "sim" (tensors in CPU memory, kernels run by the simulated device) or "cuda" (tensors in GPU memory).
    arch: for "sim", the architecture it stands for; default CKI_SIM_ARCH.  Nests; holds for the running thread or task.

    Raises InvalidArgumentError for other names, an unknown arch, and an arch with "cuda".
    """

    def __init__(self, name: str, *, arch: str | None = None) -> None:
        if name == "sim":
            self.info = sim_device(arch)
        elif name == "cuda":
            if arch is not None:
                raise InvalidArgumentError(
                    f"arch={arch!r} with the CUDA device", hint="CKI_ARCH, for the whole process"
                )
            self.info = _CUDA
        else:
            raise InvalidArgumentError(
                f"unknown device {name!r}", hint='"cuda" or "sim"; a tensor decides which GPU'
            )
        self._tokens: list[Token[DeviceInfo | None]] = []

    def __enter__(self) -> DeviceInfo:
        self._tokens.append(_current.set(self.info))
        return self.info

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        _current.reset(self._tokens.pop())
