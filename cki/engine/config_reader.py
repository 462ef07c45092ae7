"""Reads a Hugging Face configuration, old style or new, and says everything that is wrong with it at once.

Absent values are what transformers takes for them.  GGUF metadata is read here too, under Hugging Face's names
(`cki.engine.gguf_model.gguf_config`).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from cki.encoder.config import ACTIVATIONS
from cki.engine.config import ARCHITECTURES, ModelConfig, RopeScaling
from cki.errors import UnsupportedError
from cki.problems import Problems

_DTYPES = {"float32": "f32", "float16": "f16", "bfloat16": "bf16", "f32": "f32", "f16": "f16", "bf16": "bf16"}
_GATED = ("silu", "gelu", "gelu_tanh")
_WINDOW = 4096  # transformers' default for Mistral and Qwen
_MOST = 2**31 - 1
_MOST_LAYERS = 10_000  # more are a broken file, and would take memory before that is found out
_LLAMA_ENDS = {"bos_token_id": 1, "eos_token_id": 2}  # transformers' default for Llama and Mistral


def read_config(
    values: Mapping[str, Any], *, source: str = "this configuration", shown: Mapping[str, str] | None = None
) -> ModelConfig:
    """values: by the names of config.json.  source: what they come from, for messages.  shown: names that the source
    has for them, where others.  Errors as in `ModelConfig.from_hf`."""
    return _Reader(values, source, shown or {}).config()


class _Reader:
    def __init__(self, values: Mapping[str, Any], source: str, shown: Mapping[str, str]) -> None:
        self._values, self._source, self._shown = values, source, shown
        self._problems = Problems(f"{source} makes no decoder")
        self._unsupported: list[str] = []

    def config(self) -> ModelConfig:
        kind = self._values.get("model_type")
        if kind not in ARCHITECTURES:
            what = f"{self._name('model_type')} is {kind!r}" if kind is not None else "no model_type is given"
            raise UnsupportedError(
                f"{self._source} is of no architecture that the engine runs", [what],
                f"one of {', '.join(ARCHITECTURES)} (SmolLM2, Llama 2 and 3, TinyLlama, ... are llama)",
            )  # fmt: skip
        hidden, heads = self._count("hidden_size"), self._count("num_attention_heads")
        layers = self._count("num_hidden_layers", most=_MOST_LAYERS)
        kv_heads = self._count("num_key_value_heads", heads)
        head_dim = self._head_dim(hidden, heads, 128 if kind == "qwen3" else None)
        if heads % kv_heads:
            self._problems.note(
                f"{self._name('num_attention_heads')} {heads} is no multiple of "
                f"{self._name('num_key_value_heads')} {kv_heads}"
            )
        llama_bias = kind in ("llama", "qwen3") and self._flag("attention_bias", False)
        window = self._window(kind)
        found = ModelConfig(
            architecture=kind,
            hidden_size=hidden,
            num_layers=layers,
            num_heads=heads,
            num_kv_heads=kv_heads,
            head_dim=head_dim,
            intermediate_size=self._count("intermediate_size"),
            vocab_size=self._count("vocab_size"),
            rms_norm_eps=self._number("rms_norm_eps", 1e-6),
            rope_theta=0.0,
            rope_scaling=None,
            max_position=self._count("max_position_embeddings"),
            tie_word_embeddings=self._flag("tie_word_embeddings", False),
            attention_bias=kind == "qwen2" or llama_bias,
            attention_output_bias=llama_bias,
            mlp_bias=kind == "llama" and self._flag("mlp_bias", False),
            qk_norm=kind == "qwen3",
            sliding_window=window,
            window_layers=self._window_layers(kind, layers, window),
            activation=self._activation(),
            dtype=self._dtype(),
            bos_id=None,
            eos_ids=(),
            pad_id=None,
        )
        changes = self._rope(found.max_position, head_dim) | self._tokens(kind, found.vocab_size)
        self._problems.refuse()
        if self._unsupported:
            raise UnsupportedError(f"the engine does not run {self._source}", self._unsupported)
        return ModelConfig(**(vars(found) | changes))

    # Values of one kind.

    def _name(self, name: str) -> str:
        return self._shown.get(name, name)

    def _note_missing(self, name: str) -> None:
        self._problems.note(f"{self._name(name)} is missing")

    def _count(self, name: str, default: int | None = None, most: int = _MOST) -> int:
        """A whole number of 1 to `most`."""
        value = self._values.get(name)
        if value is None:
            if default is None:
                self._note_missing(name)
            return default or 1
        if isinstance(value, int) and not isinstance(value, bool) and 1 <= value <= most:
            return value
        self._problems.note(f"{self._name(name)} is {value!r}, not a whole number of 1 to {most}")
        return 1

    def _number(self, name: str, default: float, values: Mapping[str, Any] | None = None) -> float:
        """A finite number above 0."""
        value = (self._values if values is None else values).get(name)
        if value is None:
            return default
        if isinstance(value, (int, float)) and not isinstance(value, bool) and 0 < value < math.inf:
            return float(value)
        self._problems.note(f"{self._name(name)} is {value!r}, not a finite number above 0")
        return default

    def _flag(self, name: str, default: bool) -> bool:
        value = self._values.get(name)
        if value is None:
            return default
        if not isinstance(value, bool):
            self._problems.note(f"{self._name(name)} is {value!r}, not true or false")
            return default
        return value

    # Values that depend on others.

    def _head_dim(self, hidden: int, heads: int, default: int | None) -> int:
        """heads * head_dim need not be hidden_size: Mistral Nemo and Qwen3 say head_dim."""
        if self._values.get("head_dim") is None and default is None and hidden % heads:
            self._problems.note(
                f"{self._name('hidden_size')} {hidden} is no multiple of "
                f"{self._name('num_attention_heads')} {heads}",
                "head_dim says how long heads are",
            )
        head_dim = self._count("head_dim", default or max(hidden // heads, 1))
        if head_dim % 2 and not self._problems.found:
            self._problems.note(f"{self._name('head_dim')} is {head_dim}: RoPE rotates pairs")
        return head_dim

    def _activation(self) -> str:
        value = self._values.get("hidden_act", "silu")
        known = ACTIVATIONS.get(value) if isinstance(value, str) else None
        if known not in _GATED:
            self._unsupported.append(f"{self._name('hidden_act')} is {value!r}, not of {', '.join(_GATED)}")
            return "silu"
        return known

    def _dtype(self) -> str:
        value = self._values.get("dtype") or self._values.get("torch_dtype") or "float32"
        known = _DTYPES.get(str(value).removeprefix("torch."))
        if known is None:
            self._unsupported.append(f"dtype is {value!r}, not of float32, float16, bfloat16")
        return known or "f32"

    def _window(self, kind: str) -> int | None:
        if kind == "llama" or (kind != "mistral" and not self._flag("use_sliding_window", False)):
            return None
        if self._values.get("sliding_window", _WINDOW) is None:
            return None
        return self._count("sliding_window", _WINDOW)

    def _window_layers(self, kind: str, layers: int, window: int | None) -> tuple[bool, ...]:
        """Mistral's window is in all layers, Qwen's in those of layer_types or from max_window_layers on."""
        if window is None:
            return (False,) * layers
        if kind == "mistral":
            return (True,) * layers
        types = self._values.get("layer_types")
        if types is None:
            first = self._values.get("max_window_layers", 28)
            if not isinstance(first, int) or isinstance(first, bool) or first < 0:
                self._problems.note(f"max_window_layers is {first!r}, not a whole number of 0 or more")
                first = 0
            return tuple(layer >= first for layer in range(layers))
        known = ("full_attention", "sliding_attention")
        if not isinstance(types, (list, tuple)) or len(types) != layers or any(t not in known for t in types):
            self._problems.note(f"layer_types is {types!r}, not {layers} of {' or '.join(known)}")
            return (False,) * layers
        return tuple(kind == "sliding_attention" for kind in types)

    def _rope(self, max_position: int, head_dim: int) -> dict[str, Any]:
        """rope_theta, rope_scaling and the max_position that scaling leads to.

        transformers 5 keeps all of RoPE in rope_parameters; before, rope_theta stood beside rope_scaling.
        """
        given = self._values.get("rope_parameters") or self._values.get("rope_scaling") or {}
        if not isinstance(given, Mapping):
            self._problems.note(f"{self._name('rope_scaling')} is {given!r}, not an object")
            given = {}
        theta = self._number("rope_theta", self._number("rope_theta", 10000.0), given)
        if theta <= 1:
            self._problems.note(
                f"{self._name('rope_theta')} is {theta}, not above 1: wavelengths would not grow"
            )
        for partial in (self._values.get("partial_rotary_factor"), given.get("partial_rotary_factor")):
            if partial not in (None, 1, 1.0):
                self._unsupported.append(
                    f"partial_rotary_factor is {partial!r}: only whole heads are rotated"
                )
        kind = given.get("rope_type", given.get("type")) or "default"
        rope = {"rope_theta": theta, "rope_scaling": None, "max_position": max_position}
        if kind == "default":
            return rope
        if kind == "factors":
            factors = given["frequency_factors"]
            if len(factors) != head_dim // 2 or not all(0 < factor < math.inf for factor in factors):
                self._problems.note(
                    f"RoPE has {len(factors)} factors for heads of {head_dim}, or one not above 0"
                )
            return rope | {"rope_scaling": RopeScaling("factors", 1.0, frequency_factors=factors)}
        if kind not in ("linear", "llama3", "yarn"):
            self._unsupported.append(f"rope_type is {kind!r}, not of default, linear, llama3, yarn")
            return rope
        scaling = self._scaling(kind, given, max_position)
        if kind == "linear":
            rope["max_position"] = int(min(max_position * scaling.factor, _MOST))
        if kind == "yarn":
            stretched = int(min(scaling.original_max_position * scaling.factor, _MOST))
            rope["max_position"] = max(max_position, stretched)
        return rope | {"rope_scaling": scaling}

    def _scaling(self, kind: str, given: Mapping[str, Any], max_position: int) -> RopeScaling:
        """`given` is kept by its kind's own keys; what another kind would need is ignored, as transformers does."""
        original = max_position
        if kind != "linear":
            # Phi and its like keep it outside.
            outer = self._values.get("original_max_position_embeddings")
            stated = (
                outer if outer is not None else given.get("original_max_position_embeddings", max_position)
            )
            if not isinstance(stated, int) or isinstance(stated, bool) or not 1 <= stated <= _MOST:
                self._problems.note(f"original_max_position_embeddings is {stated!r}, not 1 to {_MOST}")
            else:
                original = stated
        if given.get("factor") is None and kind != "yarn":
            self._problems.note(f"RoPE scaling of type {kind} has no factor")
        factor = self._number("factor", max_position / original, given)
        if kind == "linear":
            return RopeScaling(kind, factor)
        if kind == "llama3":
            low = self._number("low_freq_factor", 1.0, given)
            high = self._number("high_freq_factor", 4.0, given)
            if low >= high:
                self._problems.note(f"low_freq_factor {low} is not below high_freq_factor {high}")
            return RopeScaling(kind, factor, original, low_freq_factor=low, high_freq_factor=high)
        return RopeScaling(
            kind, factor, original,
            beta_fast=self._number("beta_fast", 32.0, given), beta_slow=self._number("beta_slow", 1.0, given),
            attention_factor=self._attention_factor(factor, given), truncate=bool(given.get("truncate", True)),
        )  # fmt: skip

    def _attention_factor(self, factor: float, given: Mapping[str, Any]) -> float:
        """YaRN's scale of cos and sin.  DeepSeek's mscale and mscale_all_dim make two scales, one over the other."""

        def scale(mscale: float) -> float:
            return 0.1 * mscale * math.log(factor) + 1.0 if factor > 1 else 1.0

        stated = self._number("attention_factor", 0.0, given)
        if stated:
            return stated
        if given.get("mscale") and given.get("mscale_all_dim"):
            mscale, of_all = self._number("mscale", 1.0, given), self._number("mscale_all_dim", 1.0, given)
            return scale(mscale) / scale(of_all)
        return scale(1.0)

    def _tokens(self, kind: str, vocabulary: int) -> dict[str, Any]:
        """Ids of the special tokens.  -1 stands for none in some configurations."""

        def ids(name: str) -> tuple[int, ...]:
            default = _LLAMA_ENDS.get(name) if kind in ("llama", "mistral") else None
            value = self._values.get(name, default)
            listed = (
                list(value) if isinstance(value, (list, tuple)) else [] if value in (None, -1) else [value]
            )
            for token in listed:
                if not isinstance(token, int) or isinstance(token, bool) or token < 0:
                    self._problems.note(f"{self._name(name)} is {value!r}, not an id or several")
                    return ()
            return tuple(token for token in listed if token < vocabulary)

        bos, pad = ids("bos_token_id"), ids("pad_token_id")
        return {
            "bos_id": bos[0] if bos else None,
            "eos_ids": tuple(dict.fromkeys(ids("eos_token_id"))),
            "pad_id": pad[0] if pad else None,
        }
