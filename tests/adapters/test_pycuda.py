"""Arrays known only by a protocol: foreign DLPack producers, and the `__cuda_array_interface__` of PyCUDA and numba.

The CUDA calls are replaced here, so that stream order can be checked without a GPU; `test_gpu.py` has the real ones.
"""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest

from cki import dtypes
from cki.adapter import adapter_of
from cki.errors import InvalidTypeError
from cki.tensor import DeviceId, TensorView


class Foreign:
    """A CPU array that shows only DLPack."""

    def __init__(self, array):
        self.array = array

    def __dlpack__(self, **kwargs):
        return self.array.__dlpack__(**kwargs)

    def __dlpack_device__(self):
        return (1, 0)


class GPUArray:
    """What PyCUDA's GPUArray and numba's DeviceNDArray show of themselves."""

    def __init__(self, shape=(2, 3), typestr="<f4", pointer=4096, readonly=False, **more):
        self.__cuda_array_interface__ = {
            "shape": shape, "typestr": typestr, "data": (pointer, readonly), "version": 3, **more,
        }  # fmt: skip


class CudaExporter:
    """A GPU array that shows only DLPack and notes the stream it was asked for."""

    def __init__(self, index=1):
        self.index = index
        self.streams = []

    def __dlpack__(self, *, stream=None, max_version=None):
        from cki.dlpack import DLPackExport

        self.streams.append(stream)
        view = TensorView(8192, (4,), (1,), dtypes.f16, DeviceId("cuda", self.index))
        return DLPackExport(view).__dlpack__(stream=stream, max_version=max_version)

    def __dlpack_device__(self):
        return (2, self.index)


ADAPTER = adapter_of(Foreign(np.zeros(1)))


@pytest.fixture
def cuda(monkeypatch):
    """CUDA calls that only take notes: memory lies on device 1, whose current stream is 94."""
    cupy_adapter = pytest.importorskip("cki.adapters.cupy")

    class Stream:
        ptr = 94

    notes = SimpleNamespace(ordered=[], capturing=False)
    monkeypatch.setattr(cupy_adapter, "device_of_pointer", lambda pointer: 1)
    monkeypatch.setattr(cupy_adapter, "get_current_stream", lambda index: Stream)
    monkeypatch.setattr(cupy_adapter, "is_capturing", lambda stream: notes.capturing)
    monkeypatch.setattr(cupy_adapter, "order_after", lambda *streams: notes.ordered.append(streams))
    return notes


# ---------------------------------------------------------------- DLPack


def test_foreign_cpu_arrays_are_read_in_place():
    array = np.arange(12, dtype=np.float32).reshape(3, 4)[:, ::2]
    (view,) = ADAPTER.begin(["x"], [Foreign(array)])
    assert (view.ptr, view.strides) == (array.__array_interface__["data"][0], (4, 2))
    assert ADAPTER.signature(view)[0] == view.ptr


def test_outputs_are_numpy_arrays_on_the_simulated_device():
    (view,) = ADAPTER.begin(["x"], [Foreign(np.zeros(3))])
    output = ADAPTER.empty((2, 5), dtypes.bf16, view)
    assert (type(output), output.shape, output.dtype) == (np.ndarray, (2, 5), dtypes.bf16.numpy)
    assert ADAPTER.pointer(output) == output.__array_interface__["data"][0]
    assert ADAPTER.finish([output], [view], 0, DeviceId("cpu"))[0] is output


def test_a_view_of_cki_is_a_tensor_too():
    view = adapter_of(np.zeros(3)).view(np.zeros(3))
    assert adapter_of(view) is ADAPTER
    assert ADAPTER.view(view) is view


def test_refusals_name_the_argument():
    backwards = Foreign(np.zeros((3, 2), np.float32)[::-1])
    complex_ = Foreign(np.zeros(3, np.complex64))
    assert ADAPTER.check(backwards, "x")[0].startswith("x: strides (-2, 1) (in elements) are negative")
    with pytest.raises(InvalidTypeError) as caught:
        ADAPTER.begin(["q", "k", "v"], [backwards, None, complex_])
    assert [problem[:2] for problem in caught.value.problems] == ["q:", "v:"]
    assert "DLPack element type code 5, 64 bits" in caught.value.problems[1]


def test_read_only_memory_is_no_output():
    array = np.zeros(3, np.float32)
    array.flags.writeable = False
    assert ADAPTER.check(Foreign(array), "x") == []
    assert ADAPTER.check(Foreign(array), "out", output=True) == [
        "out is read-only; an output needs writable memory"
    ]


def test_gpu_producers_are_told_our_stream(cuda):
    producer = CudaExporter()
    (view,) = ADAPTER.begin(["x"], [producer])
    assert (view.ptr, view.dtype, view.device) == (8192, dtypes.f16, DeviceId("cuda", 1))
    ADAPTER.begin(["x"], [producer], 7)
    ADAPTER.begin(["x"], [producer], 0)
    assert producer.streams == [94, 7, 1]


def test_no_producer_waits_while_a_graph_is_captured(cuda):
    """Interop case dlpack_during_graph_capture, the import's half: -1 asks the producer not to touch any stream."""
    cuda.capturing = True
    producer = CudaExporter()
    ADAPTER.begin(["x"], [producer])
    assert producer.streams == [-1]


# ---------------------------------------------------------------- __cuda_array_interface__


def test_interface_arrays_are_read_in_place(cuda):
    array = GPUArray(strides=None)
    assert adapter_of(array) is ADAPTER
    (view,) = ADAPTER.begin(["x"], [array])
    assert (view.ptr, view.shape, view.strides) == (4096, (2, 3), (3, 1))
    assert (view.device, view.owner) == (DeviceId("cuda", 1), array)
    assert cuda.ordered == []


@pytest.mark.parametrize(("stream", "ordered"), [(None, (94, 5, 1)), (11, (11, 5, 1))])
def test_the_stream_of_the_interface_is_waited_for(cuda, stream, ordered):
    ADAPTER.begin(["x"], [GPUArray(stream=5)], stream)
    assert cuda.ordered == [ordered]


@pytest.mark.parametrize(
    ("array", "said"),
    [
        (GPUArray(mask=object()), "x: __cuda_array_interface__ that CKI cannot use\n  - it has a mask"),
        (GPUArray(typestr="<c8"), "element type <c8 has no kernels"),
        (GPUArray(stream=0), "names stream 0, which the protocol forbids"),
        (GPUArray(strides=(-12, 4)), "strides (-3, 1) (in elements) are negative"),
    ],
)
def test_interface_refusals_name_the_argument(cuda, array, said):
    (problem,) = ADAPTER.check(array, "x")
    assert problem.startswith("x: ")
    assert said in problem


class Silent:
    """Says that it has the protocols, and does not keep to them."""

    def __init__(self, device):
        self.device = device

    def __dlpack__(self, **_):
        raise AssertionError("asked for memory of an unknown place")

    def __dlpack_device__(self):
        if isinstance(self.device, Exception):
            raise self.device
        return self.device


@pytest.mark.parametrize(
    "device", ["cpu", None, (1,), ("cpu", 0), RuntimeError("gone"), AttributeError("none")], ids=repr
)
def test_producers_that_do_not_say_where_they_lie(device):
    (problem,) = ADAPTER.check(Silent(device), "x")
    assert problem.startswith("x: __dlpack_device__ does not say where it lies: ")


def test_read_only_interface_is_no_output(cuda):
    assert ADAPTER.check(GPUArray(readonly=True), "out", output=True)
    assert ADAPTER.check(GPUArray(), "out", output=True) == []
