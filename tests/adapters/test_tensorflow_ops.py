"""CKI's operations as TensorFlow's: eager, in functions of unknown sizes, under XLA; simulated and on the GPU."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

tf = pytest.importorskip("tensorflow")

import cki  # noqa: E402
import cki.adapters.tensorflow as cki_tf  # noqa: E402
from cki.adapters import tf_ops  # noqa: E402
from cki.errors import InvalidArgumentError, InvalidTypeError, UnsupportedError  # noqa: E402
from cki.ops.table import public_specs  # noqa: E402
from tests.adapters.examples import E4M3, EXAMPLES, X, normal  # noqa: E402
from tests.conftest import DeviceUnderTest  # noqa: E402

pytestmark = pytest.mark.tensorflow
Tensors = dict[str, Any]


@pytest.fixture(autouse=True)
def _place(device: DeviceUnderTest) -> Iterator[None]:
    """TensorFlow's tensors lie where the kernels run."""
    if device.kind == "cuda" and not tf.config.list_physical_devices("GPU"):
        pytest.skip("TensorFlow has no CUDA")
    with tf.device("GPU:0" if device.kind == "cuda" else "CPU:0"):
        yield


def on_tf(value: Any) -> Any:
    """Arrays, and tuples of them, as TensorFlow's tensors."""
    if isinstance(value, tuple):
        return tuple(on_tf(item) for item in value)
    return None if value is None else tf.convert_to_tensor(value)


def on_device(device: DeviceUnderTest, value: Any) -> Any:
    if isinstance(value, tuple):
        return tuple(on_device(device, item) for item in value)
    return None if value is None else device.array(value)


def expected(device: DeviceUnderTest, name: str) -> list[np.ndarray]:
    """What the operation gives for the example's arrays in the device's own framework."""
    arrays, attributes = EXAMPLES[name]
    has_codes = "quantize" in name or any(getattr(array, "dtype", None) == E4M3 for array in arrays.values())
    there = device.holding(E4M3 if has_codes else np.float32)
    found = getattr(cki, name)(**{key: on_device(there, a) for key, a in arrays.items()}, **attributes)
    return [there.numpy(value) for value in (found if isinstance(found, tuple) else (found,))]


def same_bits(found: Any, wanted: list[np.ndarray]) -> None:
    found = found if isinstance(found, tuple) else (found,)
    assert len(found) == len(wanted)
    for one, other in zip(found, wanted):
        assert (tuple(one.shape), one.dtype.as_numpy_dtype) == (other.shape, other.dtype)
        assert one.numpy().tobytes() == other.tobytes()


def open_spec(value: Any) -> Any:
    """The signature of a tensor whose sizes are not known."""
    if isinstance(value, tuple):
        return tuple(open_spec(item) for item in value)
    return None if value is None else tf.TensorSpec([None] * value.ndim, tf.as_dtype(value.dtype))


def test_every_public_operation_has_an_example():
    """But append_kv, which writes: it has tests of its own."""
    assert {*EXAMPLES, "append_kv"} == set(public_specs())
    assert set(public_specs()) <= set(dir(cki_tf))


@pytest.mark.parametrize("name", EXAMPLES)
def test_eager_and_in_functions_of_unknown_sizes(device, name):
    arrays, attributes = EXAMPLES[name]
    wanted = expected(device, name)
    tensors = {key: on_tf(value) for key, value in arrays.items()}
    same_bits(getattr(cki, name)(**tensors, **attributes), wanted)
    same_bits(getattr(cki_tf, name)(**arrays, **attributes), wanted)
    signature = {key: open_spec(value) for key, value in arrays.items()}
    names = []

    def body(tensors: Tensors) -> Any:
        results = getattr(cki, name)(**tensors, **attributes)
        first = results[0] if isinstance(results, tuple) else results
        names.append(first.op.type)
        return results

    function = tf.function(body).get_concrete_function(signature)
    assert names == [tf_ops.op_name(public_specs()[name])]
    same_bits(function(tensors), wanted)


# ---------------------------------------------------------------- shapes


@pytest.mark.parametrize(
    ("call", "specs", "wanted"),
    [
        (lambda x: cki.layer_norm(x), [(None, None, 96)], [(None, None, 96)]),
        (lambda x, r: cki.layer_norm(x, residual=r), [(None, 96), (None, 96)], [(None, 96), (None, 96)]),
        (lambda x, w: cki.linear(x, w), [(None, None, 96), (96, 40)], [(None, None, 40)]),
        (lambda x, w: cki.linear(x, w, weight_layout="out_in"), [(8, None), (40, None)], [(8, 40)]),
        (
            lambda q, k: cki.attention(q, k, k, return_lse=True),
            [(None, None, 4, 16), (None, None, 2, 16)],
            [(None, None, 4, 16), (None, 4, None)],
        ),
        (lambda x: cki.gated_activation(x, activation="silu"), [(None, 96)], [(None, 48)]),
        (lambda x, m: cki.mean_pool(x, tf.cast(m, tf.bool)), [(None, None, 24), (None, None)], [(None, 24)]),
    ],
)
def test_shapes_follow_the_operations_own_rule(call, specs, wanted):
    """What is known of the inputs' sizes is known of the outputs'."""
    signature = [tf.TensorSpec(shape, tf.float32) for shape in specs]
    function = tf.function(call).get_concrete_function(*signature)
    results = function.structured_outputs
    results = results if isinstance(results, (tuple, list)) else [results]
    assert [tuple(result.shape.as_list()) for result in results] == wanted


def test_rules_are_checked_while_a_function_is_traced():
    """Those that hold for any size of the unknown dimensions; the others when it runs."""
    function = tf.function(lambda x, w: cki.layer_norm(x, w))
    with pytest.raises(InvalidArgumentError, match=r"weight has shape \(95,\), x has shape"):
        function.get_concrete_function(tf.TensorSpec([None, 96], tf.float32), tf.TensorSpec([95], tf.float32))
    with pytest.raises(InvalidTypeError, match="x is i64"):
        function.get_concrete_function(tf.TensorSpec([None, 96], tf.int64), tf.TensorSpec([96], tf.int64))
    concrete = function.get_concrete_function(
        tf.TensorSpec([None, None], tf.float32), tf.TensorSpec([None], tf.float32)
    )
    concrete(on_tf(X), on_tf(X[0]))
    with pytest.raises(
        tf.errors.InvalidArgumentError, match=r"weight has shape \(95,\), x has shape \(5, 96\)"
    ):
        concrete(on_tf(X), on_tf(X[0, :95]))
    concrete(on_tf(X), on_tf(X[0]))  # the process stays usable


def test_unknown_ranks_and_types_are_refused_by_name():
    with pytest.raises(InvalidArgumentError, match="layer_norm: x is of unknown rank"):
        tf.function(cki.layer_norm).get_concrete_function(tf.TensorSpec(None, tf.float32))
    with pytest.raises(InvalidTypeError, match="layer_norm: x is of dtype string"):
        tf.function(cki.layer_norm).get_concrete_function(tf.TensorSpec([3, 4], tf.string))


@pytest.mark.parametrize("shape", [[4, 2], [None, 2], None], ids=repr)
def test_values_are_not_looked_at_in_a_graph(monkeypatch, shape):
    monkeypatch.setenv("CKI_VALIDATE", "1")
    table, tokens = tf.TensorSpec(shape), tf.TensorSpec(None if shape is None else [None], tf.int32)
    with pytest.raises(UnsupportedError, match="CKI_VALIDATE=1 reads .*not while it is traced"):
        tf.function(lambda table, ids: cki.embed_tokens(ids, table)).get_concrete_function(table, tokens)


def test_eager_errors_are_cki_s_own_also_on_later_calls():
    x = on_tf(X)
    cki.layer_norm(x, on_tf(X[0]))
    for _ in range(2):
        with pytest.raises(InvalidArgumentError, match=r"weight has shape \(95,\), x has shape \(5, 96\)"):
            cki.layer_norm(x, on_tf(X[0, :95]))
        with pytest.raises(InvalidArgumentError, match="eps"):
            cki.layer_norm(x, eps=-1.0)


def test_what_tensorflow_decides_is_refused_in_a_graph():
    with pytest.raises(InvalidArgumentError, match="stream is 0, but TensorFlow launches on its own stream"):
        tf.function(lambda x: cki.layer_norm(x, stream=0))(on_tf(X))
    with pytest.raises(
        InvalidArgumentError, match="layer_norm: out is given, but TensorFlow has immutable tensors"
    ):
        cki_tf.layer_norm(X, out=on_tf(X))
    with pytest.raises(InvalidArgumentError, match="layer_norm: stream is given"):
        cki_tf.layer_norm(X, stream=0)
    with pytest.raises(InvalidTypeError, match="weight is of type list, which is no tensor"):
        cki_tf.layer_norm(X, [1.0])


# ---------------------------------------------------------------- inside programs


def test_neighbours_variables_and_loops(device):
    """Captured tensors and variables are read when the function runs, not when it is traced."""
    captured, weight = on_tf(X[1]), tf.Variable(X[0])

    @tf.function
    def block(x):
        for _ in tf.range(3):
            x = cki.layer_norm(x * 2.0, weight, captured) + 1.0
        return x

    def plain():
        x = on_tf(X)
        for _ in range(3):
            x = cki.layer_norm(x * 2.0, weight.value(), captured) + 1.0
        return x.numpy()

    np.testing.assert_array_equal(block(on_tf(X)), plain())
    weight.assign(X[2])
    np.testing.assert_array_equal(block(on_tf(X)), plain())
    with tf.device("GPU:0" if device.kind == "cuda" else "CPU:0"):
        assert block(on_tf(X)).device == block(on_tf(X)).backing_device


def test_inside_map_and_cond():
    x = on_tf(normal(4, 5, 96))
    function = tf.function(lambda x: tf.map_fn(lambda row: cki.softmax(row), x))
    np.testing.assert_array_equal(function(x), cki.softmax(x))
    branch = tf.function(lambda x, flag: tf.cond(flag, lambda: cki.softmax(x), lambda: cki.rms_norm(x)))
    np.testing.assert_array_equal(branch(x, tf.constant(False)), cki.rms_norm(x))


def test_slices_that_are_not_aligned_and_empty_tensors():
    x = on_tf(normal(4, 3, 31))
    pieces = tf.unstack(x)
    for piece, whole in zip(pieces, cki.softmax(x).numpy()):
        np.testing.assert_array_equal(cki.softmax(piece), whole)
    parts = tf.function(lambda x: [cki.softmax(piece) for piece in tf.split(x, 4)])(x)
    np.testing.assert_array_equal(tf.concat(parts, 0), cki.softmax(x))
    assert cki.layer_norm(tf.zeros((0, 4, 8), tf.float16)).shape == (0, 4, 8)
    empty = tf.function(cki.layer_norm, input_signature=[tf.TensorSpec([None, 4, 8], tf.float16)])
    assert empty(tf.zeros((0, 4, 8), tf.float16)).shape == (0, 4, 8)


def test_fused_attention_with_tensorflow_s_names_and_defaults(device):
    rng = np.random.default_rng(0)
    x = rng.standard_normal((1, 3, 32)).astype(np.float16)
    w = [(rng.standard_normal(shape) / 6).astype(np.float16) for shape in [(32, 1024)] * 3 + [(1024, 32)]]
    gamma, beta = np.ones(32, np.float16), np.zeros(32, np.float16)
    found = cki_tf.fused_attention(x, *w, gamma, beta)
    arrays = [device.array(a) for a in (x, *w, gamma, beta)]
    wanted = cki.fused_attention(*arrays, num_heads=16, head_dim=64, causal=False, pre_ln=True, epsilon=1e-5)
    same_bits(found, [device.numpy(wanted)])
    found = cki_tf.fused_attention(x, *w, gamma, beta, 8, 128, True, False, 1e-3)
    wanted = cki.fused_attention(*arrays, num_heads=8, head_dim=128, causal=True, pre_ln=False, epsilon=1e-3)
    same_bits(found, [device.numpy(wanted)])


# ---------------------------------------------------------------- what is written


def cache_case() -> tuple[np.ndarray, tuple[np.ndarray, np.ndarray], np.ndarray]:
    return normal(3, 2, 32), (normal(4, 16, 2, 32), normal(4, 16, 2, 32, seed=1)), np.array([0, 1, 17])


@pytest.mark.parametrize("way", ["eager", "function", "jit"])
def test_caches_are_returned_and_the_given_ones_unchanged(device, way):
    k, cache, slots = cache_case()
    wanted = [device.array(c) for c in cache]
    cki.append_kv(device.array(k), device.array(k), tuple(wanted), device.array(slots))
    given = on_tf(cache)

    def call(k, cache, slots):
        if way != "eager":
            cache = tuple(c + 0.0 for c in cache)  # memory that TensorFlow may hand on
        return cki.append_kv(k, k, cache, slots)

    if way != "eager":
        call = tf.function(call, jit_compile=way == "jit")
    found = call(on_tf(k), given, on_tf(slots))
    same_bits(tuple(found), [device.numpy(w) for w in wanted])
    for tensor, array in zip(given, cache):
        np.testing.assert_array_equal(tensor, array)


# ---------------------------------------------------------------- XLA


@pytest.mark.parametrize("name", EXAMPLES)
def test_under_jit_compile(device, name):
    arrays, attributes = EXAMPLES[name]
    tensors = {key: on_tf(value) for key, value in arrays.items()}
    function = tf.function(lambda tensors: getattr(cki, name)(**tensors, **attributes), jit_compile=True)
    same_bits(function(tensors), expected(device, name))
    types = [op.type for op in function.get_concrete_function(tensors).graph.get_operations()]
    assert "XlaCallModule" in types and not any(found.startswith("Cki") for found in types)


def test_xla_fuses_around_it():
    function = tf.function(lambda x: tf.transpose(cki.softmax(tf.transpose(x) * 2.0)) + 1.0, jit_compile=True)
    wanted = cki.softmax(on_tf(np.ascontiguousarray(2 * X.T))).numpy().T + 1
    np.testing.assert_array_equal(function(on_tf(X)), wanted)


@pytest.mark.parametrize("name", ["layer_norm", "fused_attention", "attention"])
def test_unknown_sizes_under_jit_compile(device, name):
    """XLA compiles for each size that comes; two results, workspace, a result whose axes change places."""
    arrays, attributes = EXAMPLES[name]
    tensors = {key: on_tf(value) for key, value in arrays.items()}
    function = tf.function(
        lambda tensors: getattr(cki, name)(**tensors, **attributes), jit_compile=True
    ).get_concrete_function({key: open_spec(value) for key, value in arrays.items()})
    same_bits(function(tensors), expected(device, name))
    if name == "layer_norm":
        rows = {key: value[:2] if len(value.shape) == 2 else value for key, value in tensors.items()}
        same_bits(function(rows), [value[:2] for value in expected(device, name)])


def test_sizes_that_xla_cannot_be_told_are_refused_by_name():
    function = tf.function(lambda x: cki.gated_activation(x, activation="silu"), jit_compile=True)
    with pytest.raises(
        UnsupportedError, match="gated_activation: sizes of its outputs follow from unknown ones"
    ):
        function.get_concrete_function(tf.TensorSpec([5, None], tf.float32))


# ---------------------------------------------------------------- gradients


def scalar(x: Any) -> Any:
    return tf.reduce_sum(cki.layer_norm(x) ** 2)


@pytest.mark.parametrize("way", ["eager", "function", "jit", "dlpack"])
def test_gradients_that_were_not_asked_for_name_the_operation(way):
    call = scalar if way in ("eager", "dlpack") else tf.function(scalar, jit_compile=way == "jit")
    if way == "dlpack":
        call = lambda x: tf.reduce_sum(cki.layer_norm(x, stream=0))  # noqa: E731
    x = tf.Variable(X)
    with tf.GradientTape() as tape, pytest.raises(UnsupportedError, match="layer_norm has no gradient"):
        tape.gradient(call(x), x)
    with tf.GradientTape() as tape:  # a call beside what is differentiated does no harm
        loss = tf.reduce_sum(x) + tf.stop_gradient(call(tf.stop_gradient(x)))
    np.testing.assert_array_equal(tape.gradient(loss, x), np.ones_like(X))


@pytest.mark.parametrize("way", ["eager", "function", "jit"])
def test_recomputed_gradients_are_tensorflow_s(way):
    weight = tf.Variable(X[0])

    def call(x):
        return tf.reduce_sum(cki_tf.layer_norm(x, weight, recompute_gradient=True) * on_tf(X + 1))

    def plain(x):
        mean, variance = tf.nn.moments(x, -1, keepdims=True)
        return tf.reduce_sum((x - mean) * tf.math.rsqrt(variance + 1e-5) * weight * on_tf(X + 1))

    found = []
    for function in (call if way == "eager" else tf.function(call, jit_compile=way == "jit"), plain):
        with tf.GradientTape() as tape:
            x = on_tf(X)
            tape.watch(x)
            loss = function(x)
        found.append(tape.gradient(loss, [x, weight]))
    for ours, theirs in zip(*found):
        np.testing.assert_allclose(ours, theirs, rtol=2e-4, atol=2e-5)


# ---------------------------------------------------------------- threads, other TensorFlow versions


def test_many_threads_in_eager_mode_and_functions(device):
    wanted = {rows: device.numpy(cki.softmax(device.array(X[:rows]))) for rows in (1, 2, 3, 4)}
    function = tf.function(cki.softmax, input_signature=[tf.TensorSpec([None, 96], tf.float32)])
    info, errors = device.kind, []

    def work(rows: int) -> None:
        try:
            with cki.device(info), tf.device("GPU:0" if info == "cuda" else "CPU:0"):
                x = on_tf(X[:rows])
                for _ in range(20):
                    np.testing.assert_array_equal(cki.softmax(x), wanted[rows])
                    np.testing.assert_array_equal(function(x), wanted[rows])
        except Exception as error:
            errors.append(error)

    threads = [threading.Thread(target=work, args=(1 + n % 4,)) for n in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not errors


def test_a_tensorflow_that_exports_too_little(monkeypatch):
    """Eager calls go by DLPack, with one warning that says why; graphs are refused."""
    monkeypatch.setattr(tf_ops, "missing", lambda: "TF_AllocateTemp is not in libtensorflow_framework.so.2")
    cki_tf._warn.cache_clear()
    wanted = cki.adapters.tensorflow.layer_norm  # the function, as before
    with pytest.warns(
        RuntimeWarning, match="by DLPack: each call waits .* TF_AllocateTemp is not in"
    ) as caught:
        first, second = cki.layer_norm(on_tf(X)), wanted(X)
    assert len(caught) == 1
    monkeypatch.undo()
    np.testing.assert_array_equal(first, cki.layer_norm(on_tf(X)))
    np.testing.assert_array_equal(second, first)
    monkeypatch.setattr(tf_ops, "missing", lambda: "TF_AllocateTemp is not there")
    with pytest.raises(
        UnsupportedError, match="layer_norm cannot be part of a tf.function here\n.*TF_AllocateTemp"
    ):
        tf.function(cki.layer_norm)(on_tf(X))


def test_a_symbol_that_is_missing_is_named(monkeypatch):
    from cki.adapters import tf_c_api

    monkeypatch.setitem(tf_c_api._QUICK, "TF_NoSuchFunction", (None, ()))
    with pytest.raises(UnsupportedError, match=r"TF_NoSuchFunction is not in libtensorflow_framework\.so\.2"):
        tf_c_api.load.__wrapped__()
