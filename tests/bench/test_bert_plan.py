"""Launches of an encoder layer on an H200, counted from its plan, and docs/encoder.md's table of them."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
SEQ_LENS = (128, 512, 1024, 2048, 4096)


@pytest.fixture
def bert_plan(script):
    return script("bert_plan")


def launches(bert_plan, seq, pre_ln=True):
    return bert_plan.launches(
        bert_plan.Model(24, 1024, 16, 4096, 30522, 4096), bert_plan.Problem(4, seq, pre_ln)
    )


@pytest.mark.parametrize("pre_ln", [True, False], ids=["pre-LN", "post-LN"])
@pytest.mark.parametrize("seq", SEQ_LENS)
def test_launches_of_a_layer(bert_plan, seq, pre_ln):
    """Five: norms are in the products, of a post-LN layer in weights besides its own."""
    found = launches(bert_plan, seq, pre_ln)
    work = [one.kernel for one in found if one.flops or one.nbytes > 4]
    product, attention = "linear_hopper", "attention_hopper"
    assert work == [product, attention, product, product, product]
    assert len(work) == len(found)


@pytest.mark.parametrize("pre_ln", [True, False], ids=["pre-LN", "post-LN"])
def test_launches_of_a_forward_pass(bert_plan, pre_ln):
    """What a captured graph of BERT-large has (bench/results/bert_large.csv): 124 and 123."""
    model, device = bert_plan.Model(24, 1024, 16, 4096, 30522, 4096), bert_plan.sim_device("sm_90a")
    steps = bert_plan.model_steps(model, bert_plan.Problem(4, 512, pre_ln), device)
    assert len(steps) == 24 * 5 + (4 if pre_ln else 3)
    layer = bert_plan.layer_steps(model, bert_plan.Problem(4, 512, pre_ln))
    norms = [step.kernel.constant("kRowNorm") for step in layer if step.kernel.entry == "linear_hopper"]
    assert norms == ([1, 0, 1, 0] if pre_ln else [1, 3, 1, 3])  # of x, and of a post-LN layer's residuals


def test_work_of_a_layer(bert_plan):
    """FLOPs are those of the model, in either order of norms."""
    found = launches(bert_plan, 2048)
    assert sum(one.flops for one in found) == 2 * 8192 * 12 * 1024**2 + 4 * 4 * 2048**2 * 1024
    assert launches(bert_plan, 2048, False) == found
    assert all(one.predicted_us is None or one.predicted_us > one.roof_us for one in found)


def test_an_unknown_layer_is_refused(bert_plan, monkeypatch):
    steps = bert_plan.layer_steps(bert_plan.Model(1, 64, 2, 128, 9, 9), bert_plan.Problem(1, 16, True))
    monkeypatch.setattr(bert_plan, "layer_steps", lambda *_: steps[:-1])
    with pytest.raises(ValueError, match=r"has the launches .*, not 5"):
        launches(bert_plan, 128)


@pytest.mark.parametrize("seq", [512, 2048])
def test_the_documented_table(bert_plan, seq):
    """`python bench/bert_large.py --plan --seq-len 512 2048` writes it anew."""
    text = (ROOT / "docs" / "encoder.md").read_text(encoding="utf-8")
    start = text.index(f"batch=4 seq={seq} pre-LN:")
    rows = re.findall(r"^\| (.+) \| `(.+)` \| (.+) \| (.+) \| (.+) \| (.+) \|$", text[start:], re.MULTILINE)
    rows = rows[:5]
    found = [one for one in launches(bert_plan, seq) if one.predicted_us is not None]
    assert [row[:2] for row in rows] == [(one.name, one.kernel) for one in found]
    for (name, _, *figures), one in zip(rows, found):
        mb, gflop, roof, predicted = map(float, figures)
        assert (mb, gflop) == (round(one.nbytes / 1e6, 1), round(one.flops / 1e9, 1)), name
        assert roof == pytest.approx(one.roof_us, abs=0.06), name
        assert predicted > roof, (
            name
        )  # the model of the products' times may be fitted anew: not held to figures
