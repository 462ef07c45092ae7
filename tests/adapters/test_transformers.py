"""Attention implementation "cki" of transformers: small random models against its own sdpa and eager attention.

Logits, greedy text with dynamic and static caches, padding on either side; a counter of launches shows whose kernels
ran.
"""

from __future__ import annotations

import inspect
from collections import Counter

import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers", minversion="5.0")

import cki  # noqa: E402
from cki.adapters.transformers import attention_forward, register  # noqa: E402
from cki.errors import UnsupportedError  # noqa: E402
from cki.launch import SimExecutable  # noqa: E402
from tests.adapters.transformers_models import BATCHES, FAMILIES, SIZES, ids, make  # noqa: E402

pytestmark = [pytest.mark.torch, pytest.mark.transformers]


@pytest.fixture(scope="module")
def models():
    """Models by family, each made once."""
    register()
    made = {}
    return lambda family: made.setdefault(family, make(family))


@pytest.fixture(autouse=True)
def launches(monkeypatch):
    """Launches of each kernel on the simulated device, where every test runs."""
    counts = Counter()
    launch = SimExecutable.launch

    def counted(self, pointers, stream):
        counts.update(step.kernel.entry for step in self.plan.steps)
        launch(self, pointers, stream)

    monkeypatch.setattr(SimExecutable, "launch", counted)
    with cki.device("sim"), torch.no_grad():
        yield counts


def close(found, wanted):
    return (found - wanted).abs().max() <= 2e-5 * wanted.abs().max()


@pytest.mark.parametrize("batch", BATCHES)
@pytest.mark.parametrize("family", FAMILIES)
def test_logits(models, launches, family, batch):
    """Those of sdpa, where the model has it."""
    model, mask = models(family), BATCHES[batch]
    model.set_attn_implementation("sdpa" if model._supports_sdpa else "eager")
    wanted = model(ids(), attention_mask=mask).logits
    assert not launches
    model.set_attn_implementation("cki")
    found = model(ids(), attention_mask=mask).logits
    assert launches.total() == model.config.num_hidden_layers
    real = mask.bool()
    assert close(found[real], wanted[real])


@pytest.mark.parametrize("cache", ["dynamic", "static"])
@pytest.mark.parametrize("batch", ["whole", "left"])
@pytest.mark.parametrize("family", FAMILIES)
def test_greedy_text(models, launches, family, batch, cache):
    model, new = models(family), 5
    options = {
        "max_new_tokens": new,
        "do_sample": False,
        "cache_implementation": cache,
        "disable_compile": True,
    }
    model.set_attn_implementation("eager")
    wanted = model.generate(ids(), attention_mask=BATCHES[batch], **options)
    model.set_attn_implementation("cki")
    found = model.generate(ids(), attention_mask=BATCHES[batch], **options)
    assert found.shape[1] == 9 + new
    assert torch.equal(found, wanted)
    layers = model.config.num_hidden_layers
    # Without padding (in a layer's window) the kernel for decoding reads a dynamic cache, from the second token on.
    decoded = launches["paged_attention"]
    assert launches["attention"] == new * layers - decoded
    if (batch, cache) == ("whole", "dynamic"):
        assert decoded == (new - 1) * layers
    elif "sliding_window" not in FAMILIES[family][1]:
        assert decoded == 0


def test_a_prompt_in_parts(models):
    """Later parts see the earlier ones in the cache, at most a window of them."""
    for family in ("llama", "mistral"):
        model = models(family)
        model.set_attn_implementation("cki")
        name = "cache" if "cache" in inspect.signature(model.forward).parameters else "past_key_values"
        wanted = model(ids(40)).logits
        first = model(ids(40)[:, :10], use_cache=True)
        second = model(ids(40)[:, 10:30], use_cache=True, **{name: first.past_key_values})
        third = model(ids(40)[:, 30:], **{name: second.past_key_values})
        assert close(torch.cat([first.logits, second.logits, third.logits], 1), wanted)


@pytest.mark.parametrize("batch", BATCHES)
def test_bert(launches, batch):
    register()
    torch.manual_seed(3)
    model = transformers.BertModel(transformers.BertConfig(**SIZES), add_pooling_layer=False).eval()
    mask = BATCHES[batch]
    wanted = model(ids(), attention_mask=mask).last_hidden_state
    model.set_attn_implementation("cki")
    found = model(ids(), attention_mask=mask).last_hidden_state
    assert launches == {"attention": 2}
    assert close(found[mask.bool()], wanted[mask.bool()])


def test_keys_are_not_repeated(models, monkeypatch):
    """What reaches the kernels are the cache's own tensors, with its heads."""
    seen = []
    monkeypatch.setattr(
        "cki.adapters.transformers.attention",
        lambda q, k, v, **_: seen.append((q, k, v)) or torch.zeros_like(q),
    )
    model = models("llama")
    model.set_attn_implementation("cki")
    cache = model(ids(), use_cache=True).past_key_values
    (_, k, v), layer = seen[0], cache.layers[0]
    assert k.shape[2] == 2
    assert (k.data_ptr(), v.data_ptr()) == (layer.keys.data_ptr(), layer.values.data_ptr())


def test_compiles_to_one_graph(models):
    model = models("mistral")
    model.set_attn_implementation("cki")
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    for mask in (None, BATCHES["left"]):
        wanted = model(ids(), attention_mask=mask, use_cache=False).logits
        found = compiled(ids(), attention_mask=mask, use_cache=False).logits
        assert close(found[:, 3:], wanted[:, 3:])


def test_decoding_with_a_static_cache_compiles_to_one_graph(models):
    """As `generate` compiles it on a GPU: one graph for all steps."""
    model, logits = models("llama"), {}
    name = "cache" if "cache" in inspect.signature(model.forward).parameters else "past_key_values"
    for implementation in ("eager", "cki"):
        model.set_attn_implementation(implementation)
        cache = {name: transformers.StaticCache(config=model.config, max_cache_len=16)}
        model(ids(), attention_mask=BATCHES["whole"], **cache)
        step = torch.compile(model, fullgraph=True, backend="aot_eager") if implementation == "cki" else model
        token, mask = ids()[:, :1], torch.ones(2, 10, dtype=torch.int64)
        position = torch.full((2, 1), 9)
        logits[implementation] = step(token, attention_mask=mask, position_ids=position, **cache).logits
    assert close(logits["cki"], logits["eager"])


@pytest.mark.parametrize("family", ["llama", "mistral", "gpt_oss"])
def test_autocast(models, launches, family):
    """Rotated q and k are fp32 there, v is not."""
    model, found = models(family), {}
    for implementation in ("eager", "cki"):
        model.set_attn_implementation(implementation)
        with torch.autocast("cpu", torch.bfloat16):
            found[implementation] = model(ids(), attention_mask=BATCHES["whole"]).logits.float()
    assert launches.total() == model.config.num_hidden_layers
    assert (found["cki"] - found["eager"]).abs().mean() < 0.02 * found["eager"].abs().mean()


@pytest.mark.parametrize("cache", ["dynamic", "static"])
def test_autocast_of_generate(models, launches, cache):
    model = models("llama")
    model.set_attn_implementation("cki")
    with torch.autocast("cpu", torch.bfloat16):
        text = model.generate(
            ids(), attention_mask=BATCHES["left"], max_new_tokens=3, do_sample=False, cache_implementation=cache,
            disable_compile=True,
        )  # fmt: skip
    assert text.shape == (2, 12) and launches.total() == 3 * model.config.num_hidden_layers


def test_models_are_made_with_it(models, launches, tmp_path):
    """`attn_implementation="cki"` of from_config and from_pretrained."""
    model = models("llama")
    model.save_pretrained(tmp_path)
    wanted = model(ids(), attention_mask=BATCHES["whole"]).logits
    loaded = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, attn_implementation="cki").eval()
    made = transformers.AutoModelForCausalLM.from_config(model.config, attn_implementation="cki").eval()
    for other in (loaded, made):
        assert other.config._attn_implementation == "cki"
        launches.clear()
        logits = other(ids(), attention_mask=BATCHES["whole"]).logits
        assert launches.total() == model.config.num_hidden_layers
        assert logits.shape == wanted.shape and (other is made or close(logits, wanted))


def test_refusals(models):
    module, q = models("llama"), torch.zeros(1, 2, 3, 16)
    with pytest.raises(UnsupportedError, match=r"dropout is 0\.1"):
        attention_forward(module, q, q, q, None, dropout=0.1)
    with pytest.raises(UnsupportedError, match="output_attentions=True"):
        attention_forward(module, q, q, q, None, output_attentions=True)
    with pytest.raises(UnsupportedError, match="a window of 2 without a mask"):
        attention_forward(module, q, q, q, None, is_causal=False, sliding_window=2)
