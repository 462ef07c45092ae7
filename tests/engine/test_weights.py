"""Weights of a Hugging Face folder: views of the file, FP8 blocks, several files, and everything that is refused."""

from __future__ import annotations

import json

import ml_dtypes
import numpy as np
import pytest

from cki.engine.config import ModelConfig
from cki.engine.files import open_model
from cki.engine.quantized import E4M3, QuantizedWeight, dequantize_blocks, quantize_blocks
from cki.engine.safetensors_file import read_header
from cki.errors import InvalidArgumentError, UnsupportedError
from tests.engine.model_files import ARCHITECTURES, hf_config, write_folder, write_safetensors
from tests.engine.tiny import random_weights

FP8 = {"quant_method": "fp8", "weight_block_size": [128, 128], "activation_scheme": "dynamic"}
Q_PROJ = "model.layers.1.self_attn.q_proj.weight"


def tiny(**changes):
    values = hf_config(**changes)
    return values, ModelConfig.from_hf(values)


@pytest.mark.parametrize("architecture", ARCHITECTURES)
@pytest.mark.parametrize("dtype", [np.float32, np.float16, ml_dtypes.bfloat16])
def test_weights_are_views_of_the_file(architecture, dtype, tmp_path):
    values, config = tiny(architecture=architecture)
    arrays = random_weights(config, dtype=dtype)
    with_names = open_model(write_folder(tmp_path, values, arrays)).weights
    assert dict(with_names).keys() == arrays.keys()
    assert len(with_names) == len(arrays)
    for name, array in arrays.items():
        found = with_names[name]
        assert found.dtype == array.dtype
        assert found.tobytes() == array.tobytes()
        assert with_names.shape(name) == array.shape
        assert (
            with_names.dtype(name)
            == {"float32": "f32", "float16": "f16", "bfloat16": "bf16"}[array.dtype.name]
        )
        assert with_names.quantized(name) is None
        assert not found.flags.owndata and not found.flags.writeable
    assert "model.nothing" not in with_names
    with pytest.raises(KeyError):
        with_names["model.nothing"]


@pytest.mark.torch
@pytest.mark.transformers
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_folders_that_transformers_writes(architecture, tmp_path):
    """In several files with an index, in bfloat16; tied in one case."""
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    values = hf_config(architecture, tie_word_embeddings=architecture == "llama", bos_token_id=3)
    del values["model_type"], values["torch_dtype"]
    theirs = transformers.AutoModelForCausalLM.from_config(
        transformers.AutoConfig.for_model(architecture, **values), dtype=torch.bfloat16
    )
    theirs.save_pretrained(tmp_path, max_shard_size="50KB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 2
    ours = open_model(tmp_path)
    state = theirs.state_dict()
    if architecture == "llama":
        del state["lm_head.weight"]
    assert ours.weights.keys() == state.keys()
    for name, tensor in state.items():
        assert ours.weights[name].tobytes() == tensor.view(torch.int16).numpy().tobytes(), name
    assert (ours.config.dtype, ours.config.bos_id, ours.tokenizer) == ("bf16", 3, None)


def test_the_safetensors_package_reads_the_same(tmp_path):
    numpy_of = pytest.importorskip("safetensors.numpy")
    arrays = {"a": np.arange(6, dtype=np.float32).reshape(2, 3), "b": np.ones((0, 4), np.float16)}
    arrays["c"] = np.array(3, np.int64)
    numpy_of.save_file(arrays, tmp_path / "x.safetensors", metadata={"format": "pt"})
    found = read_header(tmp_path / "x.safetensors")
    for name, array in arrays.items():
        np.testing.assert_array_equal(found[name].array(), array)
    again = numpy_of.load_file(write_safetensors(tmp_path / "y.safetensors", arrays))
    assert {name: array.tolist() for name, array in again.items()} == {
        n: a.tolist() for n, a in arrays.items()
    }


@pytest.mark.parametrize("pad", range(1, 4))
def test_unaligned_files(pad, tmp_path):
    """A header may have any length; numbers are given out at addresses that kernels can read."""
    values, config = tiny()
    arrays = random_weights(config)
    folder = write_folder(tmp_path, values, arrays)
    write_safetensors(folder / "model.safetensors", arrays, pad)
    weights = open_model(folder).weights
    for name, array in arrays.items():
        assert weights[name].ctypes.data % 4 == 0
        np.testing.assert_array_equal(weights[name], array)


def test_weights_outlive_the_files(tmp_path):
    values, config = tiny()
    arrays = random_weights(config)
    model = open_model(write_folder(tmp_path, values, arrays))
    kept = model.weights[Q_PROJ]
    model.close()
    (tmp_path / "model.safetensors").unlink()
    np.testing.assert_array_equal(kept, arrays[Q_PROJ])
    with pytest.raises(KeyError):
        model.weights[Q_PROJ]


def test_names_without_the_models_prefix(tmp_path):
    """As a bare LlamaModel's; and a tied head, a rotary buffer are no weights."""
    values, config = tiny(tie_word_embeddings=True)
    arrays = random_weights(config)
    bare = {name.removeprefix("model."): array for name, array in arrays.items()}
    bare["lm_head.weight"] = bare["embed_tokens.weight"]
    bare["layers.0.self_attn.rotary_emb.inv_freq"] = np.zeros(16, np.float32)
    weights = open_model(write_folder(tmp_path, values, bare)).weights
    assert weights.keys() == arrays.keys()


def test_heads_of_tied_models(tmp_path):
    """As transformers 5 takes them: another matrix is a head after all, and a lone one is the embedding too."""
    values, config = tiny(tie_word_embeddings=True)
    arrays = random_weights(config)
    embedding = arrays["model.embed_tokens.weight"]
    untied = open_model(write_folder(tmp_path, values, arrays | {"lm_head.weight": embedding + 1}))
    assert not untied.config.tie_word_embeddings
    np.testing.assert_array_equal(untied.weights["lm_head.weight"], embedding + 1)
    tied = open_model(write_folder(tmp_path, values, arrays | {"lm_head.weight": embedding}))
    assert tied.config.tie_word_embeddings and "lm_head.weight" not in tied.weights
    del arrays["model.embed_tokens.weight"]
    lone = open_model(write_folder(tmp_path, values, arrays | {"lm_head.weight": embedding}))
    np.testing.assert_array_equal(lone.weights["model.embed_tokens.weight"], embedding)
    assert len(lone.weights) == len(arrays) + 1


def test_one_file_of_a_folder(tmp_path):
    values, config = tiny()
    arrays = random_weights(config)
    write_folder(tmp_path, values, {"something": np.zeros(3, np.float32)})
    path = write_safetensors(tmp_path / "other.safetensors", arrays)
    assert open_model(path).path == path
    np.testing.assert_array_equal(open_model(path).weights[Q_PROJ], arrays[Q_PROJ])


def test_second_weights_of_mistrals_folders_are_left_alone(tmp_path):
    values, config = tiny(architecture="mistral")
    arrays = random_weights(config)
    folder = write_folder(tmp_path, values, arrays)
    (folder / "model.safetensors").rename(folder / "weights.safetensors")
    write_safetensors(
        folder / "consolidated.safetensors", {"layers.0.attention.wq.weight": np.ones(3, np.float32)}
    )
    assert open_model(folder).weights.keys() == arrays.keys()


def test_dtype_of_the_files_where_the_configuration_has_none(tmp_path):
    values, config = tiny()
    del values["torch_dtype"]
    assert (
        open_model(write_folder(tmp_path, values, random_weights(config, dtype=np.float16))).config.dtype
        == "f16"
    )


def test_generation_config(tmp_path):
    values, config = tiny(eos_token_id=2)
    folder = write_folder(tmp_path, values, random_weights(config))
    stated = {
        "eos_token_id": [2, 7],
        "temperature": 0.6,
        "top_k": 20,
        "do_sample": True,
        "top_p": None,
        "n": 3,
    }
    (folder / "generation_config.json").write_text(json.dumps(stated))
    model = open_model(folder)
    assert model.config.eos_ids == (2, 7)
    assert model.defaults == {"temperature": 0.6, "top_k": 20, "do_sample": True}


# FP8


def fp8(weight, rng):
    """Codes and scales of any kind, not those that `quantize_blocks` would choose."""
    codes = (rng.normal(size=weight.shape) * 100).astype(E4M3)
    blocks = tuple(-(-extent // 128) for extent in weight.shape)
    return codes, np.exp(rng.normal(size=blocks)).astype(np.float32)


@pytest.mark.parametrize("scale_dtype", [np.float32, ml_dtypes.bfloat16])
def test_fp8_blocks(scale_dtype, tmp_path):
    values, config = tiny(quantization_config=FP8, hidden_size=192, intermediate_size=200)
    rng, arrays, blocks = np.random.default_rng(5), {}, {}
    for name, array in random_weights(config).items():
        if "_proj." in name:
            codes, scales = fp8(array, rng)
            arrays[name], arrays[f"{name}_scale_inv"] = codes, scales.astype(scale_dtype)
            blocks[name] = (codes, arrays[f"{name}_scale_inv"].astype(np.float32))
        else:
            arrays[name] = array.astype(ml_dtypes.bfloat16)
    weights = open_model(write_folder(tmp_path, values, arrays)).weights
    assert weights.keys() == random_weights(config).keys()
    assert len(blocks) == 14
    for name, (codes, scales) in blocks.items():
        rows, columns = np.indices(codes.shape) // 128
        expected = codes.astype(np.float32) * scales[rows, columns]
        np.testing.assert_array_equal(weights[name], expected)
        found = weights.quantized(name)
        assert weights.dtype(name) == "e4m3"
        assert found.codes.tobytes() == codes.tobytes() and not found.codes.flags.owndata
        np.testing.assert_array_equal(found.scales, scales)
    assert weights.quantized("model.norm.weight") is None


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (
            lambda arrays: arrays.pop(f"{Q_PROJ}_scale_inv"),
            f"(128, 64) is e4m3 and has no {Q_PROJ}_scale_inv",
        ),
        (
            lambda arrays: arrays.update({f"{Q_PROJ}_scale_inv": np.ones((1, 2), np.float32)}),
            f"{Q_PROJ}_scale_inv of model.safetensors is f32 (1, 2), not f32, f16 or bf16 (1, 1)",
        ),
        (
            lambda arrays: arrays.update({Q_PROJ: np.ones((128, 64), ml_dtypes.float8_e5m2)}),
            f"{Q_PROJ} of model.safetensors (128, 64) has scales, but is e5m2",
        ),
    ],
)
def test_wrong_fp8(change, said, tmp_path):
    values, config = tiny(quantization_config=FP8)
    arrays = random_weights(config)
    arrays[Q_PROJ], arrays[f"{Q_PROJ}_scale_inv"] = fp8(arrays[Q_PROJ], np.random.default_rng(0))
    open_model(write_folder(tmp_path, values, arrays))
    change(arrays)
    with pytest.raises(InvalidArgumentError) as caught:
        open_model(write_folder(tmp_path, values, arrays))
    assert said in str(caught.value)


@pytest.mark.parametrize(
    ("quantization", "said"),
    [
        ({"quant_method": "gptq", "bits": 4}, "quant_method 'gptq', not 'fp8'"),
        ({"quant_method": "fp8", "weight_block_size": None}, "weight_block_size None, not [128, 128]"),
        ({"quant_method": "fp8", "weight_block_size": [64, 64]}, "weight_block_size [64, 64]"),
        ("fp8", "quantization_config is 'fp8'"),
    ],
)
def test_other_quantisations(quantization, said, tmp_path):
    values, config = tiny(quantization_config=quantization)
    with pytest.raises(UnsupportedError) as caught:
        open_model(write_folder(tmp_path, values, random_weights(config)))
    assert said in str(caught.value)


@pytest.mark.parametrize("shape", [(1, 1), (128, 128), (130, 200), (3, 385), (256, 64)])
@pytest.mark.parametrize("dtype", [np.float32, ml_dtypes.bfloat16])
def test_quantize_blocks(shape, dtype):
    """Every block's largest magnitude is 448, and no number is off by more than half a step of e4m3."""
    rng = np.random.default_rng(shape[0])
    weight = (rng.standard_t(3, size=shape) * np.exp(rng.normal(size=(shape[0], 1)))).astype(dtype)
    found = quantize_blocks(weight)
    assert (found.codes.shape, found.codes.dtype, found.scales.dtype) == (shape, E4M3, np.float32)
    exact, back = weight.astype(np.float64), dequantize_blocks(found).astype(np.float64)
    for row in range(0, shape[0], 128):
        for column in range(0, shape[1], 128):
            block = np.s_[row : row + 128, column : column + 128]
            largest = np.abs(exact[block]).max()
            scale = np.float64(found.scales[row // 128, column // 128])
            assert scale == pytest.approx(largest / 448, rel=1e-6)
            assert np.abs(found.codes[block].astype(np.float64)).max() == 448
            # 3 bits of mantissa: half a step is a 16th of the power of two below; subnormals have steps of 2**-9.
            bound = np.maximum(np.abs(exact[block]) / 16, scale * 2.0**-10) * 1.0001
            assert (np.abs(back[block] - exact[block]) <= bound).all()


def test_quantize_blocks_of_extremes():
    assert quantize_blocks(np.zeros((2, 2), np.float32)).scales.tolist() == [[1.0]]
    tiny_numbers = np.full((1, 2), 2.0**-140, np.float32)
    assert np.isfinite(dequantize_blocks(quantize_blocks(tiny_numbers))).all()
    large = np.array([[3e38, -1e38]], np.float32)
    np.testing.assert_allclose(dequantize_blocks(quantize_blocks(large)), large, rtol=1 / 16)
    with pytest.raises(InvalidArgumentError, match="not finite in rows 128 to"):
        quantize_blocks(np.concatenate([np.ones((128, 1)), [[np.nan]]]).astype(np.float32))
    with pytest.raises(InvalidArgumentError, match=r"shape \(3,\), not two axes"):
        quantize_blocks(np.ones(3, np.float32))


def test_e4m3_that_is_not_a_number_stays_so():
    codes = np.array([[np.nan, 1.0]], E4M3)
    back = dequantize_blocks(QuantizedWeight(codes, np.full((1, 1), 2.0, np.float32)))
    assert np.isnan(back[0, 0]) and back[0, 1] == 2.0
