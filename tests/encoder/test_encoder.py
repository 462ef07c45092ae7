"""`cki.Encoder` against models with Hugging Face's names and arithmetic, on the simulated device and on the GPU."""

from __future__ import annotations

import gc

import numpy as np
import pytest

import cki
import cki.reference
from cki.errors import InvalidArgumentError, UnsupportedError
from tests.compare import assert_close

torch = pytest.importorskip("torch")
from tests.encoder.hf_bert import CONFIG, PRE_LN, ROBERTA, forward, random_model  # noqa: E402
from tests.encoder.inputs import DTYPES, LENGTHS, MASK, OFFSETS, TORCH, on, some_ids  # noqa: E402

pytestmark = pytest.mark.torch


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


@pytest.mark.parametrize(
    ("config", "is_prepared"),
    [(CONFIG, True), (PRE_LN, False)],
    ids=["bert, prepared", "roberta-prelayernorm"],
)
def test_the_error_is_within_its_bound_at_every_depth(device, config, is_prepared):
    """Four layers, cut off behind each: what a layer adds to the error is no more than twice what torch's does."""
    config = {**config, "num_hidden_layers": 4}
    model, state = random_model(config, seed=3)
    plain_model = random_model(config, seed=3)[0].to(torch.float16)
    ids = some_ids(config)
    chosen = MASK.astype(bool)
    for depth in (1, 2, 3, 4):
        parts = {
            name: value
            for name, value in state.items()
            if not name.startswith("encoder.layer.") or int(name.split(".")[2]) < depth
        }
        encoder = cki.Encoder.from_weights(
            on(device, parts, np.float16), {**config, "num_hidden_layers": depth}
        )
        encoder = encoder.prepare() if is_prepared else encoder
        got = device.numpy(encoder(device.array(ids), device.array(MASK)))
        truth, plain = (_cut(one, depth, ids) for one in (model, plain_model))
        assert_close(got[chosen], truth[chosen], plain[chosen])


def _cut(model, depth, ids):
    """Hidden states of a model's first layers, in float64."""
    layers = model.encoder.layer
    model.encoder.layer = layers[:depth]
    try:
        return forward(model, ids, MASK).double().numpy()
    finally:
        model.encoder.layer = layers


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


@pytest.mark.gpu
def test_peak_memory_grows_linearly_up_to_32768_tokens():
    """What torch's allocator gives a call of a prepared encoder: the result, and about five tensors like it."""
    if not torch.cuda.is_available():
        pytest.skip("no CUDA GPU")
    hidden, peaks = CONFIG["hidden_size"], {}
    _, state = random_model(CONFIG)
    state["embeddings.position_embeddings.weight"] = np.zeros((32768, hidden))
    weights = {name: torch.from_numpy(value.astype(np.float16)).cuda() for name, value in state.items()}
    encoder = cki.Encoder.from_weights(weights, {**CONFIG, "max_position_embeddings": 32768}).prepare()
    for seq in (8192, 16384, 32768):
        ids = torch.zeros(1, seq, dtype=torch.int64, device="cuda")
        encoder(ids)  # loads kernels
        torch.cuda.synchronize()
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        encoder(ids)
        torch.cuda.synchronize()
        peaks[seq] = torch.cuda.max_memory_allocated() - before
    assert peaks[16384] <= 2 * peaks[8192] + 4096 and peaks[32768] <= 2 * peaks[16384] + 4096
    assert peaks[32768] <= 32768 * (7 * hidden * 2) + 4096


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


def test_choices_of_an_encoder_are_listed_while_it_lives(device):
    _, state = random_model(CONFIG)
    encoder = cki.Encoder.from_weights(on(device, state, np.float16), CONFIG)
    before = cki.choices("encoder")
    encoder.build(device.array(some_ids(CONFIG, 2, 7)))
    (choice,) = (one for one in cki.choices("encoder") if one not in before)
    assert choice.tensors[0] == "input_ids i64[2, 7]" and len(choice.tensors) == 8
    assert len(choice.launches) == 2 + 7 * 2
    del encoder
    gc.collect()
    assert choice not in cki.choices("encoder")


@pytest.mark.parametrize("config", [CONFIG, PRE_LN], ids=["post_ln", "pre_ln"])
def test_a_prepared_layer_is_five_launches(device, monkeypatch, config):
    """Of Hopper's kernel, here also for few tokens: norms are in its products, within the bound of the whole model."""
    from cki.heuristics.linear_hopper import HopperTile
    from cki.ops import linear_hopper

    if device.info.arch != "sm_90a":
        pytest.skip("the kernel is sm_90a's")
    tile = HopperTile(64, 64, 2, True)
    monkeypatch.setattr(linear_hopper, "preferred_hopper_tile", lambda *shape, **options: tile)
    model, state = random_model(config)
    encoder = cki.Encoder.from_weights(on(device, state, np.float16), config).prepare()
    ids, mask = some_ids(config, 3, 11), np.ones((3, 11), np.int64)
    got = device.numpy(encoder(device.array(ids), device.array(mask.astype(bool))))
    truth, plain = forward(model, ids, mask).numpy(), forward(model.half(), ids, mask).double().numpy()
    assert_close(got, truth, plain)
    graph = cki.capture(encoder, device.array(ids), device.array(mask.astype(bool)))
    # Embeddings and their norm, and the last norm; RoBERTa's positions, and a pre-LN model's first norm.
    assert graph.num_kernels == 5 * 2 + 3 + (2 if config is PRE_LN else 0)
    assert encoder.prepare() is encoder


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
    # Weight and bias of Q, K and V, in two layers; with norms in them w1, b1 and b2, and the second's wq, bq and bo.
    assert len(new) == 2 * 2 + 2 * 3 + 3
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
    with cki.device("sim"), torch.no_grad():
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


def test_trained_weights_are_refused_while_gradients_are_recorded():
    """The result would have none, without a word."""
    model, _ = random_model(CONFIG)
    ids = torch.from_numpy(some_ids(CONFIG))
    encoder = cki.Encoder.from_weights(dict(model.float().named_parameters()), CONFIG)
    with cki.device("sim"):
        with torch.no_grad():
            graphs = encoder.capture([ids.shape])
        for call in (encoder, encoder.embed, encoder.prepare(), graphs):
            with pytest.raises(UnsupportedError, match="encoder has no gradient, but autograd records"):
                call(ids)
        with torch.no_grad():
            wanted = encoder(ids)
        model.requires_grad_(False)
        assert torch.equal(encoder(ids), wanted)
        assert torch.equal(cki.Encoder.from_weights(model.state_dict(), CONFIG)(ids), wanted)


@pytest.mark.tensorflow
def test_trained_variables_are_refused_under_a_tape():
    tf = pytest.importorskip("tensorflow")
    _, state = random_model(CONFIG)
    arrays = {name: value.astype(np.float32) for name, value in state.items()}
    trained = cki.Encoder.from_weights({name: tf.Variable(value) for name, value in arrays.items()}, CONFIG)
    fixed = cki.Encoder.from_weights(
        {name: tf.Variable(value, trainable=False) for name, value in arrays.items()}, CONFIG
    )
    ids = tf.constant(some_ids(CONFIG))
    with cki.device("sim"):
        wanted = trained(ids)
        with tf.GradientTape() as tape:
            with pytest.raises(
                UnsupportedError, match="encoder has no gradient, but a tf.GradientTape records"
            ):
                trained(ids)
            with tape.stop_recording():
                np.testing.assert_array_equal(trained(ids), wanted)
            np.testing.assert_array_equal(fixed(ids), wanted)
        with tf.GradientTape(watch_accessed_variables=False):
            np.testing.assert_array_equal(trained(ids), wanted)
