"""A decoder's steps against the float64 definition: prefill in parts, decoding, mixed batches, every feature."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from cki import dtypes
from cki.device import DeviceInfo, sim_device
from cki.engine.device_weights import DeviceWeights, weight_shapes
from cki.engine.model import DecoderModel, ModelLimits, RowSampling, StepRow, bucket
from cki.engine.step_plan import CacheGeometry, DecoderPlanner, StepShape
from tests.engine.decoder_definition import decoder
from tests.engine.tiny import LLAMA, MODELS, random_weights

LIMITS = ModelLimits(max_sequences=8, max_step_tokens=64, max_length=100)


def model_of(config, weights, device: DeviceInfo, dtype=dtypes.f32):
    placed = DeviceWeights(config, weights, dtype, device, LIMITS.max_length)
    return DecoderModel(config, placed, device=device, block_size=4, limits=LIMITS)


def logits_of(model, result, rows):
    """Of a step's rows, once it is done; the tokens it chose are the largest ones'."""
    tokens = result.wait().tokens
    logits = model.logits().numpy()[:rows].astype(np.float64)
    assert np.array_equal(tokens, logits.argmax(1))
    return logits


@pytest.mark.parametrize("name", MODELS)
def test_steps_have_the_logits_of_the_definition(device, name):
    config = MODELS[name]
    weights = random_weights(config)
    model = model_of(config, weights, device.info)
    rng = np.random.default_rng(1)
    ids = [rng.integers(0, config.vocab_size, n).tolist() for n in (13, 5, 22)]
    truth = [decoder(weights, config, np.array(tokens)) for tokens in ids]
    sequences = [model.cache.allocate_sequence() for _ in ids]
    done = [0, 0, 0]

    def step(kind, counts):
        rows, expected = [], []
        for number, count in counts.items():
            rows.append(StepRow(sequences[number], ids[number][done[number] : done[number] + count]))
            done[number] += count
            expected.append(truth[number][done[number] - 1])
        logits = logits_of(model, kind(rows), len(rows))
        assert np.abs(logits - expected).max() < 2e-6 * np.abs(truth[0]).max()

    step(model.prefill, {2: 10, 0: 9, 1: 1})
    step(model.prefill, {2: 8, 0: 1})
    step(model.decode, {1: 1, 2: 1})
    step(model.decode, {0: 1, 1: 1, 2: 1})
    step(model.prefill, {1: 2, 0: 1, 2: 1})
    step(model.decode, {0: 1, 2: 1})
    assert done == [13, 5, 22]


def test_fused_steps_are_as_near_to_the_definition(device):
    """Norms and gates inside the products, in f16: three rows of a decode step."""
    config = replace(MODELS["full"], dtype="f16")
    weights = random_weights(config, dtype=np.float16)
    ids = [[5, 9, 77, 3, 50], [8], [1, 2, 3]]
    truth = np.array([decoder(weights, config, np.array([*tokens, 7]))[-1] for tokens in ids])
    errors = []
    for fused in (False, True):  # the second time with attention's merge inside, too
        placed = DeviceWeights(config, weights, dtypes.f16, device.info, LIMITS.max_length)
        model = DecoderModel(
            config,
            placed,
            device=device.info,
            block_size=4,
            limits=LIMITS,
            way="decode" if fused else "plain",
            merge_inside=fused,
        )
        sequences = [model.cache.allocate_sequence() for _ in ids]
        model.prefill([StepRow(*row) for row in zip(sequences, ids)]).wait()
        model.decode([StepRow(sequence, [7]) for sequence in sequences]).wait()
        errors.append(np.abs(model.logits().numpy()[:3].astype(np.float64) - truth).max())
        names = [step.kernel.entry for step in model.plan(model.decode_shape(3)).steps]
        assert ("linear_decode" in names) == fused
        assert ("rms_norm" in names) != fused
    assert errors[1] <= 1.5 * errors[0] + 1e-5 * np.abs(truth).max()


def test_a_chained_step_takes_the_tokens_that_the_device_chose(device):
    weights = random_weights(LLAMA)
    model = model_of(LLAMA, weights, device.info)
    prompts = [[5, 9, 77, 3], [8, 8]]
    sequences = [model.cache.allocate_sequence() for _ in prompts]
    first = model.prefill([StepRow(s, p) for s, p in zip(sequences, prompts)]).wait().tokens
    steps = [model.decode([StepRow(s, [t]) for s, t in zip(sequences, first)])]
    for _ in range(2):  # launched before the results of the one before are read
        steps.append(model.decode([StepRow(s, [-1]) for s in sequences], chained=True))
    later = [result.wait().tokens for result in steps[1:]]
    tokens = [[*p, int(t)] for p, t in zip(prompts, first)]
    for _ in range(3):
        for one in tokens:
            one.append(int(decoder(weights, LLAMA, np.array(one))[-1].argmax()))
    assert np.array_equal(later, np.array([one[-2:] for one in tokens]).T)


def test_a_chained_step_leaves_rows_alone_that_have_ended(device):
    """One by its token, one by its length; the third goes on as it would alone."""
    weights = random_weights(LLAMA)
    model = model_of(LLAMA, weights, device.info)
    prompts = [[5, 9, 77, 3], [8, 8], [40, 2, 9]]
    sequences = [model.cache.allocate_sequence(prompt) for prompt in prompts]
    first = model.prefill([StepRow(s, p) for s, p in zip(sequences, prompts)]).wait().tokens
    ends = int(decoder(weights, LLAMA, np.array([*prompts[0], first[0]]))[-1].argmax())
    kinds = [RowSampling(ends=(127, ends)), RowSampling(limits=4), RowSampling(ends=(1000,), limits=100)]
    rows = [StepRow(s, [t], kind) for s, t, kind in zip(sequences, first, kinds)]
    results = [model.decode(rows)]
    for _ in range(3):
        results.append(model.decode(rows, chained=True))
    assert model.cache.seq_lens.numpy()[:3].tolist() == [0, 0, 7]
    tokens = [*prompts[2], int(first[2])]
    for result in results:
        tokens.append(int(decoder(weights, LLAMA, np.array(tokens))[-1].argmax()))
        assert result.wait().tokens[2] == tokens[-1]
    assert model.cache.table("slot_mapping").numpy()[:2].tolist() == [-1, -1]


def test_sampling_parameters_are_each_row_s_own(device):
    """Rows differ in temperature, seed and memory; their tokens are those of the definition on the step's logits."""
    from tests.engine.sampling_definition import sample_tokens

    model = model_of(LLAMA, random_weights(LLAMA), device.info)
    prompts = [[5, 9, 77, 3], [8, 8], [1, 2, 3]]
    sampling = [
        RowSampling(1.5, 20, 0.9, 0.01, seed=-3),
        RowSampling(),
        RowSampling(0.7, 0, 1.0, 0.0, 1.5, 9, 1, 4),
    ]
    sequences = [model.cache.allocate_sequence() for _ in prompts]
    model.remember(1, prompts[2])
    result = model.prefill([StepRow(*row) for row in zip(sequences, prompts, sampling)]).wait()
    seen = np.zeros((2, 4), np.uint32)
    seen[1, 0] = 0b1110
    fields = {
        name: np.array([getattr(s, name) for s in sampling])
        for name in ("temperature", "top_k", "top_p", "min_p", "repetition_penalty", "seed", "seen_rows")
    }
    steps = np.array([len(prompt) for prompt in prompts])
    tokens, logprobs = sample_tokens(model.logits().numpy()[:3], **fields, seen=seen, step=steps)
    assert np.array_equal(result.tokens, tokens)
    assert np.allclose(result.logprobs, logprobs, atol=1e-5)
    assert result.top_logprobs is not None
    assert np.all(np.diff(result.top_logprobs[2, :4]) <= 0)


def test_buckets_hold_what_they_are_for_and_waste_little():
    for count in range(1, 3000):
        size = bucket(count, 4096)
        assert size >= count
        assert size <= max(2 * count - 1, 1) if count <= 64 else size <= 1.26 * count
    assert len({bucket(count, 4096) for count in range(1, 4097)}) < 40
    assert bucket(60, 50) == 50


def test_each_layer_has_its_own_weights_and_cache():
    """Layers are planned once and moved to other tensors."""
    config = MODELS["full"]
    planner = DecoderPlanner(config, dtypes.bf16, CacheGeometry(64, 16, 8), 128, 8)
    for shape in (StepShape(2, 2, True), StepShape(64, 2, False, 32)):
        plan = planner.plan(shape, sim_device("sm_90a"))
        named = {str(argument) for step in plan.steps for argument in step.args}
        for role in (*weight_shapes(config), "layers.0.k_cache", "layers.1.v_cache", "layers.2.k_cache"):
            uses = sum(f"slot='{role}'" in text for text in named)
            assert uses >= 1, role
        slots = [[s.slot for s in step.args if hasattr(s, "slot")] for step in plan.steps]
        numbers = [{slot.split(".")[1] for slot in names if slot.startswith("layers.")} for names in slots]
        order = [number for found in numbers for number in found]
        assert order == sorted(order)
        assert all(len(found) <= 1 for found in numbers)


@pytest.mark.parametrize(("fused", "most"), [(False, 10), (True, 6)])
def test_a_step_s_launches_are_few(fused, most):
    planner = DecoderPlanner(
        LLAMA, dtypes.bf16, CacheGeometry(64, 16, 8), 128, 8, "decode" if fused else "plain", fused
    )
    plan = planner.plan(StepShape(1, 1, True), sim_device("sm_90a"))
    besides = 4 if fused else 5  # what begins a step, embedding, head and sampling; the last norm
    assert (len(plan.steps) - besides) / LLAMA.num_layers <= most


@pytest.mark.gpu
def test_the_captured_graph_holds_these_launches_and_nothing_else():
    from cki import driver
    from cki.device import cuda_device

    config = replace(LLAMA, dtype="bf16")
    placed = DeviceWeights(config, random_weights(config), dtypes.bf16, cuda_device(0), LIMITS.max_length)
    model = DecoderModel(
        config, placed, device=cuda_device(0), block_size=4, limits=LIMITS, way="decode", merge_inside=True
    )
    program, api = model.program(model.decode_shape(1)), driver.api()
    with driver.on_device(0):
        mode = api.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_THREAD_LOCAL
        assert int(api.cuStreamBeginCapture(model.stream, mode)[0]) == 0
        program.launch(model.stream, as_graph=False)
        status, graph = api.cuStreamEndCapture(model.stream)
        assert int(status) == 0
        nodes = api.cuGraphGetNodes(graph)[-1]
        api.cuGraphDestroy(graph)
    assert nodes == program.num_kernels == 4 + 6 * config.num_layers
