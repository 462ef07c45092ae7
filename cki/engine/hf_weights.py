"""The weights of a Hugging Face folder: one or several safetensors files, plain or FP8 with block scales."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from cki import dtypes
from cki.engine.quantized import BLOCK, Array, QuantizedWeight, dequantize_blocks, scales_shape
from cki.engine.safetensors_file import RawTensor, read_header
from cki.engine.weights import StoredTensor, widened
from cki.errors import InvalidArgumentError, UnsupportedError
from cki.problems import Problems

_INDEX = "model.safetensors.index.json"
_SCALES = "_scale_inv"  # after the weight's name
_FLOATS = (dtypes.f32, dtypes.f16, dtypes.bf16)


def check_quantization(config: Mapping[str, Any]) -> None:
    """Raises UnsupportedError if config.json says that weights are quantised in another way than e4m3 blocks."""
    stated = config.get("quantization_config")
    if stated is None:
        return
    reasons = []
    if not isinstance(stated, Mapping):
        reasons.append(f"quantization_config is {stated!r}, not an object")
    else:
        method, size = stated.get("quant_method"), stated.get("weight_block_size")
        if method != "fp8":
            reasons.append(f"quantization_config has quant_method {method!r}, not 'fp8'")
        elif not isinstance(size, (list, tuple)) or list(size) != [BLOCK, BLOCK]:
            reasons.append(f"quantization_config has weight_block_size {size!r}, not [{BLOCK}, {BLOCK}]")
    if reasons:
        raise UnsupportedError(
            "the weights are quantised in a form that the engine does not read", reasons,
            'the unquantised model, with quantize="fp8" if it is to be small',
        )  # fmt: skip


def weight_paths(folder: Path) -> list[Path]:
    """The folder's weight files: those of its index, else model.safetensors, else every *.safetensors.

    Raises InvalidArgumentError where there is none, or one of the index is missing.
    """
    index = folder / _INDEX
    if index.is_file():
        return _indexed(index)
    single = folder / "model.safetensors"
    if single.is_file():
        return [single]
    every = sorted(folder.glob("*.safetensors"))
    # Mistral's folders have the same weights a second time, under other names.
    found = [path for path in every if not path.name.startswith("consolidated")] or every
    if not found:
        others = sorted({path.name for kind in ("*.bin", "*.pt", "*.pth") for path in folder.glob(kind)})
        raise InvalidArgumentError(
            f"{folder} has no *.safetensors" + (f", only {', '.join(others[:5])}" if others else ""),
            hint="model.save_pretrained(folder) of transformers writes them" if others else "",
        )
    return found


def _indexed(index: Path) -> list[Path]:
    try:
        weight_map = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
        names = sorted(set(weight_map.values()))
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise InvalidArgumentError(
            f"{index} has no weight_map of tensors to files ({error!r:.200})"
        ) from error
    problems = Problems(f"{index} names files that are not there")
    for name in names:
        # A name with folders could lead out of this one.
        if not isinstance(name, str) or Path(name).name != name:
            problems.note(f"{name!r} is no name of a file in this folder")
        elif not (index.parent / name).is_file():
            tensors = [tensor for tensor, file in weight_map.items() if file == name]
            problems.note(f"{name} is missing; it holds {tensors[0]} and {len(tensors) - 1} more")
    problems.refuse()
    return [index.parent / name for name in names]


def stored_tensors(paths: list[Path]) -> list[StoredTensor]:
    """All tensors of those files but the scales, which go to their weights."""
    tensors = [tensor for path in paths for tensor in read_header(path).values()]
    weights = {tensor.name for tensor in tensors}
    scales = {
        tensor.name: tensor
        for tensor in tensors
        if tensor.name.endswith(_SCALES) and tensor.name.removesuffix(_SCALES) in weights
    }
    return [
        _stored(tensor, scales.get(f"{tensor.name}{_SCALES}"))
        for tensor in tensors
        if tensor.name not in scales
    ]


def _stored(tensor: RawTensor, scale: RawTensor | None) -> StoredTensor:
    if tensor.dtype is dtypes.e4m3 and scale is not None:
        return _stored_blocks(tensor, scale)
    problem = ""
    if tensor.dtype is dtypes.e4m3:
        problem = f"{tensor.label} {tensor.shape} is e4m3 and has no {tensor.name}{_SCALES}"
    elif scale is not None or tensor.dtype not in _FLOATS:
        what = "has scales, but is" if scale is not None else "is"
        problem = f"{tensor.label} {tensor.shape} {what} {tensor.dtype}, not f32, f16, bf16 or e4m3"

    def read() -> Array:
        return widened(tensor.array())

    return StoredTensor(tensor.name, tensor.label, tensor.shape, tensor.dtype.name, read, problem=problem)


def _stored_blocks(tensor: RawTensor, scale: RawTensor) -> StoredTensor:
    problem, wanted = "", scales_shape(tensor.shape)
    if len(tensor.shape) != 2 or scale.shape != wanted or scale.dtype not in _FLOATS:
        problem = (
            f"{scale.label} is {scale.dtype} {scale.shape}, not f32, f16 or bf16 {wanted} as blocks of {BLOCK} in "
            f"{tensor.shape} need"
        )

    def quantized() -> QuantizedWeight:
        return QuantizedWeight(tensor.array(), scale.array().astype(np.float32))

    def read() -> Array:
        return dequantize_blocks(quantized())

    return StoredTensor(tensor.name, tensor.label, tensor.shape, "e4m3", read, quantized, problem)
