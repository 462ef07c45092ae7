"""`cki.capture`: replays compute what eager calls compute, on new contents; kernels are counted; memory is freed."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import numpy as np
import pytest

import cki
from cki import capture_state
from cki.capture_state import explained
from cki.errors import InvalidArgumentError, InvalidTypeError, UnsupportedError
from tests.conftest import DeviceUnderTest
from tests.toy import affine

X = np.arange(300, dtype=np.float32)


def write(array: object, values: np.ndarray, device: DeviceUnderTest) -> None:
    """New contents at the same address."""
    array[...] = device.array(values)  # type: ignore[index]


def test_replay_equals_eager_over_changed_inputs(device: DeviceUnderTest) -> None:
    x = device.array(X)
    with cki.capture(lambda t: affine(affine(t, factor=2.0), offset=1.0, steps=1), x) as graph:
        assert graph.num_kernels == 3
        for shift in (0.0, 1.0, 5.0):
            write(x, X + shift, device)
            got = device.numpy(graph.replay())
            np.testing.assert_array_equal(got, 4.0 * (X + shift) + 1.0)


def test_bad_arguments() -> None:
    with cki.device("sim"):
        with pytest.raises(InvalidTypeError, match="function is None"):
            cki.capture(None)  # type: ignore[arg-type]
        with pytest.raises(InvalidTypeError, match="warmup is 'a'"):
            cki.capture(affine, X, warmup="a")  # type: ignore[arg-type]
        with pytest.raises(InvalidArgumentError, match="warmup is -1"):
            cki.capture(affine, X, warmup=-1)
        with pytest.raises(ZeroDivisionError):
            cki.capture(lambda: 1 / 0, warmup=0)
        assert cki.capture(affine, X, steps=1).num_kernels == 1


def test_recording_computes_nothing(device: DeviceUnderTest) -> None:
    x, out = device.array(X), device.empty(X.shape, np.float32)
    graph = cki.capture(affine, x, factor=2.0, out=out, warmup=0)
    device.synchronize()
    assert np.isnan(device.numpy(out)).all()
    assert graph.outputs is out
    graph.replay()
    np.testing.assert_array_equal(device.numpy(out), 4.0 * X)


def test_first_call_inside_a_capture_compiles_there(device: DeviceUnderTest) -> None:
    text = (
        'extern "C" __global__ void fill(float* x, int n) { int i = threadIdx.x; if (i < n) x[i] = kFill; }'
    )
    kernel = cki.load(text, constants={"kFill": 41.5 + (device.kind == "sim")})
    out = device.empty((100,), np.float32)
    graph = cki.capture(lambda t: kernel(1, 128, t, 100), out, warmup=0)
    assert graph.num_kernels == 1
    graph.replay()
    np.testing.assert_array_equal(device.numpy(out), 41.5 + (device.kind == "sim"))


def test_workspaces_live_with_the_graph(device: DeviceUnderTest) -> None:
    x = device.array(X)
    graph = cki.capture(affine, x, factor=2.0)
    noise = [affine(device.array(X + i), factor=9.0) for i in range(20)]  # would take freed memory
    graph.replay()
    np.testing.assert_array_equal(device.numpy(graph.outputs), 4.0 * X)
    assert len(noise) == 20


def test_closing_frees_and_a_closed_graph_says_so(device: DeviceUnderTest) -> None:
    graph = cki.capture(affine, device.array(X))
    output = weakref.ref(graph.outputs)
    graph.close()
    graph.close()
    gc.collect()
    assert output() is None
    with pytest.raises(InvalidArgumentError, match="closed"):
        graph.replay()


def test_dropping_a_graph_frees_its_memory(device: DeviceUnderTest) -> None:
    graph = cki.capture(affine, device.array(X))
    output = weakref.ref(graph.outputs)
    del graph
    gc.collect()
    assert output() is None


def test_an_error_inside_leaves_no_capture_behind(device: DeviceUnderTest) -> None:
    x = device.array(X)
    with pytest.raises(InvalidArgumentError):
        cki.capture(affine, x, factor=float("nan"), warmup=0)
    assert capture_state.active == 0
    np.testing.assert_array_equal(device.numpy(affine(x)), X)


def test_graphs_inside_a_capture_are_refused() -> None:
    """The simulated device ran them once, at the recording, and no replay repeated them."""
    with cki.device("sim"):
        inner = cki.capture(affine, X)
        for what, function in (("a replay", inner.replay), ("cki.capture", lambda: cki.capture(affine, X))):
            with pytest.raises(UnsupportedError, match=f"{what} inside cki.capture\n  hint: "):
                cki.capture(function, warmup=0)
        np.testing.assert_array_equal(inner.replay(), affine(X))


def test_what_the_function_made_and_let_go_of_lives_with_the_graph(device: DeviceUnderTest) -> None:
    def through_a_temporary(t: Any) -> Any:
        between = t.copy()
        affine(t, factor=2.0, steps=1, out=between)
        return affine(between, offset=1.0, steps=1)

    x = device.array(X)
    graph = cki.capture(through_a_temporary, x)
    others = [device.array(np.full(X.shape, 9.0, np.float32)) for _ in range(32)]
    np.testing.assert_array_equal(device.numpy(graph.replay()), 2.0 * X + 1.0)
    assert all((device.numpy(other) == 9.0).all() for other in others)


def test_other_frameworks_are_refused() -> None:
    class Tensor:
        def __dlpack__(self) -> None: ...

    Tensor.__module__ = "somewhere"
    with pytest.raises(UnsupportedError, match="cki.capture does not take"):
        cki.capture(lambda t: t, Tensor())


def test_other_frameworks_are_refused_on_the_simulated_device_too() -> None:
    jnp = pytest.importorskip("jax.numpy")
    with cki.device("sim"), pytest.raises(UnsupportedError, match="cki.capture does not take jax tensors"):
        cki.capture(affine, jnp.asarray(X))


def test_validation_inside_a_capture_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CKI_VALIDATE", "1")
    table, ids = np.zeros((4, 8), np.float32), np.zeros((1, 2), np.int64)
    with (
        cki.device("sim"),
        pytest.raises(UnsupportedError, match="reads token_ids, which waits for the device"),
    ):
        cki.capture(cki.embed_tokens, ids, table, warmup=0)
    assert capture_state.active == 0


def test_graphs_that_share_memory(device: DeviceUnderTest) -> None:
    """Workspaces of the second lie in those of the first; results stay apart."""
    x, z = device.array(X), device.array(X + 3.0)
    first = cki.capture(lambda t: affine(affine(t, factor=2.0), factor=3.0), x)
    second = cki.capture(lambda t: affine(t, factor=2.0), z, share_memory=first)
    if device.kind == "cuda":
        assert second.pool is first.pool
    first.replay()
    second.replay()
    np.testing.assert_array_equal(device.numpy(first.outputs), 36.0 * X)
    np.testing.assert_array_equal(device.numpy(second.outputs), 4.0 * (X + 3.0))
    first.close()
    second.replay()
    np.testing.assert_array_equal(device.numpy(second.outputs), 4.0 * (X + 3.0))
    with pytest.raises(InvalidArgumentError, match="share_memory is a graph that was closed"):
        cki.capture(affine, x, share_memory=first)
    with pytest.raises(InvalidTypeError, match="share_memory is 'all', not a graph"):
        cki.capture(affine, x, share_memory="all")  # type: ignore[arg-type]


class _DriverError(RuntimeError):
    """As CuPy raises it."""

    status = 900


def waits(text: str, kind: type[RuntimeError]) -> None:
    raise kind(text)  # the line that waits


@pytest.mark.parametrize(
    ("kind", "text"),
    [
        (
            RuntimeError,
            "CUDA error: operation not permitted when stream is capturing\nCUDA kernel errors ...",
        ),
        (_DriverError, "cudaErrorStreamCaptureUnsupported: operation not permitted when stream is capturing"),
        (RuntimeError, "CUDA_ERROR_STREAM_CAPTURE_INVALIDATED"),
        (
            RuntimeError,
            "the current stream is capturing, so D2H transfers are disallowed",
        ),  # CuPy's own check
    ],
)
def test_a_function_that_waits_is_refused_by_its_line(kind: type[RuntimeError], text: str) -> None:
    """As frameworks report it: ending the capture fails as well, and hides the cause."""
    try:
        try:
            waits(text, kind)
        finally:
            raise RuntimeError("CUDA error: operation failed due to a previous error during capture")
    except RuntimeError as error:
        refusal = explained(error, waits)
    assert refusal is not None
    first, *rest = str(refusal).splitlines()
    assert first.startswith("cki.capture: waits does what a graph cannot record at ")
    assert first.rpartition(":")[0].endswith("test_graph.py")
    assert rest[0].strip() == "- there: raise kind(text)  # the line that waits"
    assert text.splitlines()[0] in rest[1]


def test_lines_of_compiled_modules_are_not_the_user_s() -> None:
    """CuPy's frames name their sources by relative paths, as if they lay in the user's folder."""
    code = "def get(): raise RuntimeError('the current stream is capturing, so D2H transfers are disallowed')"
    cython: dict[str, object] = {}
    exec(compile(code, "cupy/cuda/memory.pyx", "exec"), cython)
    with pytest.raises(RuntimeError) as raised:
        cython["get"]()  # type: ignore[operator]  # the user's line
    refusal = explained(raised.value, waits)
    assert refusal is not None
    assert str(refusal).splitlines()[1].strip().startswith('- there: cython["get"]()')


def test_calls_beside_the_recorded_stream_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """They would run once, while recording, and no replay would repeat them."""
    recording = capture_state.Recording("torch", 0x50)
    monkeypatch.setattr("cki.driver.capturing_graph", lambda stream: "graph" if stream == 0x60 else None)
    capture_state._require_recorded(recording, 0x60)  # waits for the recorded stream
    with pytest.raises(UnsupportedError, match="records stream 0x50 of torch, this call went to 0x0"):
        capture_state._require_recorded(recording, 0)


@pytest.mark.gpu
@pytest.mark.torch
def test_calls_of_another_framework_are_refused_inside_a_capture() -> None:
    torch, cupy = pytest.importorskip("torch"), pytest.importorskip("cupy")
    x, other = torch.ones((2, 300), device="cuda"), cupy.ones((2, 300), cupy.float32)
    with pytest.raises(UnsupportedError, match="no replay would repeat it"):
        cki.capture(lambda x: (cki.softmax(x), cki.softmax(other)), x)
    with pytest.raises(UnsupportedError, match="no replay would repeat it"):
        cki.capture(lambda: cki.softmax(other))  # no tensor says which framework: torch is loaded
    assert capture_state.active == 0


@pytest.mark.parametrize(
    "error", [RuntimeError("shapes differ"), ValueError("CUDA capture"), RuntimeError("no capture card")]
)
def test_other_errors_are_not_explained_away(error: Exception) -> None:
    assert explained(error, waits) is None


@pytest.mark.gpu
def test_a_copy_to_the_host_is_refused_by_its_line() -> None:
    import cupy

    def reads(t: object) -> object:
        y = affine(t)
        return y * float(y.sum())

    with pytest.raises(
        UnsupportedError, match=r"reads does what a graph cannot record at .*test_graph.py:\d+"
    ):
        cki.capture(reads, cupy.asarray(X))
    assert capture_state.active == 0
    np.testing.assert_array_equal(affine(cupy.asarray(X)).get(), X)


@pytest.mark.gpu
@pytest.mark.torch
def test_item_is_refused_by_its_line_under_torch() -> None:
    torch = pytest.importorskip("torch")

    def reads(t: object) -> object:
        y = affine(t)
        return y * y.sum().item()

    x = torch.arange(300, dtype=torch.float32, device="cuda")
    with pytest.raises(
        UnsupportedError, match=r"reads does what a graph cannot record at .*test_graph.py:\d+"
    ):
        cki.capture(reads, x)
    assert capture_state.active == 0


@pytest.mark.gpu
@pytest.mark.torch
@pytest.mark.parametrize("waits", [True, False])
def test_torch_s_random_numbers_go_on_after_a_capture_that_failed(waits: bool) -> None:
    """torch leaves its generator, its allocator and the current stream in the state of a capture that a wait has
    invalidated."""
    torch = pytest.importorskip("torch")

    def fails(t: object) -> object:
        y = affine(t) + torch.rand_like(t)
        if waits:
            return y.sum().item()
        raise ValueError

    x = torch.arange(300, dtype=torch.float32, device="cuda")
    torch.manual_seed(3)
    torch.rand(5, device="cuda")
    wanted = torch.rand(7, device="cuda")
    torch.manual_seed(3)
    torch.rand(5, device="cuda")
    stream = torch.cuda.current_stream()
    with pytest.raises((UnsupportedError, ValueError)):
        cki.capture(fails, x, warmup=0)
    assert torch.cuda.current_stream() == stream
    large = torch.empty(64 << 20, dtype=torch.uint8, device="cuda")
    reserved = torch.cuda.memory_reserved()
    del large
    torch.cuda.empty_cache()
    assert torch.cuda.memory_reserved() <= reserved - (
        64 << 20
    )  # the allocator does not think it is captured
    assert torch.equal(torch.rand(7, device="cuda"), wanted)
    graph = cki.capture(lambda t: affine(t) + torch.rand_like(t), x, warmup=0)
    graph.replay()
    first = graph.outputs.clone()
    graph.replay()
    assert not torch.equal(graph.outputs, first)


def test_a_generator_in_the_state_of_a_capture_gets_a_new_one(monkeypatch: pytest.MonkeyPatch) -> None:
    torch = pytest.importorskip("torch")
    from cki.graph import _revive_generator

    class Generator:
        broken = True

        def graphsafe_set_state(self, state: object) -> None:
            self.state, self.broken = state, False

        def set_state(self, state: object) -> None:
            self.state = state

    class Tensor:
        def uniform_(self, generator: Generator) -> None:
            if generator.broken:
                raise RuntimeError("Offset increment outside graph capture encountered unexpectedly.")

    monkeypatch.setattr(torch, "empty", lambda *_, **__: Tensor())
    generator, state = Generator(), torch.Generator().get_state()
    _revive_generator(generator, state, "cpu")
    assert not generator.broken and torch.equal(generator.state.get_state(), state)
    _revive_generator(generator, state, "cpu")
    assert generator.state is state


@pytest.mark.gpu
@pytest.mark.torch
def test_products_of_torch_take_the_graphs_own_memory() -> None:
    """torch keeps a workspace of cuBLAS's (32 MB on Hopper) for every stream on which a product ran, until any
    recording of `torch.compile` clears them all.  Few outputs of long sums are what needs one."""
    torch = pytest.importorskip("torch")
    x = torch.randn(64, 16384, dtype=torch.float16, device="cuda")

    def product(t):
        return t @ t.T

    def reserved() -> int:
        torch.cuda.synchronize()
        gc.collect()
        torch.cuda.empty_cache()
        return int(torch.cuda.memory_reserved())

    cki.capture(product, x).close()
    before = reserved()
    for _ in range(3):
        cki.capture(product, x).close()
        assert reserved() == before
    with cki.capture(product, x) as graph:
        torch._C._cuda_clearCublasWorkspaces()
        reserved()
        graph.outputs.zero_()
        graph.replay()
        assert torch.equal(graph.outputs, product(x))


@pytest.mark.gpu
@pytest.mark.torch
def test_torch_graphs_share_a_pool() -> None:
    torch = pytest.importorskip("torch")
    x = torch.ones(1 << 20, dtype=torch.float32, device="cuda")
    first = cki.capture(lambda t: affine(affine(t, factor=2.0), factor=2.0), x)
    before = torch.cuda.memory_allocated()
    second = cki.capture(lambda t: affine(affine(t, factor=2.0), factor=2.0), x, share_memory=first)
    # Of all that it took, its output alone is still in use.
    assert torch.cuda.memory_allocated() - before <= 5 << 20
    assert second.pool == first.pool
    first.replay()
    second.replay()
    torch.cuda.synchronize()
    assert torch.equal(first.outputs, second.outputs)


@pytest.mark.gpu
@pytest.mark.torch
def test_torch_graph() -> None:
    torch = pytest.importorskip("torch")
    x = torch.arange(300, dtype=torch.float32, device="cuda")
    graph = cki.capture(lambda t: affine(affine(t, factor=2.0) * 1.0, offset=1.0, steps=1), x)
    assert graph.num_kernels == 4
    x += 1.0
    graph.replay()
    torch.cuda.synchronize()
    np.testing.assert_array_equal(graph.outputs.cpu().numpy(), 4.0 * (X + 1.0) + 1.0)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    graph.replay(stream)
    stream.synchronize()


@pytest.mark.gpu
@pytest.mark.torch
def test_inside_torchs_own_capture() -> None:
    torch = pytest.importorskip("torch")
    x = torch.arange(300, dtype=torch.float32, device="cuda")
    affine(x, factor=2.0)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = affine(x, factor=2.0)
    x += 1.0
    graph.replay()
    torch.cuda.synchronize()
    np.testing.assert_array_equal(y.cpu().numpy(), 4.0 * (X + 1.0))


@pytest.mark.gpu
def test_inside_cupys_own_capture_workspaces_survive() -> None:
    import cupy

    x = cupy.asarray(X)
    out = cupy.empty_like(x)
    affine(x, factor=2.0, out=out)
    stream = cupy.cuda.Stream(non_blocking=True)
    cupy.cuda.runtime.deviceSynchronize()
    with stream:
        stream.begin_capture()
        affine(x, factor=2.0, out=out)
        graph = stream.end_capture()
    noise = [affine(cupy.asarray(X + i), factor=9.0) for i in range(20)]
    cupy.cuda.runtime.deviceSynchronize()
    out.fill(0)
    graph.launch()
    np.testing.assert_array_equal(out.get(), 4.0 * X)
    assert len(noise) == 20
