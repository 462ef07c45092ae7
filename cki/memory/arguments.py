"""The arguments of a paged KV cache: every rule, checked before any memory is taken; and checks that the
memory classes share."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np

from cki import capture_state, driver, dtypes
from cki.device import current
from cki.dtypes import DType
from cki.errors import InvalidArgumentError, UnsupportedError
from cki.memory.storage import MAX_HEAD_DIM, CacheShape

DTYPES = (dtypes.f16, dtypes.bf16, dtypes.f32, dtypes.e4m3)
#: Tokens for which a block table has columns when nothing else is said.
DEFAULT_TOKENS = 32768


class Checked(NamedTuple):
    """Arguments that hold together.  static_scales: of keys and values, fp32 [num_layers, num_kv_heads]."""

    shape: CacheShape
    num_blocks: int
    max_num_blocks: int
    static_scales: tuple[np.ndarray, np.ndarray] | None


def as_dtype(dtype: Any) -> DType:
    """The element type that a name, a NumPy or torch dtype or a DType stands for.  InvalidTypeError for others."""
    if isinstance(dtype, DType):
        return dtype
    name = str(dtype)
    if isinstance(dtype, str) or name.startswith("torch."):
        return dtypes.from_name(name.removeprefix("torch."))
    return dtypes.from_numpy(dtype)


def check(
    *,
    num_layers: Any,
    num_blocks: Any,
    nbytes: Any,
    block_size: Any,
    num_kv_heads: Any,
    head_dim: Any,
    dtype: Any,
    value_head_dim: Any,
    max_sequences: Any,
    max_blocks_per_sequence: Any,
    max_step_tokens: Any,
    max_num_blocks: Any,
    window_left: Any,
    static_scales: Any,
) -> Checked:
    """The arguments of PagedKVCache, defaults filled in; InvalidArgumentError with every rule that is broken."""
    problems = []
    value_head_dim = head_dim if value_head_dim is None else value_head_dim
    required = {
        "num_layers": num_layers, "block_size": block_size, "num_kv_heads": num_kv_heads, "head_dim": head_dim,
        "value_head_dim": value_head_dim, "max_sequences": max_sequences, "max_step_tokens": max_step_tokens,
    }  # fmt: skip
    optional = {
        "num_blocks": num_blocks, "max_num_blocks": max_num_blocks, "max_blocks_per_sequence": max_blocks_per_sequence,
    }  # fmt: skip
    sizes = {**required, **{name: value for name, value in optional.items() if value is not None}}
    problems += [f"{name}={value!r} is not {SIZE}" for name, value in sizes.items() if not is_size(value)]
    problems += [
        f"{name}={sizes[name]!r} is more than the {MAX_HEAD_DIM} that kernels read"
        for name in ("head_dim", "value_head_dim")
        if is_size(sizes[name]) and sizes[name] > MAX_HEAD_DIM
    ]
    try:
        element = as_dtype(dtype)
    except TypeError:
        element = dtypes.u8
    if element not in DTYPES:
        problems.append(f"dtype={dtype!r} is none of {', '.join(map(repr, DTYPES))}")
    if (num_blocks is None) == (nbytes is None):
        problems.append("one of num_blocks and bytes is needed, not both")
    if nbytes is not None and (not is_integer(nbytes) or nbytes < 1):
        problems.append(f"bytes={nbytes!r} is not a positive integer")
    if window_left is not None and not (is_integer(window_left) and 0 <= window_left < 2**31):
        problems.append(f"window_left={window_left!r} is not an integer from 0 to 2^31 - 1")
    scales = _static_scales(static_scales, (num_layers, num_kv_heads), problems)
    if static_scales is not None and element is not dtypes.e4m3:
        problems.append(f"static_scales belong to dtype e4m3, not {element}")
    if problems:
        raise _refusal(problems)

    shape = CacheShape(
        num_layers=int(num_layers), block_size=int(block_size), num_kv_heads=int(num_kv_heads), head_dim=int(head_dim),
        value_head_dim=int(value_head_dim), dtype=element, token_scales=element is dtypes.e4m3 and scales is None,
        static_scales=scales is not None, max_sequences=int(max_sequences),
        max_blocks_per_sequence=int(max_blocks_per_sequence or 1), max_step_tokens=int(max_step_tokens),
    )  # fmt: skip
    blocks = int(nbytes) // shape.bytes_per_block if num_blocks is None else int(num_blocks)
    most = blocks if max_num_blocks is None else int(max_num_blocks)
    if not is_size(blocks):
        problems.append(f"bytes={nbytes} is {blocks} blocks of {shape.bytes_per_block} bytes each")
    elif most < blocks:
        problems.append(f"max_num_blocks={max_num_blocks} is below the {blocks} blocks to start with")
    if problems:
        raise _refusal(problems)
    if max_blocks_per_sequence is None:
        columns = min(most, -(-DEFAULT_TOKENS // shape.block_size))
        shape = replace(shape, max_blocks_per_sequence=columns)
    if shape.max_blocks_per_sequence * shape.block_size >= 2**31:
        tokens = shape.max_blocks_per_sequence * shape.block_size
        problems.append(f"max_blocks_per_sequence * block_size = {tokens} tokens do not fit 32-bit lengths")
    problems += table_problems(shape.max_sequences, shape.max_blocks_per_sequence)
    if problems:
        raise _refusal(problems)
    return Checked(shape, blocks, most, scales)


def _refusal(problems: list[str]) -> InvalidArgumentError:
    example = 'PagedKVCache(32, 4096, num_kv_heads=8, head_dim=128, dtype="bf16")'
    return InvalidArgumentError("PagedKVCache: arguments that do not work", problems, example)


def _static_scales(
    scales: Any, shape: tuple[Any, Any], problems: list[str]
) -> tuple[np.ndarray, np.ndarray] | None:
    if scales is None or not all(map(is_size, shape)):
        return None
    try:
        keys, values = (np.broadcast_to(np.asarray(part, np.float32), shape).copy() for part in scales)
    except (TypeError, ValueError, RuntimeError):  # RuntimeError: torch's, of tensors that require grad
        problems.append(
            f"static_scales are not (of keys, of values), each [num_layers, num_kv_heads] = {shape}"
        )
        return None
    for name, part in (("keys", keys), ("values", values)):
        if not (np.isfinite(part) & (part > 0)).all():
            problems.append(f"static_scales of {name} are not all positive and finite")
    return keys, values


def gpu_index(device: int | str | None) -> int | None:
    """The GPU that `device` means, None for the simulated device."""
    kind, _, number = str(device).partition(":")
    if device is None:
        kind, number = current().kind, ""
    elif is_integer(device):
        kind, number = "cuda", str(device)
    if kind == "sim" and not number:
        return None
    if kind != "cuda" or (":" in str(device) and not number.isdecimal()):
        raise InvalidArgumentError(f"device={device!r}", hint='"sim", "cuda", "cuda:1" or the index of a GPU')
    index = int(number) if number else max(driver.current_device(), 0)
    return driver.device_info(index).index


def from_config(config: Any, num_blocks: int | None, options: Mapping[str, Any]) -> dict[str, Any]:
    """Arguments of PagedKVCache for a Hugging Face config or a dict of one; `options` take precedence."""

    def get(source: Any, name: str) -> Any:
        return source.get(name) if isinstance(source, Mapping) else getattr(source, name, None)

    text = get(config, "text_config") or config  # of models that also see or hear
    heads, hidden = get(text, "num_attention_heads"), get(text, "hidden_size")
    head_dim = get(text, "head_dim")
    if not head_dim and options.get("head_dim") is None and heads and hidden:
        head_dim = _divided(hidden, heads)
    found = {
        "num_layers": get(text, "num_hidden_layers"),
        "num_kv_heads": get(text, "num_key_value_heads") or heads,
        "head_dim": head_dim,
        "dtype": get(text, "dtype") or get(text, "torch_dtype") or "bf16",
    }
    arguments = {**found, **options}
    missing = [name for name in found if arguments[name] is None]
    if missing:
        raise InvalidArgumentError(
            f"the config does not say {', '.join(missing)}",
            hint="a config with num_hidden_layers, num_key_value_heads, head_dim; or these as arguments",
        )
    positions = get(text, "max_position_embeddings")
    block_size = arguments.get("block_size", 16)
    if is_size(positions) and is_size(block_size) and "max_blocks_per_sequence" not in arguments:
        columns = -(-positions // block_size)
        most = arguments.get("max_num_blocks") or num_blocks
        arguments["max_blocks_per_sequence"] = min(columns, most) if is_size(most) else columns
    return arguments


def _divided(hidden_size: Any, num_attention_heads: Any) -> int:
    """The head_dim of a config that does not say it."""
    sizes = {"hidden_size": hidden_size, "num_attention_heads": num_attention_heads}
    problems = [f"{name}={value!r} is not {SIZE}" for name, value in sizes.items() if not is_size(value)]
    if not problems and hidden_size % num_attention_heads:
        problems.append(
            f"hidden_size={hidden_size} is no multiple of num_attention_heads={num_attention_heads}"
        )
    if problems:
        raise InvalidArgumentError(
            "the config does not say head_dim, and its sizes do not give it", problems,
            "a config with head_dim; or head_dim= as an argument",
        )  # fmt: skip
    return int(hidden_size // num_attention_heads)


def has_driver() -> bool:
    """Whether the CUDA driver was started in this process."""
    return driver.api.cache_info().currsize > 0


def refuse_capture(what: str, stream: int) -> None:
    """UnsupportedError inside a graph capture, by `cki.capture` or of that stream."""
    capturing = capture_state.current.get() is not None
    if not capturing and stream > 2 and has_driver():
        capturing = driver.capturing_graph(stream) is not None
    if capturing:
        raise UnsupportedError(
            f"{what} inside a graph capture: its host work and memory would not be replayed",
            hint="call it before the capture and before each replay; the captured kernels read the tables anew",
        )


#: What `is_size` accepts, in words.
SIZE = "an integer from 1 to 2^31 - 1"


def is_integer(value: Any) -> bool:
    """Whether a value is a Python or NumPy integer (True and False are none)."""
    return isinstance(value, (int, np.integer)) and not isinstance(value, bool)


def is_size(value: Any) -> bool:
    """Whether a value is an integer from 1 to 2^31 - 1."""
    return is_integer(value) and 1 <= value < 2**31


def require_sizes(what: str, sizes: Mapping[str, Any]) -> None:
    """InvalidArgumentError naming every value that is no size."""
    problems = [f"{name}={value!r}" for name, value in sizes.items() if not is_size(value)]
    if problems:
        raise InvalidArgumentError(f"{what}: sizes out of range", problems, f"each {SIZE}")


def table_problems(max_sequences: int, max_blocks_per_sequence: int) -> list[str]:
    """What is wrong with a block table of these extents: one of 2^31 entries or more takes 8 GiB."""
    entries = max_sequences * max_blocks_per_sequence
    if entries < 2**31:
        return []
    product = f"max_sequences={max_sequences} * max_blocks_per_sequence={max_blocks_per_sequence}"
    return [f"{product} = {entries} entries of the block table, not below 2^31"]


def listed(sequences: Any) -> tuple[Any, ...]:
    """Several sequences, or one, as a tuple of what ought to be their ids."""
    if isinstance(sequences, (np.ndarray, np.generic)):
        sequences = sequences.tolist()
    is_one = isinstance(sequences, (str, bytes, bytearray)) or not isinstance(sequences, Iterable)
    return (sequences,) if is_one or getattr(sequences, "ndim", 1) == 0 else tuple(sequences)


def token_counts(
    counts: int | Sequence[int] | np.ndarray, length: int, what: str = "new tokens"
) -> np.ndarray:
    """int64 [length]: a number of tokens for each sequence, from one number or `length` of them.

    None is above 2^31 - 1, so no sum with lengths, and none over a batch, leaves 64 bits.
    """
    if is_integer(counts) and 0 <= counts < 2**31:  # type: ignore[operator]
        return np.full(length, counts, np.int64)
    array = _array(counts)
    if (
        array is None or (array.dtype.kind not in "iu" and array.size) or array.shape != (length,)
        or (array.size and not 0 <= array.min() <= array.max() < 2**31)
    ):  # fmt: skip
        raise InvalidArgumentError(
            f"{what}: {counts!r}",
            hint=f"one integer, 0 or more and below 2^31, for all sequences, or {length} of them",
        )
    return array.astype(np.int64)


def token_ids(tokens: Sequence[int] | np.ndarray) -> np.ndarray:
    """int64 [tokens]: the ids of tokens."""
    ids, hint = _array(tokens), "integers, one for each token, or their number"
    if ids is None:
        raise InvalidArgumentError(f"tokens: {tokens!r}", hint=hint)
    if ids.ndim != 1 or (ids.size and ids.dtype.kind not in "iu"):
        raise InvalidArgumentError(f"tokens: {ids.dtype} of shape {ids.shape}", hint=hint)
    if ids.dtype.kind == "u" and ids.max(initial=0) >= 2**63:
        raise InvalidArgumentError(f"tokens: {ids.max()} among them", hint="ids below 2^63")
    return ids.astype("<i8")


def _array(given: Any) -> np.ndarray | None:
    """As an array; None where it is none (lists of unequal lengths, a tensor on a GPU)."""
    try:
        return np.asarray(given)
    except (TypeError, ValueError, RuntimeError):
        return None
