"""Two GPUs: tensors on the second while the first is current, mixed devices, a thread for each.

TensorFlow's and JAX's tests of two GPUs are in `test_gpu_tensorflow` and `test_jax_gpu`.
"""

from __future__ import annotations

import threading

import numpy as np
import pytest

import cki
from cki.errors import CkiError, DeviceError
from tests.adapters import calls
from tests.adapters.gpu import OnGpu, keep_busy
from tests.adapters.programs import output_of

pytestmark = [pytest.mark.gpu, pytest.mark.multi_gpu]
cupy = pytest.importorskip("cupy")


@pytest.fixture(autouse=True)
def both():
    if not cupy.cuda.is_available() or cupy.cuda.runtime.getDeviceCount() < 2:
        pytest.skip("fewer than two GPUs")
    cupy.cuda.Device(0).use()
    yield
    assert cupy.cuda.runtime.getDevice() == 0


@pytest.fixture
def torch():
    module = pytest.importorskip("torch")
    if module.cuda.device_count() < 2:
        pytest.skip("torch sees fewer than two GPUs")
    module.cuda.set_device(0)
    return module


def normal(*shape, seed=0):
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


ROWS, WIDE = normal(64, 1024), normal(1024, 512, seed=1) / 32
Q, KV = normal(2, 70, 8, 64), normal(2, 70, 2, 64, seed=1)
TOKENS, SQUARE = normal(2, 33, 128), normal(128, 128, seed=2) / 11


def operations(x, half):
    """Calls on tensors that `x(array)` makes: norms, both kinds of product, attention, workspace, a written cache."""
    square = half(SQUARE)
    yield cki.layer_norm(x(ROWS), x(ROWS[0]))
    yield cki.linear(half(ROWS), half(WIDE), activation="gelu")
    yield cki.linear(half(ROWS[:1]), half(WIDE))
    yield cki.gated_linear(half(ROWS), half(WIDE))
    yield cki.attention(half(Q), half(KV), half(KV), causal=True)
    yield cki.decode_attention(half(Q[:, :1]), half(KV), half(KV), x(np.array([70, 33], np.int32)))
    yield cki.fused_attention(half(TOKENS), square, square, square, square, num_heads=2, head_dim=64)
    cache = half(np.zeros((8, 16, 2, 64), np.float32)), half(np.zeros((8, 16, 2, 64), np.float32))
    slots = x(np.arange(70, dtype=np.int32)[::-1].copy())
    cki.append_kv(half(KV[0]), half(KV[1]), cache, slots)
    yield cache[0]
    yield cki.softmax(x(ROWS))


# ---------------------------------------------------------------------------------------------------------------------
# the second GPU while the first is current


@pytest.mark.torch
def test_torch_tensors_on_the_second_gpu(torch):
    """Interop case second_gpu_while_device0_current: the same bits, memory of that GPU, the current one unchanged."""

    def on(index):
        device = torch.device("cuda", index)
        return list(
            operations(
                lambda a: torch.from_numpy(a).to(device),
                lambda a: torch.from_numpy(a).to(device, torch.float16),
            )
        )

    for there, here in zip(on(1), on(0)):
        assert (there.device.index, torch.cuda.current_device()) == (1, 0)
        assert torch.equal(there.cpu(), here.cpu())
    before = torch.cuda.memory_allocated(0)
    kept = on(1)
    assert torch.cuda.memory_allocated(0) == before, "outputs or workspace lie on the current GPU"
    del kept


def test_cupy_arrays_on_the_second_gpu():
    """Interop cases second_gpu_while_device0_current, current_device_not_changed."""

    def on(index):
        def place(array, dtype=None):
            with cupy.cuda.Device(index):
                return cupy.asarray(array, dtype)

        return list(operations(place, lambda a: place(a, np.float16)))

    for there, here in zip(on(1), on(0)):
        assert (there.device.id, cupy.cuda.runtime.getDevice()) == (1, 0)
        np.testing.assert_array_equal(cupy.asnumpy(there), cupy.asnumpy(here))


def test_cupy_streams_of_the_second_gpu():
    """Interop case kernel_on_the_callers_stream: of the arrays' GPU, which is not the current one."""
    with cupy.cuda.Device(1):
        stream, source = cupy.cuda.Stream(non_blocking=True), cupy.asarray(ROWS)
        x = cupy.zeros_like(source)
        wanted = cupy.asnumpy(cki.softmax(source))
        cupy.cuda.runtime.deviceSynchronize()
        with stream:
            release = keep_busy(stream.ptr, until_released=True)
            x[...] = source
            y = cki.softmax(x)
            assert not stream.done
            release()
            stream.synchronize()
        np.testing.assert_array_equal(cupy.asnumpy(y), wanted)
        keep_busy(stream.ptr)
        with stream:
            x[...] = source * 2
    z = cki.softmax(x, stream=stream)  # GPU 0 is current
    stream.synchronize()
    np.testing.assert_allclose(cupy.asnumpy(z), cupy.asnumpy(cki.softmax(cupy.asarray(ROWS * 2))), atol=1e-6)


def test_interface_objects_on_the_second_gpu():
    """PyCUDA's and numba's arrays: the address says which GPU; their stream is waited for there."""
    with cupy.cuda.Device(1):
        producer, source = cupy.cuda.Stream(non_blocking=True), cupy.asarray(ROWS)
        x = cupy.zeros_like(source)
        cupy.cuda.runtime.deviceSynchronize()
        keep_busy(producer.ptr)
        with producer:
            x[...] = source
    y = cki.softmax(OnGpu(x, stream=producer.ptr))
    assert y.device.id == 1
    np.testing.assert_array_equal(cupy.asnumpy(y), cupy.asnumpy(cki.softmax(cupy.asarray(ROWS))))


@pytest.mark.torch
def test_traced_torch_and_gradients_on_the_second_gpu(torch):
    import cki.adapters.torch as adapter

    x = torch.from_numpy(TOKENS).to("cuda:1").requires_grad_()
    weight = torch.ones(128, device="cuda:1")

    def step(x):
        return adapter.layer_norm(2 * x, weight, recompute_gradient=True).sin().sum()

    (wanted,) = torch.autograd.grad(torch.nn.functional.layer_norm(2 * x, (128,), weight).sin().sum(), x)
    for function in (step, torch.compile(step, fullgraph=True)):
        (found,) = torch.autograd.grad(function(x), x)
        assert found.device.index == 1
        torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-5)
    q = torch.from_numpy(Q).to("cuda:1", torch.float16).transpose(1, 2)
    found = adapter.scaled_dot_product_attention(q, q, q, is_causal=True)
    wanted = torch.nn.functional.scaled_dot_product_attention(q, q, q, is_causal=True)
    torch.testing.assert_close(found, wanted, rtol=5e-3, atol=5e-3)
    assert torch.cuda.current_device() == 0


@pytest.mark.torch
def test_a_graph_of_the_second_gpu(torch):
    """cki.capture on tensors of a GPU that is not current; replays read what is there then."""
    x = torch.from_numpy(ROWS).to("cuda:1")
    captured = cki.capture(cki.softmax, x)
    x.copy_(torch.from_numpy(ROWS * 3))
    torch.cuda.synchronize(1)
    y = captured.replay()
    torch.cuda.synchronize(1)
    torch.testing.assert_close(y, torch.softmax(x, -1), rtol=1e-5, atol=1e-7)
    assert torch.cuda.current_device() == 0


@pytest.mark.torch
def test_an_encoder_on_the_second_gpu(torch):
    from tests.encoder.hf_bert import CONFIG, random_model

    _, state = random_model(CONFIG)
    weights = {name: torch.from_numpy(np.asarray(a, np.float32)).to("cuda:1") for name, a in state.items()}
    encoder = cki.Encoder.from_weights(weights, CONFIG)
    here = cki.Encoder.from_weights({name: w.to("cuda:0") for name, w in weights.items()}, CONFIG)
    ids = torch.tensor([[1, 2, 3, 4]])
    y = encoder(ids.to("cuda:1"))
    assert y.device.index == 1
    assert torch.equal(y.cpu(), here(ids.to("cuda:0")).cpu())
    with pytest.raises(DeviceError, match="input_ids is on cuda:0, the weights are on cuda:1"):
        encoder(ids.to("cuda:0"))


@pytest.mark.torch
@pytest.mark.transformers
def test_a_transformers_model_on_the_second_gpu(torch):
    """Prefill with padding and decoding, with the model's own caches; logits of sdpa on the same GPU."""
    transformers = pytest.importorskip("transformers")
    from cki.adapters.transformers import register

    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=100, hidden_size=128, intermediate_size=256, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2,
    )  # fmt: skip
    model = transformers.LlamaForCausalLM(config).to("cuda:1", torch.float32).eval()
    ids = torch.from_numpy(np.random.default_rng(1).integers(3, 100, (2, 12))).to("cuda:1")
    mask = torch.ones_like(ids)
    mask[0, :4] = 0
    found = {}
    register()
    with torch.inference_mode():
        for implementation in ("sdpa", "cki"):
            model.set_attn_implementation(implementation)
            logits = model(ids, attention_mask=mask).logits[mask.bool()]
            text = model.generate(ids, attention_mask=mask, max_new_tokens=6, do_sample=False, pad_token_id=0)
            assert (logits.device.index, torch.cuda.current_device()) == (1, 0)
            found[implementation] = logits, text
    torch.testing.assert_close(found["cki"][0], found["sdpa"][0], rtol=2e-3, atol=2e-3)
    assert torch.equal(found["cki"][1], found["sdpa"][1])


# ---------------------------------------------------------------------------------------------------------------------
# refusals, loading, threads


@pytest.mark.torch
def test_mixed_gpus_are_refused_by_name(torch):
    """Interop case mixed_devices: argument and device named; nothing is launched, the process stays usable."""

    def on(array, index):
        return torch.from_numpy(array).to(f"cuda:{index}")

    with pytest.raises(CkiError, match="q is on cuda:0, k is on cuda:1, v is on cuda:0"):
        cki.attention(on(Q, 0), on(KV, 1), on(KV, 0))
    with pytest.raises(CkiError, match="x is on cuda:1, w is on cuda:0"):
        cki.linear(on(ROWS, 1), on(WIDE, 0))
    with pytest.raises(CkiError, match="out(.|\n)*cuda:1"):
        cki.softmax(on(ROWS, 0), out=torch.empty(64, 1024, device="cuda:1"))
    with cupy.cuda.Device(1):
        there = cupy.asarray(ROWS)
    with pytest.raises(CkiError, match="x is on cuda:1, weight is on cuda:0"):
        cki.layer_norm(there, cupy.asarray(ROWS[0]))
    with pytest.raises(CkiError, match="x is on cuda:1, weight is on cuda:0"):
        cki.layer_norm(OnGpu(there), OnGpu(cupy.asarray(ROWS[0])))
    torch.testing.assert_close(cki.softmax(on(ROWS, 1)).cpu(), torch.softmax(torch.from_numpy(ROWS), -1))


@pytest.mark.jax
def test_mixed_gpus_are_refused_in_jax():
    jax = pytest.importorskip("jax")
    if jax.default_backend() != "gpu" or len(jax.local_devices()) < 2:
        pytest.skip("JAX sees fewer than two GPUs")
    first, second = jax.local_devices()[:2]
    x, weight = jax.device_put(ROWS, first), jax.device_put(ROWS[0], second)
    jax.block_until_ready((x, weight))
    cupy.cuda.Device(0).use()  # JAX's own copies may leave the second one current
    import cki.adapters.jax as adapter

    for layer_norm in (cki.layer_norm, adapter.layer_norm):
        with pytest.raises(CkiError, match="x is on cuda:0, weight is on cuda:1"):
            layer_norm(x, weight)


@pytest.mark.parametrize("order", ["10", "01"])
def test_kernels_are_loaded_for_each_gpu(order):
    """In a fresh process, whichever GPU comes first: no context of the other's is needed."""
    program = (
        "import cupy, numpy as np, cki\n"
        "x = np.linspace(-2, 2, 4096, dtype='f4').reshape(4, 1024)\n"
        "for index in map(int, '" + order + "'):\n"
        "    with cupy.cuda.Device(index):\n"
        "        there, half = cupy.asarray(x), cupy.asarray(x, 'f2')\n"
        "    y, z = cki.softmax(there), cki.linear(half, half.T)\n"
        "    assert y.device.id == z.device.id == index\n"
        "    e = np.exp(x - x.max(-1, keepdims=True))\n"
        "    assert np.abs(cupy.asnumpy(y) - e / e.sum(-1, keepdims=True)).max() < 1e-6\n"
        "    assert np.abs(cupy.asnumpy(z) / (x @ x.T) - 1).max() < 0.01\n"
        "print('right')\n"
    )
    assert output_of(program) == "right\n"


@pytest.mark.torch
def test_two_threads_drive_two_gpus(torch):
    """Each makes its calls on its own GPU, at the same time, and gets the bits of a lone thread's."""

    def on(index):
        device = torch.device("cuda", index)
        return operations(
            lambda a: torch.from_numpy(a).to(device), lambda a: torch.from_numpy(a).to(device, torch.float16)
        )

    wanted = [found.cpu() for found in on(0)]
    start, problems = threading.Barrier(2), []

    def drive(index):
        try:
            torch.cuda.set_device(index)
            start.wait(60)
            for _ in range(20):
                for found, expected in zip(on(index), wanted):
                    assert found.device.index == index
                    assert torch.equal(found.cpu(), expected)
        except BaseException as error:
            problems.append(f"cuda:{index}: {error!r}")
            start.abort()

    threads = [threading.Thread(target=drive, args=(index,)) for index in (0, 1)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not problems, problems


def test_two_threads_without_a_context_of_their_own():
    """Threads that never used CUDA, arrays of either GPU in each: calls find the right context every time."""
    arrays = []
    for index in (0, 1):
        with cupy.cuda.Device(index):
            arrays.append(cupy.asarray(ROWS))
    wanted = calls.plain_layer_norm(ROWS)
    problems = []

    def drive(first):
        try:
            for turn in range(40):
                x = arrays[(first + turn) % 2]
                y = cki.layer_norm(x)
                assert y.device.id == x.device.id
                np.testing.assert_allclose(cupy.asnumpy(y), wanted, atol=1e-5)
        except BaseException as error:
            problems.append(repr(error))

    threads = [threading.Thread(target=drive, args=(first,)) for first in (0, 1)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not problems, problems
