"""A model file's weights by Hugging Face's names, read one at a time at the moment they are asked for.

Every weight's name, shape and type is checked against the configuration when the file is opened, so nothing can go
wrong half-way: a model is whole, or one error says everything that is wrong with its files.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from cki import dtypes
from cki.engine.config import ModelConfig
from cki.engine.names import canonical, expected_weights, is_computed
from cki.engine.quantized import Array, QuantizedWeight
from cki.problems import Problems

#: Names that a message lists before it only counts.
_LISTED = 8


@dataclass(frozen=True)
class StoredTensor:
    """One tensor of a file.

    name: Hugging Face's, or the file's own where it has no such name.  label: the file's own name and the file, for
    messages.  shape: as Hugging Face has it.  dtype: "f32", "bf16", "e4m3", "q4_0", ...  read: its numbers, as floats;
    a view of the file where these are stored plainly.  quantized: its e4m3 codes and scales, where it has some.
    problem: why the model cannot be read if this is a weight of it.
    """

    name: str
    label: str
    shape: tuple[int, ...]
    dtype: str
    read: Callable[[], Array]
    quantized: Callable[[], QuantizedWeight] | None = None
    problem: str = ""


class WeightFile(Mapping[str, Array]):
    """Weights by name; a NumPy array each.  Arrays may be read-only, and keep the file mapped as long as they live."""

    def __init__(self, tensors: Mapping[str, StoredTensor]) -> None:
        self._tensors = dict(tensors)

    def __getitem__(self, name: str) -> Array:
        """f32, f16 or bf16.  Read now: a view of the file, or a new f32 array for what is stored in 8 bits or 4."""
        return self._tensors[name].read()

    def __iter__(self) -> Iterator[str]:
        return iter(self._tensors)

    def __len__(self) -> int:
        return len(self._tensors)

    def __contains__(self, name: object) -> bool:  # that of Mapping would read the weight
        return name in self._tensors

    def shape(self, name: str) -> tuple[int, ...]:
        """Of a weight, without reading it."""
        return self._tensors[name].shape

    def dtype(self, name: str) -> str:
        """How the file stores a weight: "f32", "bf16", "e4m3", "q8_0", ..."""
        return self._tensors[name].dtype

    def quantized(self, name: str) -> QuantizedWeight | None:
        """A weight's e4m3 codes and block scales; None where the file has it in another form."""
        quantized = self._tensors[name].quantized
        return None if quantized is None else quantized()

    def close(self) -> None:
        """Forget the files.  Arrays that were read stay valid."""
        self._tensors.clear()


def matched(
    tensors: Iterable[StoredTensor],
    config: ModelConfig,
    problems: Problems,
    shown: Callable[[str], str] = str,
) -> dict[str, StoredTensor]:
    """The model's weights among a file's tensors, by Hugging Face's names.

    Notes every one that is missing, doubled, of a wrong shape or that the model has no place for.
    shown: what the file would call a weight of that name.
    """
    wanted = expected_weights(config)
    found: dict[str, StoredTensor] = {}
    unexpected = []
    for tensor in tensors:
        name = canonical(tensor.name, wanted)
        if name in found:
            problems.note(f"{tensor.label} and {found[name].label} are the same weight")
        elif name in wanted:
            found[name] = tensor
            if tensor.problem:
                problems.note(tensor.problem)
            if tensor.shape != wanted[name]:
                problems.note(
                    f"{tensor.label} has shape {tensor.shape}, the configuration says {wanted[name]}"
                )
        elif not is_computed(tensor.name, config):
            unexpected.append(f"{tensor.label} has no place in a {config.architecture} model of this kind")
    missing = [f"{shown(name)} {shape} is missing" for name, shape in wanted.items() if name not in found]
    for listed in (missing, unexpected):
        for problem in listed[:_LISTED]:
            problems.note(problem)
        if len(listed) > _LISTED:
            problems.note(f"... and {len(listed) - _LISTED} more like it")
    return {name: found[name] for name in wanted if name in found}


def checked_arrays(weights: Any, config: ModelConfig) -> Mapping[str, Array]:
    """The model's weights among arrays by name.  InvalidTypeError or InvalidArgumentError with all that is wrong."""
    if isinstance(weights, WeightFile):  # checked when it was opened
        return weights
    problems = Problems(f"these weights are not those of the {config.architecture} model")
    if not isinstance(weights, Mapping):
        problems.note_type(
            f"weights is a {type(weights).__name__}", "Hugging Face's names to NumPy arrays, or a function"
        )
        problems.refuse()
    floats = (*(np.dtype(kind) for kind in "fed"), dtypes.bf16.numpy)
    arrays = {}
    for name, array in weights.items():
        if not isinstance(array, np.ndarray):
            problems.note_type(f"{name} is a {type(array).__name__}, not a NumPy array")
        elif array.dtype.newbyteorder("=") not in floats:
            problems.note_type(f"{name} is of {array.dtype}, not f32, f16, bf16 or f64")
        else:
            arrays[str(name)] = array
    stored = [StoredTensor(n, n, a.shape, str(a.dtype), lambda array=a: array) for n, a in arrays.items()]  # type: ignore[misc]
    found = matched(stored, config, problems)
    problems.refuse()
    return WeightFile(found)


def widened(array: Array) -> Array:
    """As f32, unless it is f32, f16 or bf16 already; at an address that its type allows."""
    if array.dtype in (np.float32, np.float16, dtypes.bf16.numpy):
        return array if array.flags.aligned else array.copy()
    return array.astype(np.float32)
