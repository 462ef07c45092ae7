"""`cki.Encoder` against models with Hugging Face's names and arithmetic, on the simulated device and on the GPU."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest

import cki
import cki.reference
from cki.errors import DeviceError, InvalidArgumentError, InvalidTypeError
from tests.compare import assert_close

torch = pytest.importorskip("torch")
from tests.encoder.hf_bert import CONFIG, PRE_LN, ROBERTA, forward, random_model  # noqa: E402

pytestmark = pytest.mark.torch
DTYPES = {"f32": np.float32, "f16": np.float16, "bf16": ml_dtypes.bfloat16}
TORCH = {"f32": torch.float32, "f16": torch.float16, "bf16": torch.bfloat16}
LENGTHS = np.array([9, 4, 1])
OFFSETS = np.array([0, 7, 7, 40, 41, 46])
MASK = (np.arange(9) < LENGTHS[:, None]).astype(np.int64)


def some_ids(config, batch=3, seq=9, seed=1):
    """Token ids, padded behind LENGTHS where the batch is of that size."""
    ids = np.random.default_rng(seed).integers(3, config["vocab_size"], (batch, seq))
    if batch == len(LENGTHS) and seq == 9:
        ids[MASK == 0] = config["pad_token_id"]
    return ids


def on(device, arrays, dtype=np.float32):
    return {name: device.array(value.astype(dtype)) for name, value in arrays.items()}


def check(device, config, dtype="f32", *, kept=MASK, **inputs):
    """The encoder's hidden states of the kept tokens, within twice the error of torch in the same type."""
    model, state = random_model(config)
    encoder = cki.Encoder.from_weights(on(device, state, DTYPES[dtype]), config)
    ids = some_ids(config)
    mask = inputs.pop("mask", None)
    names = {"types": "token_type_ids", "positions": "position_ids"}
    arguments = {names[name]: device.array(value) for name, value in inputs.items()}
    if mask is not None:
        arguments["attention_mask"] = device.array(mask)
    got = device.numpy(encoder(device.array(ids), **arguments))
    assert got.dtype == DTYPES[dtype]
    assert got.shape == (*ids.shape, config["hidden_size"])
    truth = forward(model, ids, mask, **inputs).numpy()
    plain = forward(model.to(TORCH[dtype]), ids, mask, **inputs).double().numpy()
    chosen = kept.astype(bool)
    assert_close(got[chosen], truth[chosen], plain[chosen])
    return got


@pytest.mark.parametrize("config", [CONFIG, ROBERTA, PRE_LN], ids=["bert", "roberta", "roberta-prelayernorm"])
@pytest.mark.parametrize("dtype", ["f32", "f16", "bf16"])
def test_matches_the_model(device, config, dtype):
    check(device, config, dtype, mask=MASK)


@pytest.mark.parametrize("config", [CONFIG, ROBERTA, PRE_LN], ids=["bert", "roberta", "roberta-prelayernorm"])
def test_the_float64_reference_is_the_model(config):
    model, state = random_model(config)
    encoder = cki.Encoder.from_weights({n: v.astype(np.float32) for n, v in state.items()}, config)
    ids, chosen = some_ids(config), MASK.astype(bool)
    truth = forward(model, ids, MASK).numpy()
    for weights in (encoder.weights, encoder.prepare().weights):
        for padding in ({"attention_mask": MASK}, {"lengths": LENGTHS}):
            hidden = cki.reference.encoder(weights, encoder.config, ids, **padding)
            np.testing.assert_allclose(hidden[chosen], truth[chosen], rtol=0, atol=1e-12)
        vectors = cki.reference.encoder_embed(weights, encoder.config, ids, MASK)
        np.testing.assert_allclose(vectors, cki.reference.mean_pool(truth, MASK), rtol=0, atol=1e-12)


@pytest.mark.parametrize("activation", ["gelu_new", "relu"])
def test_other_activations(device, activation):
    check(device, {**CONFIG, "hidden_act": activation}, mask=MASK)


def test_token_types_and_positions(device):
    random = np.random.default_rng(2)
    types, positions = random.integers(0, 2, (3, 9)), random.integers(0, 40, (3, 9))
    check(device, CONFIG, mask=MASK, types=types)
    check(device, CONFIG, mask=MASK, positions=positions)


def test_without_a_mask_every_token_counts(device):
    check(device, CONFIG, kept=np.ones((3, 9)))


def test_roberta_counts_positions_by_tokens_that_are_no_padding(device):
    """Padding before, behind and between: sequences longer than a warp is wide, too."""
    model, state = random_model({**ROBERTA, "max_position_embeddings": 80})
    encoder = cki.Encoder.from_weights(on(device, state), {**ROBERTA, "max_position_embeddings": 80})
    ids = np.random.default_rng(3).integers(2, 97, (4, 70))
    ids[0, :33] = ids[1, 40:] = ids[2, ::3] = 1
    mask = (ids != 1).astype(np.int64)
    got = device.numpy(encoder(device.array(ids), device.array(mask)))
    truth, plain = (forward(m, ids, mask).double().numpy() for m in (model, model.float()))
    chosen = mask.astype(bool)
    assert_close(got[chosen], truth[chosen], plain[chosen])


@pytest.mark.parametrize("kind", [bool, np.uint8, np.int8, np.int32, np.int64])
def test_every_kind_of_mask_and_lengths_give_the_same_bits(device, kind):
    _, state = random_model(CONFIG)
    encoder = cki.Encoder.from_weights(on(device, state), CONFIG)
    ids = device.array(some_ids(CONFIG))
    first = device.numpy(encoder(ids, device.array(MASK.astype(bool))))
    mask = MASK.astype(kind) if kind is bool else (MASK * 3).astype(kind)
    assert np.array_equal(first, device.numpy(encoder(ids, device.array(mask))))
    if kind in (np.int32, np.int64):
        assert np.array_equal(first, device.numpy(encoder(ids, lengths=device.array(LENGTHS.astype(kind)))))


@pytest.mark.parametrize("pooling", ["mean", "first"])
@pytest.mark.parametrize("normalize", [True, False])
def test_embed(device, pooling, normalize):
    model, state = random_model(CONFIG)
    encoder = cki.Encoder.from_weights(on(device, state), CONFIG)
    ids = some_ids(CONFIG)
    for mask in (MASK, None):
        hidden = forward(model, ids, mask).numpy()
        kept = np.ones_like(ids) if mask is None else mask
        truth = (
            cki.reference.mean_pool(hidden, kept, normalize=normalize)
            if pooling == "mean"
            else hidden[:, 0] / (np.linalg.norm(hidden[:, 0], axis=-1, keepdims=True) if normalize else 1)
        )
        arguments = [device.array(ids)] + ([] if mask is None else [device.array(mask)])
        got = encoder.embed(*arguments, pooling=pooling, normalize=normalize)
        assert_close(device.numpy(got), truth, truth.astype(np.float32))


def test_hidden_tokens_do_not_matter(device):
    _, state = random_model(CONFIG)
    encoder = cki.Encoder.from_weights(on(device, state, np.float16), CONFIG)
    ids, mask = some_ids(CONFIG), device.array(MASK)
    first = device.numpy(encoder.embed(device.array(ids), mask))
    ids[MASK == 0] = 50
    assert np.array_equal(first, device.numpy(encoder.embed(device.array(ids), mask)))
    alone = device.numpy(encoder.embed(device.array(ids[1:2, :4])))
    assert np.abs(alone[0].astype(float) - first[1]).max() < 2e-3


def test_out_workspace_and_both_together(device):
    _, state = random_model(CONFIG)
    encoder = cki.Encoder.from_weights(on(device, state, np.float16), CONFIG)
    ids, mask = device.array(some_ids(CONFIG)), device.array(MASK)
    expected = device.numpy(encoder(ids, mask))
    workspace = device.empty((encoder.workspace_nbytes(3, 9),), np.uint8)
    out = device.empty((3, 9, 48), np.float16)
    for options in ({"out": out}, {"workspace": workspace}, {"out": out, "workspace": workspace}):
        y = encoder(ids, mask, **options)
        assert np.array_equal(device.numpy(y), expected)
        assert (y is out) == ("out" in options)
    strided = device.empty((9, 3, 50), np.float16)[..., 1:49].transpose(1, 0, 2)
    assert np.array_equal(device.numpy(encoder(ids, mask, out=strided)), expected)
    pooled = encoder.embed(
        ids, mask, workspace=device.empty((encoder.workspace_nbytes(3, 9, pooling="mean"),), np.uint8)
    )
    assert np.array_equal(device.numpy(pooled), device.numpy(encoder.embed(ids, mask)))


def test_every_schedule_gives_the_same_bits_and_no_fault():
    _, state = random_model(ROBERTA)
    with cki.device("sim"):
        encoder = cki.Encoder.from_weights({n: v.astype(np.float16) for n, v in state.items()}, ROBERTA)
        ids = some_ids(ROBERTA)
        packed = {"input_ids": np.random.default_rng(5).integers(2, 97, 48), "cu_seqlens": OFFSETS}
        first, second = encoder.embed(ids, MASK), encoder.embed(**packed)
        for seed in (1, 2):
            with cki.sim.checks(adversarial=True, hazards=True, races=True, seed=seed):
                assert np.array_equal(first, encoder.embed(ids, MASK))
                assert np.array_equal(second, encoder.embed(**packed))


def test_memory_does_not_grow_with_layers_and_grows_linearly_with_tokens():
    sizes = {}
    for layers in (1, 6):
        config = {**CONFIG, "num_hidden_layers": layers, "max_position_embeddings": 70000}
        _, state = random_model({**CONFIG, "num_hidden_layers": layers})
        state["embeddings.position_embeddings.weight"] = np.zeros((70000, 48))
        encoder = cki.Encoder.from_weights({n: v.astype(np.float16) for n, v in state.items()}, config)
        sizes[layers] = [encoder.workspace_nbytes(1, seq) for seq in (16384, 32768, 65536)]
    assert sizes[1] == sizes[6]
    a, b, c = sizes[6]
    assert abs((c - b) - 2 * (b - a)) < 4096
    # Q, K, V and the heads' outputs, one more tensor like the result, a mask and positions.
    assert c <= 65536 * (5 * 48 * 2 + 5) + 4096


def test_a_forward_pass_is_seven_launches_a_layer_and_two_more(device):
    _, state = random_model(CONFIG)
    encoder = cki.Encoder.from_weights(on(device, state, np.float16), CONFIG)
    ids, mask = device.array(some_ids(CONFIG)), device.array(MASK.astype(bool))
    assert encoder.build(ids, mask) == 2 + 7 * 2
    assert (
        encoder.build(ids, device.array(MASK)) == 3 + 7 * 2
    )  # the mask of 64-bit integers is made dense first
    assert encoder.build(ids, mask, pooling="mean") == 3 + 7 * 2
    assert encoder.prepare().build(ids, mask) == 2 + 7 * 2


# --- packed sequences -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("config", [CONFIG, ROBERTA], ids=["bert", "roberta"])
@pytest.mark.parametrize("dtype", ["f32", "f16"])
def test_packed_sequences(device, config, dtype):
    """Sequences without padding, one of them empty, one longer than a warp is wide, and a rest that belongs to none."""
    config = {**config, "max_position_embeddings": 60}
    model, state = random_model(config)
    encoder = cki.Encoder.from_weights(on(device, state, DTYPES[dtype]), config)
    ids = np.random.default_rng(5).integers(0, 97, 48)
    types = np.random.default_rng(6).integers(0, config["type_vocab_size"], 48)
    arguments = [device.array(ids), None, device.array(types)]
    for offsets in (OFFSETS, OFFSETS.astype(np.int32)):
        got = device.numpy(encoder(*arguments, cu_seqlens=device.array(offsets), max_seqlen=33))
        assert got.shape == (48, 48)
        truth, plain = np.zeros((2, 48, 48))
        for start, end in zip(OFFSETS, OFFSETS[1:]):
            if end > start:
                one = (ids[None, start:end], None, types[None, start:end])
                truth[start:end] = forward(model.double(), *one).numpy()
                plain[start:end] = forward(model.to(TORCH[dtype]), *one).double().numpy()
        assert_close(got[:46], truth[:46], plain[:46])
    options = {"token_type_ids": types, "cu_seqlens": OFFSETS}
    if dtype == "f32":
        named = {name: device.numpy(weight) for name, weight in encoder.weights.items()}
        reference = cki.reference.encoder(named, encoder.config, ids, **options)
        np.testing.assert_allclose(reference[:46], truth[:46], rtol=0, atol=1e-12)
        for pooling in ("mean", "first"):
            truth = cki.reference.encoder_embed(named, encoder.config, ids, **options, pooling=pooling)
            vectors = encoder.embed(*arguments, cu_seqlens=device.array(OFFSETS), pooling=pooling)
            assert np.abs(device.numpy(vectors) - truth).max() < 1e-6
            assert not device.numpy(vectors)[1].any()


def test_a_captured_graph_serves_other_lengths(device):
    _, state = random_model(ROBERTA)
    encoder = cki.Encoder.from_weights(on(device, state, np.float16), ROBERTA)
    ids = device.array(np.random.default_rng(5).integers(2, 97, 40))
    offsets = device.array(np.array([0, 20, 30, 40]))
    with cki.capture(encoder.embed, ids, cu_seqlens=offsets, max_seqlen=37) as graph:
        for values in ([0, 20, 30, 40], [0, 1, 38, 40], [0, 0, 20, 40]):
            offsets[...] = device.array(np.array(values))
            eager = encoder.embed(ids, cu_seqlens=offsets, max_seqlen=37)
            assert np.array_equal(device.numpy(graph.replay()), device.numpy(eager))


def test_offsets_beyond_the_tokens_are_cut_off(device):
    _, state = random_model(ROBERTA)
    encoder = cki.Encoder.from_weights(on(device, state), ROBERTA)
    ids = device.array(np.random.default_rng(5).integers(2, 97, 20))
    good = encoder.embed(ids, cu_seqlens=device.array(np.array([0, 9, 20])))
    bad = encoder.embed(ids, cu_seqlens=device.array(np.array([-5, 9, 1 << 40])))
    assert np.array_equal(device.numpy(good), device.numpy(bad))


# --- the user's weights -----------------------------------------------------------------------------------------------


def test_weights_are_used_where_they_lie_and_never_changed(device):
    _, state = random_model(CONFIG)
    weights = on(device, state, np.float16)
    copies = {name: device.numpy(value).copy() for name, value in weights.items()}
    encoder = cki.Encoder.from_weights(weights, CONFIG)
    pointers = {view.ptr for view in encoder._views.values()}
    addresses = {int(w.data.ptr if device.kind == "cuda" else w.ctypes.data) for w in weights.values()}
    assert pointers == addresses
    prepared = encoder.prepare()
    ids, mask = device.array(some_ids(CONFIG)), device.array(MASK)
    assert np.array_equal(device.numpy(encoder(ids, mask)), device.numpy(prepared(ids, mask)))
    new = {view.ptr for view in prepared._views.values()} - pointers
    assert len(new) == 2 * 2  # weight and bias of Q, K and V, in two layers
    assert prepared.prepare()._tensors.keys() == prepared._tensors.keys()
    for name, value in weights.items():
        assert np.array_equal(device.numpy(value).view(np.uint16), copies[name].view(np.uint16)), name
    # A weight that is written to is a weight that is used.
    bias = weights["encoder.layer.1.output.LayerNorm.bias"]
    before = device.numpy(encoder(ids, mask)).astype(np.float32)
    bias += 1
    after = device.numpy(encoder(ids, mask)).astype(np.float32)
    assert np.allclose(after[MASK > 0], before[MASK > 0] + 1, atol=4e-3)


def test_read_only_weights_at_any_address(device):
    """As a memory-mapped file has them: at multiples of the element's size and no more."""
    if device.kind != "sim":
        pytest.skip("NumPy alone has read-only arrays")
    _, state = random_model(CONFIG)
    weights = {}
    for name, value in state.items():
        memory = np.zeros(value.nbytes // 4 + 2, np.uint8)
        start = 2 - memory.ctypes.data % 4
        odd = memory[start : start + value.size * 2].view(np.float16).reshape(value.shape)
        odd[...] = value
        odd.flags.writeable = False
        weights[name] = odd
    ids = some_ids(CONFIG)
    got = cki.Encoder.from_weights(weights, CONFIG)(ids, MASK)
    expected = cki.Encoder.from_weights(on(device, state, np.float16), CONFIG)(ids, MASK)
    assert np.array_equal(got[MASK > 0], expected[MASK > 0])


def test_conversion_is_asked_for(device):
    _, state = random_model(CONFIG)
    with pytest.raises(
        InvalidArgumentError, match=r"embeddings.word_embeddings.weight is f64, not f32.*"
    ) as caught:
        cki.Encoder.from_weights({n: device.array(v) for n, v in state.items()}, CONFIG)
    assert "dtype= converts all weights" in caught.value.hint
    weights = on(device, state, np.float32)
    encoder = cki.Encoder.from_weights(weights, CONFIG, dtype="f16")
    assert encoder.dtype == "f16"
    ids, mask = device.array(some_ids(CONFIG)), device.array(MASK)
    direct = cki.Encoder.from_weights(on(device, state, np.float16), CONFIG)
    assert np.array_equal(device.numpy(encoder(ids, mask)), device.numpy(direct(ids, mask)))
    assert all(device.numpy(w).dtype == np.float32 for w in weights.values())


def test_fp32_vectors_beside_16_bit_matrices(device):
    _, state = random_model(CONFIG)
    weights = {n: device.array(v.astype(np.float16 if v.ndim == 2 else np.float32)) for n, v in state.items()}
    ids, mask = device.array(some_ids(CONFIG)), device.array(MASK)
    got = device.numpy(cki.Encoder.from_weights(weights, CONFIG)(ids, mask))
    plain = device.numpy(cki.Encoder.from_weights(on(device, state, np.float16), CONFIG)(ids, mask))
    # Every vector is exact in f16, so nothing is lost by either.
    assert np.array_equal(got, plain)


@pytest.mark.parametrize("framework", ["torch", "jax", "tensorflow"])
def test_weights_and_ids_of_every_framework(framework):
    """On the simulated device; also weights of one framework and ids of another."""
    pytest.importorskip(framework)
    model, state = random_model(CONFIG)
    ids = some_ids(CONFIG)
    with cki.device("sim"):
        expected = cki.Encoder.from_weights({n: v.astype(np.float32) for n, v in state.items()}, CONFIG)(
            ids, MASK
        )
        if framework == "torch":
            weights = dict(model.float().named_parameters())
            assert weights["embeddings.LayerNorm.weight"].requires_grad
            mine, read = torch.from_numpy, lambda t: t.numpy()
        elif framework == "jax":
            import jax.numpy as jnp

            weights = {name: jnp.asarray(value, jnp.float32) for name, value in state.items()}
            mine, read = lambda a: jnp.asarray(a, jnp.int32), np.asarray
        else:
            import tensorflow as tf

            weights = {name: tf.Variable(value.astype(np.float32)) for name, value in state.items()}
            mine, read = tf.constant, lambda t: t.numpy()
        encoder = cki.Encoder.from_weights(weights, CONFIG)
        for candidate in (encoder, encoder.prepare(), cki.Encoder.from_weights(weights, CONFIG, dtype="f32")):
            y = candidate(mine(ids), mine(MASK))
            assert type(y).__module__.split(".")[0] in (framework, "jaxlib")
            np.testing.assert_allclose(read(y)[MASK > 0], expected[MASK > 0], atol=2e-6)
        assert isinstance(encoder(ids, MASK), np.ndarray)
        half = cki.Encoder.from_weights(weights, CONFIG, dtype="bf16")
        assert half.dtype == "bf16"
        assert np.abs(np.asarray(half(ids, MASK), np.float32)[MASK > 0] - expected[MASK > 0]).max() < 0.3


# --- bad input --------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def small():
    _, state = random_model(CONFIG)
    return cki.Encoder.from_weights({n: v.astype(np.float32) for n, v in state.items()}, CONFIG)


def test_every_broken_rule_is_named(small):
    ids = some_ids(CONFIG)
    with cki.device("sim"), pytest.raises(InvalidArgumentError) as caught:
        small(ids, MASK[:, :4], ids[:2], ids[0, :4], lengths=MASK)
    assert caught.value.problems == (
        "attention_mask and lengths are both given",
        "attention_mask has shape (3, 4), input_ids has shape (3, 9)",
        "lengths has shape (3, 9), input_ids has shape (3, 9)",
        "token_type_ids has shape (2, 9), input_ids has shape (3, 9)",
        "position_ids has shape (4,), input_ids has shape (3, 9)",
    )
    with cki.device("sim"), pytest.raises(InvalidTypeError) as caught:
        small(ids.astype(np.int16), MASK.astype(np.float32), position_ids=ids.astype(np.int8))
    assert caught.value.problems == ("input_ids is i16", "attention_mask is f32", "position_ids is i8")


def test_broken_rules_of_packed_sequences(small):
    ids, offsets = some_ids(CONFIG)[0], np.array([0, 9])
    with cki.device("sim"):
        with pytest.raises(InvalidArgumentError) as caught:
            small(ids, ids, ids[:4], lengths=offsets, cu_seqlens=offsets[:1], max_seqlen=-1)
        assert caught.value.problems == (
            "max_seqlen is -1",
            "cu_seqlens has shape (1,)",
            "attention_mask and cu_seqlens are both given",
            "lengths and cu_seqlens are both given",
            "token_type_ids has shape (4,), input_ids has shape (9,)",
        )
        with pytest.raises(InvalidArgumentError, match=r"input_ids has shape \(1, 9\)"):
            small(ids[None], cu_seqlens=offsets)
        with pytest.raises(InvalidTypeError, match="cu_seqlens is f64"):
            small(ids, cu_seqlens=offsets * 1.0)
        with pytest.raises(InvalidArgumentError, match="nothing to pool"):
            small.embed(ids[:0], cu_seqlens=offsets)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"input_ids": np.zeros(9, np.int64)}, r"input_ids has shape \(9,\)"),
        ({"input_ids": np.zeros((1, 41), np.int64)}, "41 tokens a sequence, the model has positions for 40"),
        ({"workspace": np.zeros(100, np.uint8)}, "workspace has 100 bytes"),
        ({"workspace": np.zeros((100, 1), np.uint8)}, r"workspace .*\(100, 1\)"),
        ({"out": np.zeros((3, 9, 47), np.float32)}, r"out of shape \(3, 9, 48\)"),
    ],
)
def test_bad_arguments(small, change, message):
    arguments = {"input_ids": some_ids(CONFIG), **change}
    with cki.device("sim"), pytest.raises(InvalidArgumentError, match=message):
        small(**arguments)


def test_other_bad_arguments(small, monkeypatch):
    ids = some_ids(CONFIG)
    with cki.device("sim"):
        for pooling in ("max", None):
            with pytest.raises(InvalidArgumentError, match="pooling is"):
                small.embed(ids, pooling=pooling)
        with pytest.raises(InvalidArgumentError, match="nothing to pool"):
            small.embed(ids[:, :0])
        assert small(ids[:0]).shape == (0, 9, 48)
        assert small(ids[:, :0]).shape == (3, 0, 48)
        with pytest.raises(InvalidTypeError, match="input_ids is None"):
            small(None)
        with pytest.raises(InvalidTypeError, match="input_ids is of type list"):
            small([[1, 2]])
        with pytest.raises(InvalidTypeError, match="different frameworks"):
            small(ids, torch.from_numpy(MASK))
        monkeypatch.setenv("CKI_VALIDATE", "1")
        with pytest.raises(InvalidArgumentError, match="token_ids holds 97"):
            small(np.full((1, 3), 97))
        with pytest.raises(
            InvalidArgumentError, match="a sequence has 41 tokens, the model has positions for 40"
        ):
            small(np.zeros(41, np.int64), cu_seqlens=np.array([0, 41]))
    with cki.device("cuda"), pytest.raises(DeviceError, match="are on cpu, but the current device is cuda"):
        small(ids)
