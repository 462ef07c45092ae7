"""What an encoder is besides its weights, read from a Hugging Face configuration or from arguments."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from cki.problems import Problems

#: Hugging Face's names of activations -> ours.  gelu_new, gelu_fast and gelu_pytorch_tanh are one function.
ACTIVATIONS = {
    "gelu": "gelu", "gelu_python": "gelu", "gelu_new": "gelu_tanh", "gelu_fast": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh", "gelu_tanh": "gelu_tanh", "relu": "relu", "silu": "silu", "swish": "silu",
}  # fmt: skip

#: Model types whose positions count from padding_id + 1 on, and skip padding.
ROBERTA_TYPES = ("roberta", "xlm-roberta", "camembert", "roberta-prelayernorm", "data2vec-text")


@dataclass(frozen=True)
class EncoderConfig:
    """An encoder's numbers.

    hidden, inner: widths of the activations and of the feed-forward block.  max_tokens: the longest sequence that the
    position table serves.  pre_ln: norms before the blocks (RoBERTa-PreLayerNorm, Megatron), else after (BERT).
    padding_id: with RoBERTa's rule for positions the id of padding; None counts positions from 0 (BERT).
    weight_layout: how the matrices lie; "out_in" as torch stores them, "in_out" as TensorFlow and Flax do.
    folded: the layers' norms are in the weights behind them (`cki.prepare`).
    """

    layers: int
    hidden: int
    inner: int
    num_heads: int
    head_dim: int
    vocabulary: int
    max_tokens: int
    pre_ln: bool = False
    activation: str = "gelu"
    epsilon: float = 1e-12
    padding_id: int | None = None
    weight_layout: str = "out_in"
    folded: bool = False


class Settings:
    """The caller's arguments and configuration: what is given by name wins over what the configuration says."""

    def __init__(self, config: Any, given: Mapping[str, Any], problems: Problems) -> None:
        self._config = config
        self._problems = problems
        if isinstance(config, (str, bytes, int, float, list, tuple)):
            problems.note_type(f"config is a {type(config).__name__}, not a configuration or the dict of one")
        self.pre_ln: bool | None = given["pre_ln"]
        if self.pre_ln is not None and not isinstance(self.pre_ln, bool):
            problems.note_type(f"pre_ln is {self.pre_ln!r}, not a bool")
            self.pre_ln = None
        self.num_heads = self._num_heads(given["num_heads"])
        self.epsilon = self._epsilon(given["epsilon"])
        self.activation = self._activation(given["activation"])
        self.padding_id = self._padding_id(given["padding_id"])
        self._refuse_other_models()

    def value(self, name: str) -> Any:
        """A value of the configuration; None where there is none."""
        if isinstance(self._config, Mapping):
            return self._config.get(name)
        return getattr(self._config, name, None)

    @property
    def model_type(self) -> str:
        """The configuration's word for the kind of model, or nothing."""
        return str(self.value("model_type") or "")

    def compare(self, name: str, found: int) -> None:
        """Note a number of the configuration that the weights contradict."""
        stated = self.value(name)
        if stated is not None and stated != found:
            self._problems.note(f"the configuration says {name} {stated}, the weights have {found}")

    def _num_heads(self, given: Any) -> int:
        value = given if given is not None else self.value("num_attention_heads")
        hint = "num_heads=, or config= with num_attention_heads"
        if value is None:
            self._problems.note("num_heads is not given", hint)
        elif not _is_integer(value):
            self._problems.note_type(f"num_heads is {value!r} of type {type(value).__name__}, not int", hint)
        elif value < 1:
            self._problems.note(f"num_heads is {value!r}, not a number of 1 or more", hint)
        else:
            return int(value)
        return 1

    def _epsilon(self, given: Any) -> float:
        value = given if given is not None else self.value("layer_norm_eps")
        if value is None:
            return 1e-12
        if not isinstance(value, (int, float)) or isinstance(value, bool):
            self._problems.note_type(f"epsilon is {value!r} of type {type(value).__name__}, not float")
        elif not 0 <= value < 1e30:
            self._problems.note(f"epsilon is {value!r}, not a number of 0 or more")
        else:
            return float(value)
        return 1e-12

    def _activation(self, given: Any) -> str:
        value = given if given is not None else self.value("hidden_act")
        if value is None:
            return "gelu"
        hint = f"activation of {', '.join(ACTIVATIONS)}"
        if not isinstance(value, str):
            self._problems.note_type(f"activation is {value!r} of type {type(value).__name__}, not str", hint)
            return "gelu"
        if value not in ACTIVATIONS:
            self._problems.note(f"activation is {value!r}", hint)
            return "gelu"
        return ACTIVATIONS[value]

    def _padding_id(self, given: Any) -> int | None:
        value = given
        if value is None and self.model_type in ROBERTA_TYPES:
            value = self.value("pad_token_id")
            value = 1 if value is None else value
        if value is None:
            return None
        if not _is_integer(value):
            self._problems.note_type(f"padding_id is {value!r} of type {type(value).__name__}, not int")
            return None
        if value < 0:
            self._problems.note(f"padding_id is {value!r}, not an id of 0 or more")
            return None
        return int(value)

    def _refuse_other_models(self) -> None:
        kind = self.value("position_embedding_type")
        if kind not in (None, "absolute"):
            self._problems.note(f"position_embedding_type is {kind!r}", "a model of absolute positions")
        for name in ("is_decoder", "add_cross_attention"):
            if self.value(name):
                self._problems.note(f"{name} is set in the configuration", "an encoder")


def _is_integer(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)
