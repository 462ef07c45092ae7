"""A cache of e4m3: what prefills read of it, and the whole model over it."""

from __future__ import annotations

import itertools
from dataclasses import replace

import ml_dtypes
import numpy as np
import pytest

from cki import dtypes
from cki.engine import LLM, SamplingParams
from cki.engine.device_memory import DeviceTensors
from cki.engine.device_weights import DeviceWeights
from cki.engine.model import DecoderModel, ModelLimits, StepRow
from cki.engine.program import StepProgram
from cki.engine.scheduler import Scheduler
from cki.errors import InvalidArgumentError
from cki.operand import dense
from cki.ops.gather_cache import plan_gather_cache
from cki.plan import Plan
from cki.reference import quantize_fp8
from tests.engine import decoder_definition as definition
from tests.engine.decoder_definition import decoder
from tests.engine.fake_model import FakeModel
from tests.engine.test_scheduler import request_for
from tests.engine.tiny import FULL, LLAMA, MODELS, random_weights

LIMITS = ModelLimits(max_sequences=8, max_step_tokens=32, max_length=100)


def test_gathered_keys_are_those_that_the_tables_name(device):
    rng = np.random.default_rng(0)
    blocks, size, heads, dim, columns = 9, 4, 3, 16, 5
    lengths = [7, 0, 18, 4]
    table = rng.integers(0, blocks, (len(lengths), columns))
    table[2, 1] = blocks  # no block of the cache
    arrays = {
        name: rng.normal(size=(blocks, size, heads, dim)).astype(ml_dtypes.float8_e4m3fn)
        for name in ("k", "v")
    } | {name: rng.random((blocks, size, heads)).astype(np.float32) for name in ("k_scale", "v_scale")}
    arrays |= {
        "table": table.astype(np.int32), "offsets": np.cumsum([0, *lengths]).astype(np.int32),
        "k_packed": np.full((32, heads, dim), 9, np.float16), "v_packed": np.full((32, heads, dim), 9, np.float16),
    }  # fmt: skip
    specs = {name: (values.shape, dtypes.from_numpy(values.dtype)) for name, values in arrays.items()}
    memory = DeviceTensors(device.info, [(name, *spec) for name, spec in specs.items()])
    for name, values in arrays.items():
        memory.write(name, values)
    memory.finish()
    o = {name: dense(name, *spec) for name, spec in specs.items()}
    steps = plan_gather_cache(
        (o["k"], o["v"]),
        (o["k_scale"], o["v_scale"]),
        o["table"],
        o["offsets"],
        (o["k_packed"], o["v_packed"]),
    )
    StepProgram(Plan(steps), device.info, dict(memory.items())).launch(0)
    for letter in "kv":
        whole = arrays[letter].astype(np.float32) * arrays[f"{letter}_scale"][..., None]
        whole = np.concatenate([whole, np.zeros((1, size, heads, dim), np.float32)])
        expected = [whole[table[s, p // size], p % size] for s, n in enumerate(lengths) for p in range(n)]
        found = memory[f"{letter}_packed"].numpy()
        assert np.array_equal(found[: sum(lengths)], np.array(expected).astype(np.float16))
        assert (found[sum(lengths) :] == 9).all()


def rounded(attention):
    """The definition's attention, on keys and values that went through e4m3 with a scale a token and head."""

    def call(q, k, v, **options):
        through = []
        for heads in (k, v):
            codes, scales = quantize_fp8(heads)
            through.append(codes.astype(np.float64) * scales)
        return attention(q, *through, **options)

    return call


PARTS = (("prefill", (9, 3, 10)), ("prefill", (2, 1, 10)), ("decode", (1, 1, 1)), ("decode", (1, 0, 1)))


def test_logits_are_as_near_to_the_definition_as_its_own_on_codes(device, monkeypatch):
    """Prompts in parts, mixed lengths, then decoding."""
    config = replace(MODELS["full"], dtype="f16")
    weights = random_weights(config, dtype=np.float16)
    rng = np.random.default_rng(1)
    ids = [rng.integers(0, config.vocab_size, n).tolist() for n in (13, 5, 22)]
    truth = [decoder(weights, config, np.array(tokens)) for tokens in ids]
    monkeypatch.setattr(definition, "attention", rounded(definition.attention))
    on_codes = [decoder(weights, config, np.array(tokens)) for tokens in ids]
    placed = DeviceWeights(config, weights, dtypes.f16, device.info, LIMITS.max_length)
    model = DecoderModel(config, placed, device=device.info, block_size=4, limits=LIMITS, kv_codes=True)
    sequences, done, errors, of_codes = [model.cache.allocate_sequence() for _ in ids], [0, 0, 0], [], []
    for kind, counts in PARTS:
        rows, ends = [], []
        for number in itertools.compress(range(3), counts):
            end = done[number] + counts[number]
            rows.append(StepRow(sequences[number], ids[number][done[number] : end]))
            ends.append((number, end - 1))
            done[number] = end
        getattr(model, kind)(rows).wait()
        expected = np.array([truth[number][end] for number, end in ends])
        errors.append(model.logits().numpy()[: len(rows)].astype(np.float64) - expected)
        of_codes.append(np.array([on_codes[number][end] for number, end in ends]) - expected)
    assert done == [13, 5, 22]
    found, theirs = (np.sqrt(np.mean(np.concatenate(e) ** 2)) / truth[2].std() for e in (errors, of_codes))
    assert 0.01 < theirs < 0.2
    assert found < 1.3 * theirs


def test_a_prefill_step_holds_as_many_keys_as_the_copy_has_room_for():
    model = FakeModel(ModelLimits(8, 64, 100, max_step_keys=50), 64, 4)
    scheduler = Scheduler(model.cache, model.limits)
    for size in (30, 25, 20):
        scheduler.add(request_for(list(range(size)), 5))
    scheduler.admit()
    parts = scheduler.prefill_parts()
    assert [part.size for part in parts] == [30]
    model.prefill([StepRow(part.request.sequence, part.request.tokens[: part.size]) for part in parts])
    parts[0].request.receive(1, None, 100)
    assert [part.size for part in scheduler.prefill_parts()] == [25, 20]


def test_answers_over_a_cache_of_codes(device):
    """Preempted and shared; greedy answers do not depend on the company."""
    llm = LLM.from_weights(
        FULL, random_weights(FULL), dtype="f16", device=device.kind, max_length=64, max_sequences=4,
        max_step_tokens=16, block_size=4, kv_dtype="e4m3", cache_nbytes=60_000,
    )  # fmt: skip
    prompts = [[5, 9, 77, 3, 15, 60], [5, 9, 77, 3, 8], [100, 20]]
    params = SamplingParams(max_tokens=6, ignore_eos=True)
    together = [output.token_ids for output in llm.generate(prompts, params)]
    assert together == [llm.generate(prompt, params)[0].token_ids for prompt in prompts]
    assert str(llm.model.cache.dtype) == "e4m3"


def test_what_is_refused():
    with pytest.raises(InvalidArgumentError, match="kv_dtype is 'int8'"):
        LLM.from_weights(LLAMA, random_weights(LLAMA), device="sim", kv_dtype="int8")
    with pytest.raises(InvalidArgumentError, match="with activations of f32"):
        LLM.from_weights(LLAMA, random_weights(LLAMA), device="sim", dtype="f32", kv_dtype="e4m3")
