"""bench/attention_micro.py as far as it goes without a GPU: the baselines compute attention, the rows compare them."""

from __future__ import annotations

import numpy as np
import pytest

import cki.reference

pytestmark = pytest.mark.torch


@pytest.fixture
def micro(script):
    return script("attention_micro")


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("name", ["unfused", "sdpa"])
def test_baselines_compute_attention(micro, name, causal):
    import torch

    shape = micro.Shape(2, 9, 3, 8, causal, "f32")
    q, k, v = torch.randn(3, 2, 9, 3, 8, generator=torch.Generator().manual_seed(0))
    got = getattr(micro, name)(shape)(q, k, v, None)
    expected = cki.reference.attention(q.numpy(), k.numpy(), v.numpy(), causal=causal)
    assert np.abs(got.numpy() - expected).max() < 1e-5


def test_rows(micro, monkeypatch, tmp_path, capsys):
    def in_turn(variants, inputs, rounds):
        assert rounds == 7 and inputs == ["input"]
        return dict(zip(variants, (micro.common.Timing(t, t, t) for t in (10.0, 40.0, 12.0))))

    monkeypatch.setattr(micro.common, "rotated", lambda make, nbytes, limit: ["input"])
    monkeypatch.setattr(micro.common, "graph_times_in_turn", in_turn)
    monkeypatch.setattr(micro.common, "require_gpu", lambda: None)
    checked = []
    monkeypatch.setattr(micro.attention, "check", lambda shape, run, inputs, what: checked.append(shape))
    monkeypatch.setenv("BENCH_OUT", str(tmp_path))
    micro.main(["--seq-lens", "128", "256", "--iters", "7"])
    assert [(shape.tokens, shape.dtype) for shape in checked] == [(128, "f16"), (256, "f16")]
    out = capsys.readouterr().out
    assert "torch unfused" in out and "vs_sdpa" in out
    line = micro.measure(micro.Shape(1, 64, 1, 64, False, "bf16"), 7)[0]
    assert (line["implementation"], line["vs_unfused"], line["vs_sdpa"]) == ("cki", 4.0, 1.2)
    with pytest.raises(SystemExit):
        micro.main(["--seq-lens", "0"])
