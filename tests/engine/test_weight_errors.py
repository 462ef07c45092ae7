"""Hugging Face folders that are refused: wrong tensors, files cut short or changed, wrong headers and indices."""

from __future__ import annotations

import json
import struct

import numpy as np
import pytest

from cki.engine.config import ModelConfig
from cki.engine.files import open_model
from cki.engine.safetensors_file import read_header
from cki.errors import CkiError, InvalidArgumentError, UnsupportedError
from tests.engine.model_files import hf_config, write_folder
from tests.engine.tiny import random_weights

Q_PROJ = "model.layers.1.self_attn.q_proj.weight"
BIAS, LAYER_2 = Q_PROJ.replace("weight", "bias"), Q_PROJ.replace("1", "2")


def tiny():
    values = hf_config()
    return values, ModelConfig.from_hf(values)


def changed(arrays, name, value):
    return {key: array for key, array in (arrays | {name: value}).items() if array is not None}


@pytest.mark.parametrize(
    ("name", "value", "said"),
    [
        (Q_PROJ, None, f"{Q_PROJ} (128, 64) is missing"),
        (Q_PROJ, np.ones((64, 128), np.float32), f"{Q_PROJ} of model.safetensors has shape (64, 128), the config"),
        (Q_PROJ, np.ones(5, np.float32), "has shape (5,)"),
        (Q_PROJ, np.ones((128, 64)), f"{Q_PROJ} of model.safetensors (128, 64) is f64, not f32, f16, bf16 or e4m3"),
        (BIAS, np.ones(128, np.float32), f"{BIAS} of model.safetensors has no place in a llama"),
        (LAYER_2, np.ones((128, 64), np.float32), f"{LAYER_2} of model.safetensors has no place in a llama"),
        ("norm.weight", np.ones(64, np.float32), "norm.weight of model.safetensors are the same weight"),
    ],
)  # fmt: skip
def test_wrong_tensors(name, value, said, tmp_path):
    values, config = tiny()
    folder = write_folder(tmp_path, values, changed(random_weights(config), name, value))
    with pytest.raises(InvalidArgumentError) as caught:
        open_model(folder)
    assert said in str(caught.value)
    assert str(folder) in str(caught.value)


def test_many_wrong_tensors_are_counted(tmp_path):
    values, _ = tiny()
    with pytest.raises(InvalidArgumentError) as caught:
        open_model(write_folder(tmp_path, values, {f"x{i}": np.ones(1, np.float32) for i in range(20)}))
    text = str(caught.value)
    assert "model.embed_tokens.weight (160, 64) is missing" in text
    assert "... and 13 more" in text and "... and 12 more" in text


def test_a_file_that_is_cut_short_anywhere(tmp_path):
    values, config = tiny()
    folder = write_folder(tmp_path, values, random_weights(config))
    path = folder / "model.safetensors"
    whole = path.read_bytes()
    header = int.from_bytes(whole[:8], "little")
    cuts = [0, 1, 7, 8, 9, 8 + header // 2, 8 + header - 1, 8 + header, len(whole) // 2, len(whole) - 1]
    for cut in cuts:
        path.write_bytes(whole[:cut])
        with pytest.raises(InvalidArgumentError) as caught:
            open_model(folder)
        assert str(path) in str(caught.value)
    assert f"lm_head.weight (160, 64) f32 ends at byte {len(whole)}, the file at {len(whole) - 1}" in str(
        caught.value
    )


def test_a_header_with_any_byte_changed(tmp_path):
    """Either the model still opens, or the error is CKI's."""
    values, config = tiny()
    folder = write_folder(tmp_path, values, random_weights(config))
    path = folder / "model.safetensors"
    whole = path.read_bytes()
    rng = np.random.default_rng(0)
    refused = 0
    for position in rng.integers(0, 8 + int.from_bytes(whole[:8], "little"), 150):
        broken = bytearray(whole)
        broken[position] ^= 1 << rng.integers(8)
        path.write_bytes(broken)
        try:
            open_model(folder)
        except CkiError:
            refused += 1
    assert refused > 100


def header_file(path, header):
    text = json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + bytes(64))
    return path


@pytest.mark.parametrize(
    ("header", "said"),
    [
        ([1], "its header is a list"),
        ({"a": 3}, "a has no dtype, shape and data_offsets"),
        ({"a": {"dtype": "F32", "shape": [2]}}, "a has no dtype, shape and data_offsets"),
        ({"a": {"dtype": "F32", "shape": [-2], "data_offsets": [0, 8]}}, "or impossible ones"),
        ({"a": {"dtype": "F32", "shape": [2], "data_offsets": [0, 4]}}, "a (2,) f32 needs 8 bytes, its offsets 0"),
        ({"a": {"dtype": "F4", "shape": [2], "data_offsets": [0, 1]}}, "a (2,) is of unknown dtype 'F4'"),
        ({"a": {"dtype": "F32", "shape": [2**62, 4], "data_offsets": [0, 2**66]}}, "ends at byte"),
        ({"a": {"dtype": "U8", "shape": [100], "data_offsets": [0, 100]}}, "a (100,) u8 ends at byte"),
    ],
)  # fmt: skip
def test_wrong_headers(header, said, tmp_path):
    with pytest.raises(InvalidArgumentError) as caught:
        read_header(header_file(tmp_path / "x.safetensors", header))
    assert said in str(caught.value)


@pytest.mark.parametrize(
    ("index", "said"),
    [
        ("{", "has no weight_map"),
        ("{}", "has no weight_map"),
        ('{"weight_map": {"a": "gone", "b": "gone"}}', "gone is missing; it holds a and 1 more"),
        ('{"weight_map": {"a": "../model.safetensors"}}', "'../model.safetensors' is no name of a file in this folder"),
        ('{"weight_map": {"a": 3}}', "3 is no name of a file"),
        ('{"weight_map": {"a": 3, "b": "x"}}', "has no weight_map"),
    ],
)  # fmt: skip
def test_wrong_indices(index, said, tmp_path):
    values, config = tiny()
    folder = write_folder(tmp_path, values, random_weights(config))
    (folder / "model.safetensors.index.json").write_text(index)
    with pytest.raises(InvalidArgumentError) as caught:
        open_model(folder)
    assert said in str(caught.value)


def test_folders_that_are_no_models(tmp_path):
    with pytest.raises(InvalidArgumentError, match=r"there is no file or folder .*nothing"):
        open_model(tmp_path / "nothing")
    with pytest.raises(InvalidArgumentError, match=r"has no config\.json"):
        open_model(tmp_path)
    (tmp_path / "config.json").write_text("[1]")
    with pytest.raises(InvalidArgumentError, match="is a JSON list, not an object"):
        open_model(tmp_path)
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(InvalidArgumentError, match=r"config\.json is no JSON"):
        open_model(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps(hf_config()))
    with pytest.raises(InvalidArgumentError, match=r"has no \*\.safetensors$"):
        open_model(tmp_path)
    (tmp_path / "pytorch_model.bin").write_bytes(b"x")
    with pytest.raises(InvalidArgumentError, match=r"only pytorch_model\.bin"):
        open_model(tmp_path)
    with pytest.raises(UnsupportedError, match="is no model that the engine reads"):
        open_model(tmp_path / "pytorch_model.bin")
