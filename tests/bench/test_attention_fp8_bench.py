"""bench/attention_fp8.py as far as it goes without a GPU: calls by tiles, checked by its own check; the summary."""

from __future__ import annotations

import pytest

import cki


@pytest.fixture
def fp8(script):
    return script("attention_fp8")


def test_calls_pass_the_check_and_a_wrong_one_does_not(fp8):
    torch = pytest.importorskip("torch")
    shape = fp8.Shape(1, 150, 2, 32, True, "bf16")
    generator = torch.Generator().manual_seed(0)
    size = (shape.batch, shape.tokens, shape.heads, shape.dim)
    tensors = [torch.randn(size, generator=generator).to(torch.bfloat16) for _ in range(4)]
    pairs = [fp8.quantise(t) for t in tensors[:3]]
    inputs = (*tensors, *(codes for codes, _ in pairs), *(descale for _, descale in pairs))
    tiles = fp8.with_fields(fp8.chosen_tiles(shape), "block_keys=64,stages=2")
    assert (tiles.block_keys, tiles.stages) == (64, 2)
    with cki.device("sim"):
        fp8.check(shape, fp8.tiles_call(shape, tiles), inputs, "tiles")
        fp8.check(shape, fp8.e4m3_call(shape), inputs, "public")
        with pytest.raises(SystemExit, match="error"):
            fp8.check(shape, fp8.e4m3_call(shape._replace(causal=False)), inputs, "no limit")


def test_summary(fp8):
    rows = [
        {"implementation": name, "dtype": dtype, "vs_bf16": ratio}
        for name, dtype, ratio in (
            ("cki e4m3", "e4m3", 1.5), ("cki e4m3", "e4m3", 1.0), ("cki bf16", "bf16", 1.0), ("fa3 fp8", "e4m3", 1.2)
        )
    ]  # fmt: skip
    assert fp8.summary(rows) == [
        "1.225 of our bf16, least 1.000, 2 shapes: cki e4m3",
        "1.200 of our bf16, least 1.200, 1 shapes: fa3 fp8",
    ]
