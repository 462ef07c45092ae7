"""A GGUF file's decoder: its configuration from the metadata, its weights under Hugging Face's names.

llama.cpp's converter changes two things.  Matrices of Llama's queries and keys have each head's rows in another order:
llama.cpp rotates neighbours (0, 1), (2, 3), ... where Hugging Face rotates (i, i + head_dim / 2); the order is undone
here.  Llama 3.1's RoPE scaling is not in the metadata: it becomes a tensor of divisors, one for each frequency.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np

from cki.engine.config import ModelConfig
from cki.engine.config_reader import read_config
from cki.engine.gguf_file import Gguf, GgufTensor
from cki.engine.gguf_types import floats
from cki.engine.names import EMBEDDING, FINAL_NORM, HEAD
from cki.engine.quantized import Array
from cki.engine.weights import StoredTensor, WeightFile, matched, widened
from cki.errors import InvalidArgumentError, UnsupportedError
from cki.problems import Problems

#: general.architecture that the engine runs; Mistral's files say llama.
_ARCHITECTURES = ("llama", "qwen2", "qwen3")
_DIVISORS = "rope_freqs.weight"
_MODEL_NAMES = {EMBEDDING: "token_embd.weight", FINAL_NORM: "output_norm.weight", HEAD: "output.weight"}
_LAYER_NAMES = {
    "input_layernorm": "attn_norm", "post_attention_layernorm": "ffn_norm",
    "self_attn.q_proj": "attn_q", "self_attn.k_proj": "attn_k", "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output", "self_attn.q_norm": "attn_q_norm", "self_attn.k_norm": "attn_k_norm",
    "mlp.gate_proj": "ffn_gate", "mlp.up_proj": "ffn_up", "mlp.down_proj": "ffn_down",
}  # fmt: skip
_HF_LAYER_NAMES = {name: hf for hf, name in _LAYER_NAMES.items()}
_HF_MODEL_NAMES = {name: hf for hf, name in _MODEL_NAMES.items()}
#: Hugging Face's name of a number -> GGUF's, after the architecture.
_KEYS = {
    "hidden_size": "embedding_length", "num_hidden_layers": "block_count", "intermediate_size": "feed_forward_length",
    "num_attention_heads": "attention.head_count", "num_key_value_heads": "attention.head_count_kv",
    "max_position_embeddings": "context_length", "rms_norm_eps": "attention.layer_norm_rms_epsilon",
    "rope_theta": "rope.freq_base",
}  # fmt: skip
_TOKENS = {"bos_token_id": "bos_token_id", "pad_token_id": "padding_token_id"}
_ENDS = ("eos_token_id", "eot_token_id", "eom_token_id")
#: Words that end an answer in every model that has them as control tokens, whether or not the metadata says so.
_END_WORDS = ("<|im_end|>", "<|endoftext|>", "<|eot_id|>", "<|eom_id|>", "<|end_of_text|>")
_CONTROL = 3  # token_type


def hf_name(name: str) -> str:
    """Hugging Face's name of a GGUF tensor; the name itself where it has none."""
    parts = name.split(".")
    if len(parts) == 4 and parts[0] == "blk" and parts[1].isdecimal() and parts[2] in _HF_LAYER_NAMES:
        return f"model.layers.{int(parts[1])}.{_HF_LAYER_NAMES[parts[2]]}.{parts[3]}"
    return _HF_MODEL_NAMES.get(name, name)


def gguf_name(name: str) -> str:
    """GGUF's name of a weight that has Hugging Face's."""
    if name in _MODEL_NAMES:
        return _MODEL_NAMES[name]
    _, _, layer, rest = name.split(".", 3)
    stem, _, leaf = rest.rpartition(".")
    return f"blk.{layer}.{_LAYER_NAMES[stem]}.{leaf}"


def gguf_config(gguf: Gguf) -> ModelConfig:
    """Errors as of `ModelConfig.from_hf`, with the file's names of what is wrong."""
    metadata, path = gguf.metadata, gguf.path
    kind = metadata.get("general.architecture")
    if kind not in _ARCHITECTURES:
        raise UnsupportedError(
            f"{path} is of no architecture that the engine runs", [f"general.architecture is {kind!r}"],
            f"one of {', '.join(_ARCHITECTURES)} (Mistral and SmolLM2 are llama)",
        )  # fmt: skip
    for key, what in (("split.count", "parts"), (f"{kind}.expert_count", "experts")):
        if metadata.get(key, 0) not in (0, 1):
            hint = "llama-gguf-split --merge makes one file of it" if what == "parts" else "a dense model"
            raise UnsupportedError(
                f"{path} is of {metadata[key]} {what}", [f"{key} is {metadata[key]}"], hint
            )
    shown = {hf: f"{kind}.{key}" for hf, key in _KEYS.items()}
    shown |= {hf: f"tokenizer.ggml.{key}" for hf, key in _TOKENS.items()}
    values = {hf: metadata.get(key) for hf, key in shown.items()}
    values |= {
        "model_type": kind,
        "tie_word_embeddings": "output.weight" not in gguf.tensors,
        "dtype": _dtype(gguf),
    }
    values["attention_bias"] = "blk.0.attn_q.bias" in gguf.tensors
    values["mlp_bias"] = "blk.0.ffn_down.bias" in gguf.tensors
    embedding = gguf.tensors.get("token_embd.weight")
    values["vocab_size"] = None if embedding is None else embedding.shape[0]
    shown |= {"vocab_size": "token_embd.weight", "head_dim": f"{kind}.attention.key_length"}
    values["head_dim"] = _head_dim(metadata, kind, path)
    values["eos_token_id"] = _ends(metadata)
    values |= _window(metadata, kind)
    values["rope_scaling"] = _rope_scaling(gguf, kind)
    return read_config(values, source=str(path), shown=shown)


def gguf_weights(gguf: Gguf, config: ModelConfig) -> WeightFile:
    """Raises InvalidArgumentError with every tensor that is missing, not of the model, or wrongly shaped."""
    stored = [
        _stored(tensor, gguf.metadata["general.architecture"], config)
        for name, tensor in gguf.tensors.items()
        if name != _DIVISORS
    ]
    problems = Problems(f"the tensors of {gguf.path} are not those of its model")
    found = matched(stored, config, problems, gguf_name)
    problems.refuse()
    return WeightFile(found)


def _stored(tensor: GgufTensor, kind: str, config: ModelConfig) -> StoredTensor:
    name = hf_name(tensor.name)
    heads = 0
    if kind == "llama" and ".self_attn.q_proj." in name:
        heads = config.num_heads
    elif kind == "llama" and ".self_attn.k_proj." in name:
        heads = config.num_kv_heads

    def read() -> Array:
        rows = floats(tensor.blocks(), tensor.type).reshape(tensor.shape)
        return widened(rotate_half_order(rows, heads) if heads else rows)

    return StoredTensor(name, tensor.label, tensor.shape, tensor.type.name.lower(), read)


def rotate_half_order(rows: Array, heads: int) -> Array:
    """Each head's rows from the order 0, d/2, 1, d/2 + 1, ... to 0, 1, ..., as Hugging Face has them."""
    pairs = rows.reshape(heads, -1, 2, *rows.shape[1:])
    return np.ascontiguousarray(pairs.swapaxes(1, 2)).reshape(rows.shape)


def _dtype(gguf: Gguf) -> str:
    """What a model's matrices are kept in; those of 8 and 4 bits were bf16 with few exceptions."""
    tensor = gguf.tensors.get("blk.0.attn_q.weight")
    return {"F32": "f32", "F16": "f16"}.get(tensor.type.name if tensor else "", "bf16")


def _head_dim(metadata: Mapping[str, Any], kind: str, path: Any) -> int | None:
    stated, rotated = (
        metadata.get(f"{kind}.{key}") for key in ("attention.key_length", "rope.dimension_count")
    )
    values = metadata.get(f"{kind}.attention.value_length", stated)
    heads, hidden = (metadata.get(f"{kind}.{key}") for key in ("attention.head_count", "embedding_length"))
    if stated is None and isinstance(heads, int) and isinstance(hidden, int) and heads > 0:
        stated = hidden // heads if hidden % heads == 0 else rotated
    if stated is not None and (values not in (None, stated) or rotated not in (None, stated)):
        raise UnsupportedError(
            f"the engine does not run {path}",
            [f"keys have {stated} numbers, values {values or stated}, RoPE rotates {rotated or stated}"],
            "a model where all three are equal",
        )
    return stated


def _ends(metadata: Mapping[str, Any]) -> list[Any]:
    ends = [metadata[f"tokenizer.ggml.{key}"] for key in _ENDS if f"tokenizer.ggml.{key}" in metadata]
    words, kinds = metadata.get("tokenizer.ggml.tokens", []), metadata.get("tokenizer.ggml.token_type", [])
    if isinstance(words, list) and len(kinds) == len(words):
        # Control tokens are few and cheap to find among 10**5.
        control = {words[token]: int(token) for token in np.flatnonzero(np.asarray(kinds) == _CONTROL)}
        ends += [control[word] for word in _END_WORDS if word in control]
    return ends


def _window(metadata: Mapping[str, Any], kind: str) -> dict[str, Any]:
    """llama.cpp's converter writes a window for few models; files of Mistral, which say llama, have one at most in all
    layers."""
    window = metadata.get(f"{kind}.attention.sliding_window")
    if not window:
        return {"sliding_window": None}
    if kind == "llama":
        return {"model_type": "mistral", "sliding_window": window}
    return {"use_sliding_window": True, "sliding_window": window, "max_window_layers": 0}


def _rope_scaling(gguf: Gguf, kind: str) -> dict[str, Any] | None:
    divisors = gguf.tensors.get(_DIVISORS)
    if divisors is not None:
        if divisors.type.name != "F32":
            raise InvalidArgumentError(f"{divisors.label} {divisors.shape} is {divisors.type.name}, not F32")
        factors = tuple(float(factor) for factor in floats(divisors.blocks(), divisors.type).ravel())
        return {"rope_type": "factors", "frequency_factors": factors}
    metadata = gguf.metadata
    start = f"{kind}.rope.scaling."
    scaling = metadata.get(f"{start}type", "none")
    factor = metadata.get(f"{start}factor", metadata.get(f"{kind}.rope.scale_linear"))
    if scaling == "none":
        return None
    if scaling != "yarn":
        return {"rope_type": scaling, "factor": factor}
    original = metadata.get(f"{start}original_context_length")
    given = {"rope_type": "yarn", "factor": factor, "original_max_position_embeddings": original}
    given |= {key: metadata.get(f"{start}yarn_{key}") for key in ("beta_fast", "beta_slow")}
    # llama.cpp multiplies this onto YaRN's own factor.
    extra = metadata.get(f"{start}attn_factor", metadata.get(f"{start}yarn_attn_factor"))
    if isinstance(extra, float) and isinstance(factor, float) and factor > 1:
        given["attention_factor"] = extra * (0.1 * math.log(factor) + 1.0)
    return {key: value for key, value in given.items() if value is not None}
