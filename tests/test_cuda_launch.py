"""The generated launches of `cki.cuda_launch`, with a driver that only records: arguments, errors, contexts."""

from __future__ import annotations

import contextlib
import ctypes
import logging
import struct
from types import SimpleNamespace

import pytest

from cki import dtypes, log
from cki.device import sim_device
from cki.errors import LaunchError
from cki.operand import Operand, dense
from cki.plan import Plan, Step, TensorMapArg
from tests.toy import kernel

cuda_launch = pytest.importorskip("cki.cuda_launch")
INVALID_CONTEXT, OUT_OF_MEMORY = 201, 2


class Driver:
    """Stands for CUDA: notes launches as (handle, grid, stream, values of the parameters), and may refuse them."""

    def __init__(self, monkeypatch):
        self.launches, self.entered, self.refusals = [], [], {}
        self.current, self.devices = 0, 1
        api = SimpleNamespace(
            CUlaunchConfig=SimpleNamespace, cuLaunchKernelEx=self.launch_extended,
            CUresult=type("CUresult", (int,), {"CUDA_ERROR_INVALID_CONTEXT": INVALID_CONTEXT}),
            CUlaunchAttribute=lambda: SimpleNamespace(value=SimpleNamespace(clusterDim=SimpleNamespace())),
            CUlaunchAttributeID=SimpleNamespace(
                CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION=4, CU_LAUNCH_ATTRIBUTE_COOPERATIVE=2,
                CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION=6,
            ),
        )  # fmt: skip
        monkeypatch.setattr(cuda_launch, "launchKernel", self.launch)
        monkeypatch.setattr(cuda_launch.driver, "api", lambda: api)
        monkeypatch.setattr(cuda_launch.driver, "device_count", lambda: self.devices)
        monkeypatch.setattr(cuda_launch.driver, "current_device", lambda: self.current)
        monkeypatch.setattr(cuda_launch.driver, "on_device", self.on_device)
        monkeypatch.setattr(cuda_launch.driver, "error_text", lambda status: f"error {int(status)}")
        monkeypatch.setattr(cuda_launch.CudaExecutable, "_load", lambda self, step: 0x1000 + step.grid[0])

    @contextlib.contextmanager
    def on_device(self, index):
        self.entered.append(index)
        previous, self.current = self.current, index
        yield
        self.current = previous

    def launch(self, function, gx, gy, gz, bx, by, bz, smem, stream, parameters, extra):
        assert (gy, gz, by, bz, extra) == (1, 1, 1, 1, 0)
        status = self.refusals.pop(len(self.launches), 0)
        if status:
            error = cuda_launch.CUDADriverError.__new__(cuda_launch.CUDADriverError)
            error.status = status
            raise error
        addresses = (ctypes.c_void_p * 5).from_address(parameters)
        values = [
            struct.unpack(f"<{letter}", ctypes.string_at(address, struct.calcsize(letter)))[0]
            for letter, address in zip("QQffq", addresses)
        ]
        self.launches.append((function, gx, stream, values))

    def launch_extended(self, config, function, parameters, extra):
        self.launch(
            function, config.gridDimX, 1, 1, config.blockDimX, 1, 1, config.sharedMemBytes, config.hStream,
            parameters, extra,
        )  # fmt: skip
        return (0,)


@pytest.fixture
def cuda(monkeypatch):
    return Driver(monkeypatch)


X, Y = dense("x", (64,), dtypes.f32), dense("y", (64,), dtypes.f32)
LATER = Operand("y", (32,), (1,), dtypes.f32, 128)  # y from its 128th byte on


def step(x, y, blocks, **options):
    return Step(kernel(), (blocks, 1, 1), (128, 1, 1), (x, y, 2.0, 1.0, blocks), **options)


def executable(*steps, arch="sm_90a"):
    return cuda_launch.CudaExecutable(Plan(steps), sim_device(arch), ("x", "y"))


@pytest.fixture(params=["plain", "generated"])
def prepared(request):
    """`executable`, at its first launch or with its function made."""

    def prepare(*steps):
        made = executable(*steps)
        if request.param == "generated":
            made._straight = made.launcher()
        return made

    return prepare


def test_every_launch_gets_its_own_values(cuda):
    made = executable(step(X, Y, 1), step(LATER, X, 2), step(X, Y, 3, cluster=(1, 1, 1), cooperative=True))
    for stream, x, y in ((0, 1 << 46, 1 << 45), (7, 3 << 40, 5 << 40), (0, 1 << 46, 1 << 45), (0, 16, 32)):
        made.launch([x, y], stream)
        assert cuda.launches == [
            (0x1001, 1, stream, [x, y, 2.0, 1.0, 1]),
            (0x1002, 2, stream, [y + 128, x, 2.0, 1.0, 2]),
            (0x1003, 3, stream, [x, y, 2.0, 1.0, 3]),
        ]
        del cuda.launches[:]
    assert len(made._free) == 1  # one block of arguments served all


def test_tensor_maps_are_encoded_when_their_address_changes(cuda, monkeypatch):
    encoded = []
    monkeypatch.setattr(cuda_launch.tensor_map, "encode", lambda a, _: encoded.append(a) or bytes(128))
    from cki.kernel import kernel_spec

    spec = kernel_spec("affine.cu", "affine", "PPffqT")
    argument = TensorMapArg(LATER, (32,), (), (32,))
    made = executable(Step(spec, (1, 1, 1), (128, 1, 1), (X, Y, 1.0, 0.0, 5, argument)))
    for y in (1 << 45, 1 << 45, 3 << 45):
        made.launch([1 << 46, y], 0)
    assert encoded == [(1 << 45) + 128, (3 << 45) + 128]
    assert [values[1] for *_, values in cuda.launches] == [1 << 45, 1 << 45, 3 << 45]


def test_a_thread_without_a_context_gets_one_for_its_tensor_maps(cuda, prepared, monkeypatch):
    refused = []

    def encoder(*_):
        refused.append(cuda.current < 0)
        return INVALID_CONTEXT if cuda.current < 0 else 0

    monkeypatch.setattr(cuda_launch.tensor_map, "_encoder", lambda: encoder)
    from cki.kernel import kernel_spec

    spec = kernel_spec("affine.cu", "affine", "PPffqT")
    argument = TensorMapArg(LATER, (32,), (), (32,))
    made = prepared(Step(spec, (1, 1, 1), (128, 1, 1), (X, Y, 1.0, 0.0, 5, argument)))
    cuda.current = -1
    made.launch([1 << 46, 7 << 45], 0)
    assert refused == [True, False] and cuda.entered == [made.device.index] and cuda.current == -1
    assert len(cuda.launches) == 1
    cuda_launch.tensor_map.encode.cache_clear()


def test_a_refused_launch_is_named(cuda, prepared):
    made = prepared(step(X, Y, 1), step(Y, X, 2))
    cuda.refusals = {1: OUT_OF_MEMORY}
    with pytest.raises(LaunchError, match=r"error 2: launch affine<.*grid=\(2, 1, 1\)"):
        made.launch([16, 32], 0)
    assert [grid for _, grid, _, _ in cuda.launches] == [1] and not cuda.entered


def test_a_thread_without_a_context_gets_one_and_launches_once(cuda, prepared):
    made = prepared(step(X, Y, 1), step(Y, X, 2))
    cuda.current, cuda.refusals = -1, {0: INVALID_CONTEXT}
    made.launch([16, 32], 0)
    assert [grid for _, grid, _, _ in cuda.launches] == [1, 2]
    assert cuda.entered == [made.device.index]
    cuda.current, cuda.refusals = 0, {2: INVALID_CONTEXT}  # a context there is: something else is wrong
    with pytest.raises(LaunchError, match="error 201"):
        made.launch([16, 32], 0)


def test_on_a_machine_of_many_devices_the_right_one_is_made_current(cuda, prepared):
    cuda.devices = 2
    made = prepared(step(X, Y, 1))
    cuda.current = made.device.index
    made.launch([16, 32], 0)
    assert not cuda.entered
    cuda.current = made.device.index + 1
    made.launch([16, 32], 5)
    assert cuda.entered == [made.device.index] and cuda.current == made.device.index + 1
    assert [stream for _, _, stream, _ in cuda.launches] == [0, 5]


def test_launches_are_logged_before_they_happen(cuda, prepared, caplog):
    made = prepared(step(X, Y, 1))
    with caplog.at_level(logging.INFO, log.logger.name):
        cuda.refusals = {0: OUT_OF_MEMORY}
        with pytest.raises(LaunchError):
            made.launch([16, 32], 0)
    assert len(caplog.records) == 1


def test_a_launch_inside_a_launch_has_arguments_of_its_own(cuda, prepared, monkeypatch):
    """As from a signal handler, or another thread while the driver has the lock."""
    launch = cuda.launch

    def nested(*arguments):
        if not cuda.launches:
            cuda.launches.append(None)
            made.launch([48, 64], 1)
        launch(*arguments)

    monkeypatch.setattr(cuda_launch, "launchKernel", nested)
    made = prepared(step(X, Y, 1))
    made.launch([16, 32], 0)
    assert [values[:2] for *_, values in cuda.launches[1:]] == [[48, 64], [16, 32]]
    assert len(made._free) == 2


def test_a_plan_without_launches(cuda):
    cuda_launch.CudaExecutable(Plan(()), sim_device(), ("x",)).launch([16], 0)
    assert not cuda.launches
