"""CKI's operations inside `jax.jit` on the simulated device: every operation, vmap, donation, errors."""

from __future__ import annotations

import functools
from typing import Any

import ml_dtypes
import numpy as np
import pytest

jax = pytest.importorskip("jax")

import jax.numpy as jnp  # noqa: E402

import cki  # noqa: E402
import cki.adapters.jax as cki_jax  # noqa: E402
from cki.errors import DeviceError, InvalidArgumentError, InvalidTypeError, UnsupportedError  # noqa: E402
from cki.ops.table import public_specs  # noqa: E402
from tests.adapters import examples  # noqa: E402
from tests.adapters.examples import HEADS, INDEX, X, normal  # noqa: E402

pytestmark = pytest.mark.jax
BF16 = np.dtype(ml_dtypes.bfloat16)


@pytest.fixture(autouse=True)
def simulated():
    """These tests use JAX's CPU on a machine with a GPU too."""
    with cki.device("sim"), jax.default_device(jax.local_devices(backend="cpu")[0]):
        yield


def same_bits(found: Any, wanted: Any) -> None:
    found, wanted = (value if isinstance(value, tuple) else (value,) for value in (found, wanted))
    assert len(found) == len(wanted)
    for one, other in zip(found, wanted):
        assert isinstance(one, jax.Array) and (one.shape, one.dtype) == (other.shape, other.dtype)
        assert np.asarray(one).tobytes() == np.asarray(other).tobytes()


#: NumPy's results are the expected ones.
EXAMPLES = {name: example for name, example in examples.EXAMPLES.items() if name != "dropout_add"}


def test_every_public_operation_has_an_example_here():
    """dropout_add and append_kv have tests of their own: 64-bit seeds, and caches that are written."""
    assert {*EXAMPLES, "append_kv", "dropout_add"} == set(public_specs())
    assert set(public_specs()) <= set(dir(cki_jax))


@pytest.mark.parametrize("name", EXAMPLES)
def test_inside_jit_and_outside_as_numpy(name):
    arrays, attributes = EXAMPLES[name]
    wanted = getattr(cki, name)(**arrays, **attributes)
    on_jax = jax.tree.map(jnp.asarray, arrays)
    compiled = jax.jit(lambda arrays: getattr(cki, name)(**arrays, **attributes))
    same_bits(compiled(on_jax), wanted)
    same_bits(jax.jit(lambda arrays: getattr(cki_jax, name)(**arrays, **attributes))(on_jax), wanted)
    same_bits(getattr(cki_jax, name)(**arrays, **attributes), wanted)


@pytest.mark.parametrize("dtype", [np.dtype(np.float16), BF16], ids=str)
def test_fused_with_jax_s_own_operations(dtype):
    """Neighbours that XLA compiles see the right values before and after."""
    x, w = jnp.asarray(normal(5, 96, dtype=dtype)), jnp.asarray(normal(96, dtype=dtype))

    @jax.jit
    def block(x, w):
        return jnp.transpose(cki.rms_norm(jnp.transpose(jnp.transpose(x + 1)), w) * 2)

    wanted = np.asarray(cki.rms_norm(np.asarray(x + 1), np.asarray(w))) * dtype.type(2)
    same_bits(block(x, w), wanted.T)


def test_dropout_with_seeds_in_device_memory():
    """Its seeds are 64 bits wide, which JAX keeps only in its x64 mode."""
    with jax.enable_x64(True):
        seed, offset = jnp.asarray([7], jnp.int64), jnp.asarray([3], jnp.int64)
        dropped = jax.jit(lambda x: cki.dropout_add(x, x, 0.5, seed, offset))(jnp.asarray(X))
    same_bits(dropped, cki.dropout_add(X, X, 0.5, np.array([7]), np.array([3])))


def test_shapes_that_change_and_no_elements():
    compiled = jax.jit(lambda x: cki.softmax(x))
    for rows in (1, 3, 8, 3, 1):
        same_bits(compiled(jnp.asarray(X[:rows])), cki.softmax(X[:rows]))
    assert compiled(jnp.zeros((0, 4, 8), jnp.float16)).shape == (0, 4, 8)


def test_workspace_is_a_result_of_the_call_and_of_nothing_else():
    """XLA allocates it: the operation returns its outputs alone, the custom call one more buffer of bytes."""
    arrays, attributes = EXAMPLES["fused_attention"]
    function = jax.jit(lambda arrays: cki.fused_attention(**arrays, **attributes))
    lowered = function.lower(jax.tree.map(jnp.asarray, arrays))
    call = next(line for line in lowered.as_text().splitlines() if "custom_call @cki" in line)
    results = call.rpartition("->")[2]
    assert results.count("tensor<") == 2 and results.count("xui8>") == 1
    assert jax.tree.map(lambda out: out.shape, lowered.out_info) == (2, 7, 32)


def test_inside_scan_and_cond():
    x = jnp.asarray(X)
    step = jax.jit(lambda x: jax.lax.scan(lambda c, _: (cki.rms_norm(c), c.sum()), x, None, length=3)[0])
    wanted = cki.rms_norm(cki.rms_norm(cki.rms_norm(X)))
    same_bits(step(x), wanted)
    branch = jax.jit(lambda flag, x: jax.lax.cond(flag, lambda x: cki.rms_norm(x), lambda x: x, x))
    same_bits(branch(True, x), cki.rms_norm(X))
    same_bits(branch(False, x), X)


def test_abstract_evaluation_runs_nothing(monkeypatch):
    from cki.adapters import xla_calls

    monkeypatch.setattr(xla_calls, "prepare_call", lambda *_: pytest.fail("prepared"))
    shape = jax.ShapeDtypeStruct((4, 8, 96), jnp.float16)
    codes, scale = jax.eval_shape(cki.quantize_fp8, shape)
    assert (codes.shape, codes.dtype) == ((4, 8, 96), ml_dtypes.float8_e4m3fn)
    assert (scale.shape, scale.dtype) == ((4, 8, 1), np.float32)


def test_disabled_jit_runs_operations_one_by_one():
    with jax.disable_jit():
        same_bits(cki_jax.rms_norm(jnp.asarray(X)), cki.rms_norm(X))


# ---------------------------------------------------------------- vmap


def calls_in(function: Any, *arrays: Any) -> list[str]:
    """Loops and calls of CKI in the program of a function."""
    text = str(jax.make_jaxpr(function)(*arrays))
    return [word for word in ("scan[", "cki[") for _ in range(text.count(word))]


@pytest.mark.parametrize(
    ("name", "batched", "attributes"),
    [
        ("layer_norm", {"x": normal(3, 5, 96)}, {}),
        ("linear", {"x": normal(3, 5, 96), "residual": normal(3, 5, 40)}, {"activation": "gelu"}),
        ("gated_activation", {"x": normal(3, 5, 96)}, {"activation": "silu"}),
        ("softmax", {"x": normal(3, 5, 96)}, {}),
        ("attention", {"q": normal(3, 2, 9, 4, 16), "k": normal(3, 2, 11, 2, 16), "v": normal(3, 2, 11, 2, 16)},
         {"return_lse": True, "causal": True}),
        ("apply_rope", {"x": normal(3, 9, 4, 16)}, {}),
        ("mean_pool", {"x": normal(3, 2, 5, 24), "mask": np.ones((3, 2, 5), bool)}, {}),
        ("fused_attention", {"x": normal(3, 2, 7, 32)}, {"num_heads": 2, "head_dim": 16}),
    ],
)  # fmt: skip
def test_vmap_over_leading_axes_is_one_call(name, batched, attributes):
    shared = {key: value for key, value in EXAMPLES[name][0].items() if key not in batched}
    if name == "layer_norm":
        del shared["residual"]
    function = functools.partial(getattr(cki, name), **attributes)
    mapped = jax.vmap(lambda batched: function(**batched, **shared_arrays))
    shared_arrays = jax.tree.map(jnp.asarray, shared)
    found = jax.jit(mapped)(jax.tree.map(jnp.asarray, batched))
    assert calls_in(mapped, jax.tree.map(jnp.asarray, batched)) == ["cki["]
    for index in range(3):
        wanted = function(**{key: value[index] for key, value in batched.items()}, **shared)
        for one, other in zip(jax.tree.leaves(found), wanted if isinstance(wanted, tuple) else (wanted,)):
            assert one[index].shape == other.shape
            np.testing.assert_allclose(one[index], other, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("name", ["layer_norm", "softmax", "gated_activation", "linear", "gated_linear"])
def test_five_nested_vmaps_are_one_call(name):
    arrays, attributes = EXAMPLES[name]
    shared = {key: jnp.asarray(arrays[key]) for key in ("w", "weight") if key in arrays}
    x = normal(2, 1, 2, 1, 2, 3, 96)
    function = functools.partial(getattr(cki, name), **shared, **attributes)
    mapped = function
    for _ in range(5):
        mapped = jax.vmap(mapped)
    assert calls_in(mapped, jnp.asarray(x)) == ["cki["]
    flat = np.asarray(function(jnp.asarray(x.reshape(-1, 96))))
    np.testing.assert_allclose(jax.jit(mapped)(x), flat.reshape(*x.shape[:-1], -1), rtol=1e-5, atol=1e-5)


def test_vmap_over_an_axis_of_the_callers_choice():
    x = normal(5, 3, 96)
    found = jax.vmap(cki.softmax, in_axes=1, out_axes=1)(jnp.asarray(x))
    same_bits(found, cki.softmax(x))


def test_vmap_over_weights_goes_one_by_one():
    x, w = normal(3, 5, 96), normal(3, 96)
    mapped = jax.vmap(cki.rms_norm)
    assert calls_in(mapped, jnp.asarray(x), jnp.asarray(w)) == ["scan[", "cki["]
    found = jax.jit(mapped)(jnp.asarray(x), jnp.asarray(w))
    same_bits(found, np.stack([cki.rms_norm(x[i], w[i]) for i in range(3)]))


def test_vmap_over_a_mask_that_broadcasts_goes_one_by_one():
    x, mask = normal(3, 2, 7, 32), np.arange(7)[None] < np.array([[[4]], [[7]], [[2]]])
    weights = [normal(32, 32, seed=seed) for seed in range(4)]
    heads = {"num_heads": 2, "head_dim": 16}
    mapped = jax.vmap(lambda x, mask: cki.fused_attention(x, *map(jnp.asarray, weights), mask=mask, **heads))
    found = jax.jit(mapped)(jnp.asarray(x), jnp.asarray(mask))
    for index in range(3):
        same_bits(found[index], cki.fused_attention(x[index], *weights, mask=mask[index], **heads))


def test_nested_vmap():
    x = normal(2, 3, 4, 5, 16)
    q = jnp.asarray(x)
    found = jax.jit(jax.vmap(jax.vmap(lambda q: cki.attention(q[None], q[None], q[None])[0])))(q)
    for i in range(2):
        wanted = cki.attention(x[i], x[i], x[i])
        np.testing.assert_allclose(found[i], wanted, rtol=1e-5, atol=1e-6)


# ---------------------------------------------------------------- caches


def step(k, v, cache, slots, **more):
    return cki.append_kv(k, v, cache, slots, **more)


def test_append_kv_on_donated_caches_writes_in_place():
    k, v, q = normal(3, 2, 16), normal(3, 2, 16, seed=1), normal(3, 4, 16)
    slots = np.array([1, 9, 20], INDEX)
    numpy_cache = (np.zeros((4, 8, 2, 16), np.float32), np.ones((4, 8, 2, 16), np.float32))
    cache = tuple(map(jnp.array, numpy_cache))
    addresses = [array.unsafe_buffer_pointer() for array in cache]
    positions, table = np.arange(3, dtype=INDEX), normal(8, 16)
    more = {"positions": positions, "cos_sin": table}
    wanted = step(k, v, numpy_cache, slots, q=q, **more)
    compiled = jax.jit(step, donate_argnums=2)
    q_out, new_k, new_v = compiled(k, v, cache, slots, q=q, **more)
    same_bits(q_out, wanted)
    same_bits((new_k, new_v), numpy_cache)
    assert [new_k.unsafe_buffer_pointer(), new_v.unsafe_buffer_pointer()] == addresses
    assert all(array.is_deleted() for array in cache)


def test_append_kv_without_donation_leaves_the_old_cache():
    k = normal(2, 2, 16)
    cache = (jnp.zeros((2, 4, 2, 16)), jnp.zeros((2, 4, 2, 16)))
    slots = jnp.array([0, 5])
    new_k, _ = jax.jit(step)(k, k, cache, slots)
    assert not np.asarray(cache[0]).any()
    np.testing.assert_array_equal(np.asarray(new_k).reshape(8, 2, 16)[np.array([0, 5])], k)
    outside_k, outside_v = cki_jax.append_kv(k, k, cache, slots)
    np.testing.assert_array_equal(outside_k, new_k)
    assert not np.asarray(cache[1]).any() and np.asarray(outside_v).any()


def test_append_kv_of_eight_bits_returns_the_scales_that_it_writes():
    k, slots = normal(3, 2, 16), np.array([4, 2, 7], INDEX)
    codes = np.zeros((2, 4, 2, 16), ml_dtypes.float8_e4m3fn)
    written = (codes.copy(), codes.copy(), np.zeros((2, 4, 2), np.float32), np.zeros((2, 4, 2), np.float32))
    cache = tuple(map(jnp.array, written))
    assert step(k, k, written, slots) is None
    results = jax.jit(step, donate_argnums=2)(k, k, cache, slots)
    same_bits(results, written)
    fixed = (codes.copy(), codes.copy(), np.full(2, 0.1, np.float32), np.full(2, 0.1, np.float32))
    results = jax.jit(step)(k, k, tuple(map(jnp.array, fixed)), slots)
    step(k, k, fixed, slots)
    same_bits(results, fixed[:2])


def test_a_decoding_loop_inside_one_program():
    """Write, then attend, 5 tokens in a scan that carries the caches: as one attention over all of them."""
    tokens = normal(5, 2, 16)
    table, cache = jnp.array([[1, 0]]), (jnp.zeros((2, 4, 2, 16)), jnp.zeros((2, 4, 2, 16)))

    def body(cache, item):
        position, token = item
        slot = jnp.where(position < 4, 4 + position, position - 4)[None]
        cache = cki.append_kv(token[None], token[None], cache, slot)
        out = cki.paged_attention(token[None, None], cache, table, (position + 1)[None])
        return cache, out[0, 0]

    _, found = jax.jit(lambda t, c: jax.lax.scan(body, c, (jnp.arange(5), t)))(tokens, cache)
    wanted = cki.attention(tokens[None], tokens[None], tokens[None], causal=True)[0]
    np.testing.assert_allclose(found, wanted, rtol=1e-5, atol=1e-6)


def test_vmap_over_caches():
    k, slots = normal(3, 2, 2, 16), jnp.array([[0, 1], [2, 3], [5, 4]])
    caches = tuple(jnp.zeros((3, 4, 4, 2, 16)) for _ in range(2))
    found, _ = jax.jit(jax.vmap(lambda k, cache, slots: step(k, k, cache, slots)))(k, caches, slots)
    wanted = np.zeros((3, 16, 2, 16), np.float32)
    for index in range(3):
        wanted[index, np.asarray(slots[index])] = k[index]
    np.testing.assert_array_equal(np.asarray(found).reshape(3, 16, 2, 16), wanted)


def test_caches_that_cannot_be_written_are_refused():
    k, cache = jnp.ones((1, 2, 16)), (jnp.zeros((2, 4, 2, 16)), jnp.zeros((2, 4, 2, 16)))
    with pytest.raises(InvalidArgumentError, match="k_cache is written, but it is a constant of the traced"):
        jax.jit(lambda k: step(k, k, cache, jnp.array([0])))(k)
    codes, scale = jnp.zeros((2, 4, 2, 16), ml_dtypes.float8_e4m3fn), jnp.ones((2, 4, 2))
    with pytest.raises(InvalidArgumentError, match="k_scale is written, but it is a constant of the traced"):
        jax.jit(lambda k, codes: step(k, k, (codes, codes, scale, scale), jnp.array([0])))(k, codes)
    from cki.memory import PagedKVCache

    pages = PagedKVCache(
        num_layers=1, num_blocks=4, block_size=4, num_kv_heads=2, head_dim=16, dtype="f16", max_sequences=1,
        max_blocks_per_sequence=2,
    )  # fmt: skip
    with pytest.raises(InvalidTypeError, match="a cache of PagedKVCache, which is written in place"):
        cki_jax.append_kv(k.astype(jnp.float16), k.astype(jnp.float16), pages.layer(0), jnp.array([0]))


# ---------------------------------------------------------------- refusals


def test_gradients_are_refused_by_name():
    x = jnp.asarray(X)
    for transformed in (
        jax.grad(lambda x: cki.rms_norm(x).sum()),
        jax.jit(jax.grad(lambda x: cki.rms_norm(x).sum())),
    ):
        with pytest.raises(UnsupportedError, match="rms_norm has no gradient: CKI is for inference"):
            transformed(x)
    with pytest.raises(UnsupportedError, match="softmax has no gradient"):
        jax.jvp(cki.softmax, (x,), (x,))
    constant = jax.grad(lambda x: (cki.rms_norm(jax.lax.stop_gradient(x)) * x).sum())(x)
    same_bits(constant, cki.rms_norm(X))


def test_a_gradient_of_the_users_own():
    @jax.custom_vjp
    def norm(x):
        return cki.softmax(x)

    def forward(x):
        y = norm(x)
        return y, y

    norm.defvjp(forward, lambda y, g: (y * (g - (g * y).sum(-1, keepdims=True)),))
    found = jax.jit(jax.grad(lambda x: (norm(x) ** 2).sum()))(jnp.asarray(X))
    wanted = jax.grad(lambda x: (jax.nn.softmax(x) ** 2).sum())(jnp.asarray(X))
    np.testing.assert_allclose(found, wanted, atol=1e-6)


def test_bad_arguments_are_named_while_tracing():
    with pytest.raises(InvalidArgumentError) as caught:
        jax.jit(cki.layer_norm)(jnp.ones((4, 8)), jnp.ones(7), jnp.ones(9))
    assert "weight has shape (7,)" in str(caught.value) and "bias has shape (9,)" in str(caught.value)
    with pytest.raises(InvalidTypeError, match=r"eps is .* of type DynamicJaxprTracer, not float"):
        jax.jit(lambda x: cki.rms_norm(x, eps=x.sum()))(jnp.ones((4, 8)))
    with pytest.raises(InvalidTypeError, match="x is of dtype complex64, which has no kernels"):
        jax.jit(cki.softmax)(jnp.ones((4, 8), jnp.complex64))
    with pytest.raises(InvalidTypeError, match="q is of jax, k is of numpy"):
        jax.jit(lambda q: cki.attention(q, HEADS, HEADS))(jnp.asarray(HEADS))
    with pytest.raises(InvalidTypeError, match="layer_norm: weight is of type int"):
        cki_jax.layer_norm(jnp.ones((4, 8)), 3)


def test_what_xla_decides_itself_is_refused():
    x = jnp.ones((4, 8))
    with pytest.raises(InvalidArgumentError, match="stream is 5, but XLA launches on its own stream"):
        jax.jit(lambda x: cki.softmax(x, stream=5))(x)
    with pytest.raises(InvalidArgumentError, match="an output tensor is given, but JAX arrays are immutable"):
        jax.jit(lambda x: cki.softmax(x, out=x))(x)
    with pytest.raises(InvalidArgumentError, match="softmax: stream is given"):
        cki_jax.softmax(x, stream=5)
    with pytest.raises(
        InvalidArgumentError, match="softmax: out is given, but JAX arrays are immutable\n  hint: no out="
    ):
        cki_jax.softmax(x, out=x)
    with pytest.raises(InvalidTypeError, match="softmax: missing tensors\n  - x is None"):
        cki_jax.softmax(None)


def test_what_is_no_public_operation_is_refused_inside_jit(tmp_path):
    source = tmp_path / "own.cu"
    source.write_text('extern "C" __global__ void own(const float* x, float* y) { y[0] = x[0]; }')
    kernel = cki.load(source)
    with pytest.raises(InvalidTypeError, match="only CKI's public operations can be called"):
        jax.jit(lambda x: kernel(1, 1, x, x))(jnp.ones(1))


def test_values_are_not_validated_inside_jit(monkeypatch):
    monkeypatch.setenv("CKI_VALIDATE", "1")
    arrays, _ = EXAMPLES["embed_tokens"]
    with pytest.raises(UnsupportedError, match="CKI_VALIDATE=1 reads token_ids.*not while it is traced"):
        jax.jit(lambda arrays: cki.embed_tokens(**arrays))(jax.tree.map(jnp.asarray, arrays))


def test_arrays_and_device_must_fit():
    with (
        cki.device("cuda"),
        pytest.raises(DeviceError, match="softmax: the arrays lie in memory of device cpu"),
    ):
        jax.jit(lambda x: cki.softmax(x))(jnp.ones((4, 8)))


def test_symbolic_shapes_are_refused():
    from jax import export

    (rows,) = export.symbolic_shape("rows")
    with pytest.raises(UnsupportedError, match="softmax: x has shape .* with symbolic dimensions"):
        export.export(jax.jit(lambda x: cki.softmax(x)))(jax.ShapeDtypeStruct((rows, 8), jnp.float32))
