"""What a decode step launches: at most six kernels a layer on Hopper, which compute what more would."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from cki import dtypes
from cki.device import sim_device
from cki.engine import step_plan
from cki.engine.device_weights import DeviceWeights
from cki.engine.model import DecoderModel, ModelLimits, StepRow
from cki.engine.quantized import dequantize_blocks, quantize_blocks
from cki.engine.step_plan import CacheGeometry, DecoderPlanner, StepShape
from tests.engine.decoder_definition import decoder
from tests.engine.tiny import FULL, random_weights

LIMITS = ModelLimits(8, 64, 64)


@pytest.mark.parametrize(
    ("fp8", "batch", "product"),
    [(False, 1, "linear_decode"), (False, 8, "linear_decode"), (False, 9, "few_rows"), (False, 16, "few_rows"),
     (False, 64, "few_rows"), (True, 1, "few_rows"), (True, 4, "few_rows"), (True, 16, "few_rows"),
     (True, 64, "few_rows")],
)  # fmt: skip
def test_launches_of_a_layer(batch, fp8, product):
    """Qwen3-8B's shapes: norm and Q, K, V; append; attention; output and residual; norm, gate and up; down.  Where
    launches hand each other rows the first product appends."""
    config = replace(
        FULL, hidden_size=4096, num_layers=3, num_heads=32, num_kv_heads=8, head_dim=128, intermediate_size=12288,
        vocab_size=151936, attention_bias=False, attention_output_bias=False, mlp_bias=False, sliding_window=None,
        window_layers=(False, False, False), rope_scaling=None,
    )  # fmt: skip
    planner = DecoderPlanner(config, dtypes.bf16, CacheGeometry(512, 16, 512), 8192, 64, fp8=fp8)
    device = replace(sim_device("sm_90a"), sm_count=132)
    plan = planner.plan(StepShape(batch, batch, True), device)
    entries = [step.kernel.entry for step in plan.steps]
    layer = [product, "paged_attention", product, product, product]
    if product == "linear_decode":
        layer.insert(1, "append_kv")
    end = ["rms_norm", "linear_hopper" if batch > 16 else "linear_skinny"] if batch > 8 else ["linear_decode"]
    begin = "embed_stream" if product == "few_rows" else "embed_tokens"
    assert entries == ["advance", begin, *layer * 3, *end, "sample"]


@pytest.mark.parametrize("fp8", [False, True])
def test_they_are_as_near_to_the_definition(device, fp8):
    """Three rows of a decode step in bf16, against as many launches as there were."""
    config = replace(FULL, intermediate_size=128, dtype="bf16")
    weights = random_weights(config)
    ids = [[5, 9, 77, 3, 50], [8], [1, 2, 3]]
    stands_for = dict(weights)
    if fp8:
        for name, values in weights.items():
            if "_proj.weight" in name:
                stands_for[name] = dequantize_blocks(quantize_blocks(values))
    errors = []
    for even in (False, True):
        placed = DeviceWeights(config, weights, dtypes.bf16, device.info, LIMITS.max_length, fp8=fp8)
        model = DecoderModel(
            config, placed, device=device.info, block_size=4, limits=LIMITS, merge_inside=even,
            way="decode" if even else "plain",
        )  # fmt: skip
        sequences = [model.cache.allocate_sequence() for _ in ids]
        model.prefill([StepRow(*row) for row in zip(sequences, ids)]).wait()
        model.decode([StepRow(sequence, [7]) for sequence in sequences]).wait()
        truth = np.array([decoder(stands_for, config, np.array([*tokens, 7]))[-1] for tokens in ids])
        errors.append(np.abs(model.logits().numpy()[:3].astype(np.float64) - truth).max() / truth.std())
        names = [step.kernel.entry for step in model.plan(model.decode_shape(3)).steps]
        assert ("linear_decode" in names) == (even or fp8)
    assert errors[1] <= 1.5 * errors[0]


@pytest.mark.parametrize(
    ("rows", "fp8", "head_dim"),
    [(9, True, 128), (33, True, 128), (9, False, 128), (33, False, 128), (17, False, 32)],
)
def test_launches_that_hand_each_other_rows(device, rows, fp8, head_dim):
    """W8A16 in two parts is as near to the definition as by `linear_decode`, W8A8 and bf16 as with launches between."""
    if device.info.arch != "sm_90a":
        pytest.skip("sm_90a's")
    config = replace(
        FULL, hidden_size=256, num_heads=4, head_dim=head_dim, intermediate_size=384, dtype="bf16", mlp_bias=False,
        attention_output_bias=False,
    )  # fmt: skip
    weights = random_weights(config)
    names = [name for name in weights if "_proj.weight" in name]
    stands_for = dict(weights)
    if fp8:
        stands_for |= {name: dequantize_blocks(quantize_blocks(weights[name])) for name in names}
    ids = [n % 120 + 3 for n in range(rows)]
    truth = np.array([decoder(stands_for, config, np.array([token, 7]))[-1] for token in ids])
    errors = {}
    for way in (None, "plain"):
        placed = DeviceWeights(config, weights, dtypes.bf16, device.info, 64, fp8=fp8)
        model = DecoderModel(
            config, placed, device=device.info, block_size=16, limits=ModelLimits(rows, 64, 64), way=way,
            cache_nbytes=rows * 2 * 3 * 16 * 2 * 128 * 2,
        )  # fmt: skip
        sequences = [model.cache.allocate_sequence() for _ in ids]
        model.decode([StepRow(sequence, [token]) for sequence, token in zip(sequences, ids)]).wait()
        model.decode([StepRow(sequence, [7]) for sequence in sequences]).wait()
        errors[way] = (
            np.sqrt(np.square(model.logits().numpy()[:rows].astype(np.float64) - truth).mean()) / truth.std()
        )
        steps = model.plan(model.decode_shape(rows)).steps
        assert ("few_rows" in {step.kernel.entry for step in steps}) == (way is None)
        around = 4 if rows <= 16 else 5  # the small head's norm is a launch
        assert way or len(steps) == (5 if head_dim == 128 else 6) * config.num_layers + around
    assert errors[None] <= 1.2 * errors["plain"]
    assert errors[None] < (0.2 if fp8 and rows > 32 else 0.02)


def test_launches_that_overlap_leave_the_same_bits(device, monkeypatch):
    """Norms, quantisations and gates of W8A8 that begin while the launch before ends."""
    config = replace(FULL, intermediate_size=128, dtype="bf16")
    weights = random_weights(config)
    ids = [[n + 1] for n in range(17)]
    found = []
    for overlaps in (True, False):
        if not overlaps:
            monkeypatch.setattr(step_plan, "_overlapping", lambda step: step)
        placed = DeviceWeights(config, weights, dtypes.bf16, device.info, 64, fp8=True)
        model = DecoderModel(
            config, placed, device=device.info, block_size=4, limits=ModelLimits(17, 64, 64), way="plain"
        )  # fmt: skip
        sequences = [model.cache.allocate_sequence() for _ in ids]
        model.decode([StepRow(*row) for row in zip(sequences, ids)]).wait()
        found.append(model.logits().numpy()[: len(ids)].copy())
        steps = model.plan(model.decode_shape(len(ids))).steps
        small = {"rms_norm", "norm_quantize", "quantize_fp8", "gated_activation"}
        chosen = [step for step in steps if step.kernel.entry in small]
        assert {step.kernel.entry for step in chosen} == small
        assert {step.programmatic for step in chosen} == {overlaps}
    assert found[0].tobytes() == found[1].tobytes()


@pytest.mark.gpu
@pytest.mark.parametrize(("rows", "of_layer"), [(3, 6), (9, 5)])
def test_the_captured_step_has_as_many_nodes(rows, of_layer):
    """Six launches a layer, five from 9 sequences on, and four around them, are what a graph of a step holds."""
    pytest.importorskip("cupy")
    from cki import driver
    from cki.device import cuda_device

    device = cuda_device(0)
    if device.arch != "sm_90a":
        pytest.skip("six launches are Hopper's")
    config = replace(
        FULL, hidden_size=256, num_heads=4, head_dim=128, intermediate_size=384, dtype="bf16", mlp_bias=False,
        attention_output_bias=False,
    )  # fmt: skip
    placed = DeviceWeights(config, random_weights(config), dtypes.bf16, device, LIMITS.max_length)
    model = DecoderModel(
        config, placed, device=device, block_size=4, limits=ModelLimits(16, 64, 64), merge_inside=True,
        way="decode" if rows < 9 else None,
    )  # fmt: skip
    program = model.program(model.decode_shape(rows))
    assert program.is_captured
    api, mode = driver.api(), driver.api().CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_THREAD_LOCAL
    api.cuStreamBeginCapture(model.stream, mode)
    program.launch(model.stream, as_graph=False)
    _, graph = api.cuStreamEndCapture(model.stream)
    _, _, count = api.cuGraphGetNodes(graph, 0)
    api.cuGraphDestroy(graph)
    assert count == program.num_kernels == of_layer * config.num_layers + 4
