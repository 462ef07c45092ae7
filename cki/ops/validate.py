"""Looking at values in device memory, for `CKI_VALIDATE=1`: it waits for the device, so nothing else does it."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import Any

import numpy as np

from cki import capture_state
from cki.adapter import adapter_of
from cki.errors import UnsupportedError
from cki.tensor import TensorView

#: All functions that look at values.
readers: list[Callable[..., None]] = []


def reads_values(validate: Callable[..., None]) -> Callable[..., None]:
    """For a function that looks at values: torch.compile ends its graph there, and calls it between two."""

    def outside_graphs(*args: Any, **kwargs: Any) -> None:
        from cki.adapters.torch_ops import validate_outside_graphs

        validate_outside_graphs(validate, *args, **kwargs)

    validate._torchdynamo_inline = outside_graphs  # type: ignore[attr-defined]
    readers.append(validate)
    return validate


def shape_of(tensor: Any) -> tuple[int, ...]:
    """A tensor's shape, or () for what is no tensor: the rules of the operation refuse that, with the rest.

    Raises UnsupportedError for a tensor of a program that is being traced with unknown extents.
    """
    found = getattr(tensor, "shape", ())
    try:
        extents = tuple(found)
    except ValueError:  # TensorFlow's, of unknown rank
        extents = (None,)
    if None in extents:
        raise _untimely(f"an argument of shape {found}")
    return extents


def host_values(tensor: Any, name: str) -> np.ndarray[Any, Any]:
    """A copy of a tensor's values in host memory, after everything launched on its device has ended.

    name: the argument's name, for errors.  Raises UnsupportedError inside `cki.capture`, and for a tensor of a trace.
    """
    if capture_state.current.get() is not None:
        raise UnsupportedError(
            f"CKI_VALIDATE=1 reads {name}, which waits for the device: not inside cki.capture",
            hint="validate before the capture",
        )
    adapter = adapter_of(tensor, name)
    if adapter.is_symbolic(tensor):
        raise _untimely(name)
    view = adapter.view(tensor)
    if view.size == 0:
        return np.empty(view.shape, view.dtype.numpy)
    if view.device.kind == "cpu":
        return _strided(view).copy()
    import cupy

    with cupy.cuda.Device(view.device.index):
        cupy.cuda.runtime.deviceSynchronize()
        memory = cupy.cuda.UnownedMemory(view.ptr, _span(view), tensor)
        array = cupy.ndarray(
            view.shape, view.dtype.numpy, cupy.cuda.MemoryPointer(memory, 0), strides=_byte_strides(view)
        )
        return np.asarray(cupy.asnumpy(array))


def block_problems(
    table: np.ndarray[Any, Any], lengths: np.ndarray[Any, Any], cache_shape: tuple[int, ...], queries: list[int],
    left: int,
) -> list[str]:  # fmt: skip
    """What is wrong with a paged cache's `seq_lens` and `block_table`, sequence by sequence.

    table: [batch, columns].  lengths: [batch].  cache_shape: (blocks, block_size, ...).  queries: of each sequence, its
    last tokens.  left: keys before itself that a query sees, -1 for all; blocks of none but earlier keys are not read
    and may be anything.
    """
    blocks, block_size = cache_shape[:2]
    problems = []
    for sequence, (length, count) in enumerate(zip(lengths.tolist(), queries)):
        if not 0 <= length <= table.shape[1] * block_size:
            problems.append(
                f"seq_lens[{sequence}] is {length}, block_table has {table.shape[1]} columns of blocks of {block_size}"
            )
            continue
        first = max(length - count - left, 0) // block_size if left >= 0 else 0
        used = table[sequence, first : -(-length // block_size)]
        outside = used[(used < 0) | (used >= blocks)]
        if outside.size:
            problems.append(
                f"block_table[{sequence}] holds {int(outside[0])} within its length, the cache has {blocks} blocks"
            )
    return problems


def _untimely(what: str) -> UnsupportedError:
    return UnsupportedError(
        f"CKI_VALIDATE=1 reads {what}, which has values only when the program runs, not while it is traced",
        hint="CKI_VALIDATE=0 for programs of jax.jit, tf.function and torch.export; or the call outside of them",
    )


def _byte_strides(view: TensorView) -> tuple[int, ...]:
    return tuple(stride * view.dtype.itemsize for stride in view.strides)


def _span(view: TensorView) -> int:
    """Bytes from the first element to the end of the furthest."""
    reach = sum(max(stride, 0) * (extent - 1) for stride, extent in zip(view.strides, view.shape))
    return (reach + 1) * view.dtype.itemsize


def _strided(view: TensorView) -> np.ndarray[Any, Any]:
    below = sum(min(stride, 0) * (extent - 1) for stride, extent in zip(view.strides, view.shape))
    start = view.ptr + below * view.dtype.itemsize
    memory = (ctypes.c_char * (_span(view) - below * view.dtype.itemsize)).from_address(start)
    return np.ndarray(
        view.shape,
        view.dtype.numpy,
        memoryview(memory).cast("B"),
        -below * view.dtype.itemsize,
        strides=_byte_strides(view),
    )
