"""The breakdown of a forward pass into launches, from kernels as a profiler would report them."""

from __future__ import annotations

import pytest


@pytest.fixture
def bert_profile(script):
    return script("bert_profile")


def run_of(bert_profile, model, problem, replays=2):
    """Kernels back to back, 10 us each, norms 2 us; the second begins 1 us early, the third 4 us late."""
    layer = [one.kernel for one in bert_profile.bert_plan.launches(model, problem)]
    first = ["embed_tokens", "layer_norm", *(["layer_norm"] if problem.pre_ln else [])]
    names = [*first, *layer * model.layers, "layer_norm"]
    kernels, clock = [], 0.0
    for _ in range(replays):
        for index, name in enumerate(names):
            length = 2.0 if name == "layer_norm" else 10.0
            clock += 4.0 if index == 2 else 0.0
            kernels.append(bert_profile.Kernel(name, clock - (1.0 if index == 1 else 0.0), clock + length))
            clock += length
        clock += 100.0  # between replays
    return kernels, len(names)


@pytest.mark.parametrize("pre_ln", [True, False])
def test_breakdown(bert_profile, pre_ln):
    model = bert_profile.Model(3, 1024, 16, 4096, 30522, 4096)
    problem = bert_profile.Problem(4, 512, pre_ln)
    kernels, launches = run_of(bert_profile, model, problem)
    shares = bert_profile.breakdown(kernels, model, problem, launches, 2)
    times = [(share.name, share.us) for share in shares]
    block = [("Q, K, V", 30.0), ("attention", 30.0), ("heads to hidden, + x", 30.0)]
    feed_forward = [("hidden to inner, GELU", 30.0), ("inner to hidden, + x", 30.0)]
    layer, last = [*block, *feed_forward], [("last norm", 2.0)]
    first = 4.0 if pre_ln else 2.0  # the embeddings' norm, and the first layer's
    assert times == [("embeddings", 10.0), ("embeddings", first), *layer, *last, ("gaps", 4.0)]
    text = bert_profile.table(shares, model, problem)
    assert "| attention | `attention_hopper` | 10.0 | 30 |" in text
    assert f"| all | | | {10 + 150 + first + 2 + 4:.0f} |" in text


def test_other_kernels_are_refused(bert_profile):
    model = bert_profile.Model(1, 1024, 16, 4096, 30522, 4096)
    problem = bert_profile.Problem(4, 512, True)
    kernels, launches = run_of(bert_profile, model, problem)
    with pytest.raises(SystemExit, match="the profiler saw 17 kernels, not 2 x 9"):
        bert_profile.breakdown(kernels[:-1], model, problem, launches, 2)
    kernels[4] = kernels[4]._replace(name="linear")
    with pytest.raises(SystemExit, match="launch 4 ran linear, the plan has attention_hopper"):
        bert_profile.breakdown(kernels, model, problem, launches, 2)
