"""TMA descriptors (tensor maps), encoded by the driver or by the simulated device.

They are encoded into memory of our own that is aligned to 128 bytes (cuda.bindings' own object is not), and
remembered: a decoder's weights and caches keep their addresses from call to call, and encoding takes about 5 us.
"""

from __future__ import annotations

import ctypes
import functools
from typing import Any

from cki.errors import DeviceError, LaunchError
from cki.plan import TensorMapArg

#: CUtensorMapDataType by element type.  8-bit floats, bool and signed bytes travel as unsigned bytes.
_TYPES = {
    "u8": 0, "i8": 0, "bool": 0, "e4m3": 0, "e5m2": 0, "u16": 1, "i16": 1, "u32": 2, "i32": 3, "u64": 4, "i64": 5,
    "f16": 6, "f32": 7, "f64": 8, "bf16": 9,
}  # fmt: skip
_SWIZZLES = {0: 0, 32: 1, 64: 2, 128: 3}
_L2_PROMOTION_256B = 3
_INVALID_CONTEXT = 201


class NoContextError(LaunchError):
    """The driver refused because the calling thread has no current context."""


@functools.cache
def _encoder() -> Any:
    try:
        function = ctypes.CDLL("libcuda.so.1").cuTensorMapEncodeTiled
    except (OSError, AttributeError) as error:
        raise DeviceError(f"tensor maps need the NVIDIA driver of CUDA 12 or later ({error})") from error
    function.restype = ctypes.c_int
    return function


def problems(address: int, argument: TensorMapArg) -> list[str]:
    """Every rule of cuTensorMapEncodeTiled that this map breaks."""
    itemsize = argument.operand.dtype.itemsize
    rank = len(argument.dims)
    found = []
    if not 1 <= rank <= 5 or len(argument.box) != rank or len(argument.strides) != rank - 1:
        found.append(f"rank {rank} with {len(argument.box)} box sizes and {len(argument.strides)} strides")
    if address % 16:
        found.append(f"address {address:#x} is not a multiple of 16")
    strides = [stride for stride in argument.strides if stride % 16 or not 0 <= stride < 1 << 40]
    found += [f"stride {stride} is not a multiple of 16 below 2^40" for stride in strides]
    found += [
        f"extent {extent} is not in 1 .. 2^32" for extent in argument.dims if not 1 <= extent <= 1 << 32
    ]
    found += [f"box size {size} is not in 1 .. 256" for size in argument.box if not 1 <= size <= 256]
    if argument.swizzle not in _SWIZZLES:
        found.append(f"swizzle {argument.swizzle} is not 0, 32, 64 or 128")
    elif argument.box:
        inner = argument.box[0] * itemsize
        if inner % 16:
            found.append(f"inner box of {inner} bytes is not a multiple of 16")
        if argument.swizzle and inner > argument.swizzle:
            found.append(f"inner box of {inner} bytes is wider than the swizzle of {argument.swizzle}")
    return found


@functools.lru_cache(maxsize=4096)
def encode(address: int, argument: TensorMapArg) -> bytes:
    """The 128 bytes of a tiled tensor map over GPU memory at `address`.  LaunchError with every broken rule;
    NoContextError in a thread that has not used CUDA yet, where no map can be encoded."""
    return _encode(_encoder(), (), address, argument)


@functools.lru_cache(maxsize=256)
def encode_simulated(address: int, argument: TensorMapArg) -> bytes:
    """The same over CPU memory, for the simulated device."""
    from cki.sim import runtime

    return _encode(runtime.library().cki_sim_tensor_map_encode_tiled, (None, 0), address, argument)


def _encode(encoder: Any, more: tuple[Any, ...], address: int, argument: TensorMapArg) -> bytes:
    broken = problems(address, argument)
    status = 0
    memory = ctypes.create_string_buffer(256)
    place = (ctypes.addressof(memory) + 127) // 128 * 128
    if not broken:
        rank = len(argument.dims)
        status = encoder(
            ctypes.c_void_p(place), _TYPES[argument.operand.dtype.name], rank, ctypes.c_void_p(address),
            (ctypes.c_uint64 * rank)(*argument.dims), (ctypes.c_uint64 * max(rank - 1, 1))(*argument.strides),
            (ctypes.c_uint32 * rank)(*argument.box), (ctypes.c_uint32 * rank)(*[1] * rank),
            0, _SWIZZLES[argument.swizzle], _L2_PROMOTION_256B, 0, *more,
        )  # fmt: skip
    if broken or status != 0:
        listed = "".join(f"\n  - {problem}" for problem in broken) or f" (driver status {status})"
        kind = NoContextError if status == _INVALID_CONTEXT else LaunchError
        raise kind(f"no tensor map for {argument.operand.slot} with dims {argument.dims}{listed}")
    return ctypes.string_at(place, 128)
