"""`python -m cki generate` on a tiny model's folder."""

from __future__ import annotations

import json

import pytest

from cki.__main__ import main
from cki.engine.config import ModelConfig
from tests.engine.model_files import hf_config, write_folder
from tests.engine.tiny import random_weights


@pytest.fixture
def folder(tmp_path):
    """160 tokens: words t3 to t159 with a space before each."""
    config = hf_config(num_attention_heads=6, head_dim=16)
    weights = random_weights(ModelConfig.from_hf(config))
    made = write_folder(tmp_path / "model", config, weights)
    vocabulary = {"<s>": 1, "</s>": 2, "<unk>": 0} | {f"t{number}": number for number in range(3, 160)}
    tokenizer = {
        "version": "1.0", "truncation": None, "padding": None, "normalizer": None, "post_processor": None,
        "added_tokens": [], "pre_tokenizer": {"type": "WhitespaceSplit"}, "decoder": None,
        "model": {"type": "WordLevel", "vocab": vocabulary, "unk_token": "<unk>"},
    }  # fmt: skip
    (made / "tokenizer.json").write_text(json.dumps(tokenizer))
    return made


def test_it_continues_each_prompt(folder, capsys):
    common = ["generate", "--model", str(folder), "--device", "sim", "--max-tokens", "3"]
    assert main([*common, "t5 t6 t7", "t100"]) == 0
    first, second = capsys.readouterr().out.strip().splitlines()
    assert first.startswith("t5 t6 t7")
    assert second.startswith("t100")
    assert first.count("t") == 6
    assert main([*common, "--temperature", "1.5", "--seed", "4", "t5 t6 t7"]) == 0
    drawn = capsys.readouterr()
    assert drawn.out.strip() != first
    assert main([*common, "--quantize", "fp8", "--dtype", "f16", "t5 t6 t7"]) == 0
    assert capsys.readouterr().out.startswith("t5 t6 t7")
    assert "3 + 3 tokens" in drawn.err


def test_what_is_wrong_is_said(folder, capsys):
    assert main(["generate", "--model", str(folder / "nothing"), "--device", "sim", "t5"]) == 1
    assert "there is no file or folder" in capsys.readouterr().err
    assert main(["generate", "--model", str(folder), "--device", "sim", "--top-p", "2", "t5"]) == 1
    assert "top_p is 2" in capsys.readouterr().err
    assert main(["generate", "--model", str(folder), "--device", "sim", "--max-tokens", "0", "t5"]) == 1
    assert "max_tokens is 0" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        main(["generate", "t5"])
