"""Argument blocks, geometry, tensor maps, the log, and every form of launch, on the simulated device and the GPU."""

from __future__ import annotations

import ctypes
import logging
import threading
from pathlib import Path

import numpy as np
import pytest

import cki
from cki import dtypes, tensor_map
from cki.arguments import ArgumentBlock, check_step, lay_out
from cki.device import sim_device
from cki.errors import DeviceError, InvalidTypeError, LaunchError
from cki.kernel import kernel_spec
from cki.launch import check_geometry, describe_step, prepare
from cki.operand import dense
from cki.plan import NullPointer, Plan, Step, TensorMapArg
from tests.conftest import DeviceUnderTest
from tests.toy import affine, kernel, step

FORMS = Path(__file__).parent / "kernels" / "launch_forms.cu"
X = np.arange(777, dtype=np.float32)


def make_step(params: str, *args: object, **geometry: object) -> Step:
    spec = kernel_spec("none.cu", "none", params)
    return Step(spec, (1, 1, 1), (32, 1, 1), args, **geometry)  # type: ignore[arg-type]


def read(block: ArgumentBlock, number: int) -> list[bytes]:
    """The first 8 bytes of each parameter of a step, as the driver would find them."""
    return [ctypes.string_at(pointer, 8) for pointer in block.arrays[number] if pointer]


def test_argument_block_holds_each_value_in_its_type() -> None:
    x = dense("x", (64,), dtypes.f32)
    steps = (
        make_step("PPifqP", x, x.view((32,), (1,), 32), -3, 0.5, 2**40, NullPointer()),
        make_step("PId", dense("y", (1,), dtypes.f32), 2**32 - 1, 0.25),
    )
    block = ArgumentBlock(lay_out(Plan(steps), ("x", "y")), lambda *_: bytes(128))
    for base in (0x1000, 0x7000):
        block.fill([base, base + 0x100])
        pointer, inner, i32, f32, i64, null = read(block, 0)
        assert int.from_bytes(pointer, "little") == base
        assert int.from_bytes(inner, "little") == base + 128
        assert int.from_bytes(i32[:4], "little", signed=True) == -3
        assert np.frombuffer(f32[:4], np.float32)[0] == 0.5
        assert int.from_bytes(i64, "little") == 2**40
        assert null == bytes(8)
        pointer, u32, f64 = read(block, 1)
        assert int.from_bytes(pointer, "little") == base + 0x100
        assert int.from_bytes(u32[:4], "little") == 2**32 - 1
        assert np.frombuffer(f64, np.float64)[0] == 0.25


def test_tensor_maps_are_encoded_when_the_address_changes() -> None:
    calls: list[int] = []

    def encode(address: int, argument: TensorMapArg) -> bytes:
        calls.append(address)
        return address.to_bytes(8, "little") * 16

    x = dense("x", (64, 64), dtypes.bf16)
    arg = TensorMapArg(x.view((32, 64), (64, 1), 64 * 32), (64, 32), (128,), (64, 8))
    block = ArgumentBlock(lay_out(Plan((make_step("TP", arg, x), make_step("T", arg))), ("x",)), encode)
    for base in (0x1000, 0x1000, 0x2000):
        block.fill([base])
        assert int.from_bytes(read(block, 0)[0], "little") == base + 4096
        assert block.arrays[1][0] == block.arrays[0][0]
        assert block.arrays[0][0] % 128 == 0  # type: ignore[operator]
    assert calls == [0x2000, 0x3000]


@pytest.mark.parametrize(
    ("params", "args", "words"),
    [
        ("PP", (1,), "takes 2 parameters"),
        ("i", (2**31,), "is no int"),
        ("i", (1.5,), "is no int"),
        ("I", (-1,), "is no unsigned int"),
        ("f", (1e300,), "is no float"),
        ("P", (3,), "is no pointer"),
        ("i", (True,), "is no int"),
        ("T", (NullPointer(),), "is no TensorMap"),
    ],
)
def test_steps_that_do_not_fit_their_kernel(params: str, args: tuple[object, ...], words: str) -> None:
    with pytest.raises(InvalidTypeError, match=words):
        check_step(make_step(params, *args))


@pytest.mark.parametrize(
    ("geometry", "words"),
    [
        ({"grid": (1, 65536, 1)}, "grid (1, 65536, 1) is over the limit"),
        ({"grid": (0, 1, 1)}, "not three positive sizes"),
        ({"block": (32, 33, 1)}, "1056 threads"),
        ({"block": (1, 1, 65)}, "over the limit (1024, 1024, 64)"),
        ({"smem": 232449}, "the device has 232448"),
        ({"cluster": (2, 1, 1), "grid": (3, 1, 1)}, "not a multiple of cluster"),
        ({"cluster": (17, 1, 1), "grid": (17, 1, 1)}, "the limit is 16"),
    ],
)
def test_geometry_over_the_limits(geometry: dict[str, object], words: str) -> None:
    chosen = {"grid": (1, 1, 1), "block": (32, 1, 1), **geometry}
    bad = Step(kernel(), args=(), **chosen)  # type: ignore[arg-type]
    assert any(words in problem for problem in check_geometry(bad, sim_device("sm_90a")))
    with pytest.raises(LaunchError, match="affine cannot be launched"):
        prepare(Plan((bad,)), sim_device("sm_90a"), ())


def test_clusters_need_hopper() -> None:
    bad = Step(kernel(), (2, 1, 1), (32, 1, 1), (), cluster=(2, 1, 1))
    assert any("needs sm_90" in problem for problem in check_geometry(bad, sim_device("sm_80")))


def test_tensor_map_rules() -> None:
    x = dense("x", (64, 60), dtypes.bf16)
    arg = TensorMapArg(x, (60, 64), (120,), (128, 300), 128)
    text = "\n".join(tensor_map.problems(0x1008, arg))
    for words in (
        "0x1008",
        "stride 120",
        "box size 300",
        "inner box of 256 bytes is wider than the swizzle of 128",
    ):
        assert words in text
    with pytest.raises(LaunchError, match="no tensor map for x"):
        tensor_map.encode_simulated(0x1008, arg)


def test_log_shows_kernel_configuration_and_reason_before_the_launch(
    device: DeviceUnderTest, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO, logger="cki"):
        affine(device.array(X), factor=2.0)
    lines = [record.getMessage() for record in caplog.records if record.getMessage().startswith("launch ")]
    assert len(lines) == 2
    for part in (
        "affine<kThreads=128>",
        "grid=(7, 1, 1)",
        "block=(128, 1, 1)",
        "the only kernel",
        device.info.arch,
    ):
        assert part in lines[0]


def test_description_names_cluster_and_flags() -> None:
    x = dense("x", (4,), dtypes.f32)
    chosen = Step(
        kernel(),
        (2, 1, 1),
        (32, 1, 1),
        (x, x, 1.0, 0.0, 4),
        cluster=(2, 1, 1),
        cooperative=True,
        programmatic=True,
    )
    text = describe_step(chosen, sim_device())
    assert "cluster=(2, 1, 1) cooperative programmatic" in text


@pytest.mark.parametrize("n", [1000, 12288, 50000])
def test_dynamic_shared_memory_to_the_limit(device: DeviceUnderTest, n: int) -> None:
    if 4 * n > device.info.shared_memory_per_block:
        pytest.skip("more than this GPU has")
    values = np.arange(n, dtype=np.float32)
    x, out = device.array(values), device.empty((n,), np.float32)
    cki.load(FORMS, entry="reverse_in_shared")(1, 256, x, out, n, smem=4 * n)
    np.testing.assert_array_equal(device.numpy(out), values[::-1])


def needs_hopper(device: DeviceUnderTest) -> None:
    if device.info.arch in ("sm_80", "sm_89"):
        pytest.skip("needs sm_90 or later")


@pytest.mark.parametrize("size", [2, 4, 8, 16])
def test_clusters(device: DeviceUnderTest, size: int) -> None:
    needs_hopper(device)
    rank, count = device.array(np.zeros(32, np.int32)), device.array(np.zeros(32, np.int32))
    cki.load(FORMS, entry="cluster_ranks")(32, 32, rank, count, cluster=size)
    np.testing.assert_array_equal(device.numpy(rank), np.arange(32) % size)
    np.testing.assert_array_equal(device.numpy(count), size)


def test_programmatic_launches_keep_their_order(device: DeviceUnderTest) -> None:
    needs_hopper(device)
    n = 100_000 if device.kind == "cuda" else 3000
    spec = kernel_spec(str(FORMS), "add_one_after_previous", "PPi")
    slots = ("a", "b")
    a, b = (dense(slot, (n,), dtypes.f32) for slot in slots)
    grid = (-(-n // 256), 1, 1)
    steps = [Step(spec, grid, (256, 1, 1), (*pair, n), programmatic=True) for pair in ((a, b), (b, a)) * 4]
    executable = prepare(Plan(tuple(steps)), device.info, slots)
    from cki.adapter import adapter_of

    tensors = [device.array(np.zeros(n, np.float32)), device.empty((n,), np.float32)]
    adapter = adapter_of(tensors[0])
    executable.launch(
        [adapter.view(t).ptr for t in tensors], adapter.stream(0) if device.kind == "cuda" else 0
    )
    np.testing.assert_array_equal(device.numpy(tensors[0]), 8.0)
    np.testing.assert_array_equal(device.numpy(tensors[1]), 7.0)


@pytest.mark.parametrize("wrong", ["no", 1, None])
def test_cooperative_is_true_or_false(wrong: object) -> None:
    with cki.device("sim"), pytest.raises(InvalidTypeError, match="cooperative is "):
        cki.load(FORMS, entry="cluster_ranks")(4, 32, None, None, cooperative=wrong)


def test_cooperative_launch(device: DeviceUnderTest) -> None:
    rank, count = device.array(np.zeros(4, np.int32)), device.array(np.zeros(4, np.int32))
    needs_hopper(device)
    cki.load(FORMS, entry="cluster_ranks")(4, 32, rank, count, cooperative=True)
    np.testing.assert_array_equal(device.numpy(count), 1)


@pytest.mark.parametrize(("column", "row"), [(0, 0), (32, 8), (36, 13)])
def test_tensor_map_argument(device: DeviceUnderTest, column: int, row: int) -> None:
    needs_hopper(device)
    values = np.arange(20 * 64, dtype=np.float32).reshape(20, 64)
    x, out = device.array(values), device.empty((8, 32), np.float32)
    cki.load(FORMS, entry="copy_tile")(1, 64, cki.TensorMap(x, (8, 32), swizzle=0), out, column, row)
    padded = np.zeros((40, 128), np.float32)
    padded[:20, :64] = values
    np.testing.assert_array_equal(device.numpy(out), padded[row : row + 8, column : column + 32])


@pytest.mark.gpu
def test_launch_error_raises() -> None:
    """A cooperative grid larger than the GPU can hold: only the driver can know, and what it says is raised."""
    import cupy

    rank, count = cupy.zeros(1 << 20, "i4"), cupy.zeros(1 << 20, "i4")
    with pytest.raises(LaunchError, match="COOPERATIVE_LAUNCH_TOO_LARGE") as caught:
        cki.load(FORMS, entry="cluster_ranks")(1 << 20, 1024, rank, count, cooperative=True)
    assert "cluster_ranks" in str(caught.value)
    assert float(affine(cupy.asarray(X), steps=1)[3]) == 3.0, "the device is still usable"


@pytest.mark.gpu
def test_launches_follow_the_current_stream() -> None:
    import cupy

    slow = cupy.RawKernel(
        'extern "C" __global__ void slow(float* x, int n) {'
        " long long t = clock64(); while (clock64() - t < 200000000) {}"
        " for (int i = threadIdx.x; i < n; i += blockDim.x) x[i] = i; }",
        "slow",
    )
    x = cupy.zeros(777, "f4")
    affine(x)  # compile and load first: loading waits for the device
    stream = cupy.cuda.Stream(non_blocking=True)
    with stream:
        slow((1,), (128,), (x, np.int32(777)))
        y = affine(x, factor=2.0)
        stream.synchronize()
        np.testing.assert_array_equal(y.get(), 4.0 * X)
    x.fill(0)
    cupy.cuda.runtime.deviceSynchronize()
    with stream:
        slow((1,), (128,), (x, np.int32(777)))
    z = affine(x, factor=2.0, stream=stream)
    stream.synchronize()
    np.testing.assert_array_equal(z.get(), 4.0 * X)


@pytest.mark.gpu
def test_a_thread_that_never_used_cuda_can_launch() -> None:
    import cupy

    x = cupy.asarray(X)
    out = cupy.empty_like(x)
    affine(x, steps=1, out=out)
    results: list[object] = []

    def work() -> None:
        from cki import driver

        try:
            affine(x, factor=3.0, steps=1, out=out, stream=0)
            results.append(driver.current_device())
        except BaseException as error:
            results.append(error)

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert isinstance(results[0], int), results
    cupy.cuda.runtime.deviceSynchronize()
    np.testing.assert_array_equal(out.get(), 3.0 * X)


@pytest.mark.gpu
@pytest.mark.multi_gpu
def test_second_gpu_while_the_first_is_current() -> None:
    import cupy

    if cupy.cuda.runtime.getDeviceCount() < 2:
        pytest.skip("needs two GPUs")
    cupy.cuda.runtime.setDevice(0)  # JAX leaves another current in its thread
    with cupy.cuda.Device(1):
        x = cupy.asarray(X)
    y = affine(x, factor=2.0)
    assert cupy.cuda.runtime.getDevice() == 0
    assert y.device.id == 1
    with cupy.cuda.Device(1):
        np.testing.assert_array_equal(y.get(), 4.0 * X)
    with pytest.raises(DeviceError, match="different devices"):
        affine(x, cupy.asarray(X))


def test_step_helper_matches_the_kernel() -> None:
    x = dense("x", (5,), dtypes.f32)
    check_step(step(x, x, 1.0, 0.0))
