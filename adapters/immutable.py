"""Arguments of frameworks whose tensors cannot be written in place, JAX and TensorFlow."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from cki.errors import InvalidArgumentError, InvalidTypeError
from cki.memory.views import CacheTensor


def immutable_output(name: str, tensor: str) -> str:
    """Why a tensor of such a framework is no output.  tensor: "JAX array"."""
    return (
        f"{name} is a {tensor}, which is immutable; leave {name}= out and use what is returned (a kernel of your own "
        "returns it as cki.load(...).operation(rule))"
    )


def framework_tensors(
    operation: str, value: Any, convert: Callable[[Any], Any], tensors: str, hint: str
) -> Any:
    """An argument with NumPy arrays converted, also inside a cache's tuple; a PagedKVCache's own tensors are refused.

    tensors: the framework's tensors by name, for the refusal; hint: what to give in place of such a cache.
    """
    if isinstance(value, np.ndarray):
        return convert(value)
    if isinstance(value, CacheTensor) or (
        isinstance(value, tuple) and any(isinstance(item, CacheTensor) for item in value)
    ):
        raise InvalidTypeError(
            f"{operation}: a cache of PagedKVCache, which is written in place; {tensors} are immutable",
            hint=hint,
        )
    if type(value) in (tuple, list) and any(isinstance(item, np.ndarray) for item in value):
        return tuple(framework_tensors(operation, item, convert, tensors, hint) for item in value)
    return value


def refuse_in_program(
    call: str,
    outs: Sequence[Any],
    stream: Any,
    runtime: str,
    tensors: str,
    problems: Sequence[tuple[str, str]] = (),
) -> None:
    """Raise InvalidArgumentError where a traced call is given what the program's runtime decides itself.

    call: "layer_norm inside a tf.function".  runtime: who launches.  tensors: "JAX arrays are immutable".
    problems: what else is wrong, and what would be right.
    """
    found = []
    if stream is not None:
        found.append((f"stream is {stream!r}, but {runtime} launches on its own stream", "no stream="))
    if any(out is not None for out in outs):
        found.append((f"an output tensor is given, but {tensors}", "no out=; use what is returned"))
    found += problems
    if found:
        raise InvalidArgumentError(
            call, [problem for problem, _ in found], "; ".join(hint for _, hint in found)
        )
