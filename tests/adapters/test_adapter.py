"""Choice of an adapter, mixed frameworks and devices, stream handles, canonical strides."""

from __future__ import annotations

import numpy as np
import pytest

from cki import dtypes
from cki.adapter import (
    ALIGNMENT,
    BY_TYPE,
    adapter_of,
    canonical_strides,
    common_adapter,
    common_device,
    require_valid,
    stream_handle,
)
from cki.errors import CkiError, InvalidArgumentError, InvalidTypeError
from cki.tensor import DeviceId, TensorView
from tests.adapters.programs import run_program


class Foreign:
    """A library of its own that speaks DLPack."""

    def __init__(self, array):
        self.array = array

    def __dlpack__(self, **kwargs):
        return self.array.__dlpack__(**kwargs)

    def __dlpack_device__(self):
        return self.array.__dlpack_device__()


@pytest.mark.parametrize(
    ("value", "called"),
    [([1.0], "list"), (3.5, "float"), ("x", "str"), (object(), "object"), (range(3), "range")],
)
def test_what_is_no_tensor_is_named(value, called):
    with pytest.raises(InvalidTypeError, match=f"^weight is of type {called}, which is no tensor") as caught:
        adapter_of(value, "weight")
    assert "an array of NumPy, CuPy, PyTorch, TensorFlow or JAX" in str(caught.value)
    assert isinstance(caught.value, TypeError)


def test_the_choice_is_remembered_by_type():
    adapter = adapter_of(np.zeros(3))
    assert adapter.name == "numpy"
    assert BY_TYPE[np.ndarray] is adapter
    assert adapter_of(np.ones((2, 2), np.int32)) is adapter


def test_subclasses_go_to_their_framework(tmp_path):
    class Named(np.ndarray):
        pass

    assert adapter_of(np.zeros(3).view(Named)) is adapter_of(np.zeros(3))
    mapped = np.memmap(tmp_path / "weights", np.float32, "w+", shape=(4,))
    assert adapter_of(mapped).view(mapped).ptr == mapped.__array_interface__["data"][0]


def test_protocol_objects_go_to_the_generic_adapter():
    assert adapter_of(Foreign(np.zeros(3))).name == "array interface"


def test_mixed_frameworks_name_each_argument():
    tensors = [np.zeros(3), None, Foreign(np.zeros(3))]
    with pytest.raises(InvalidTypeError) as caught:
        common_adapter(["x", "weight", "bias"], tensors)
    assert str(caught.value).startswith(
        "tensors of different frameworks in one call: x is of numpy, bias is of array interface"
    )
    assert "from_dlpack" in caught.value.hint


def test_common_adapter_skips_what_is_absent():
    assert common_adapter(["x", "weight"], [np.zeros(3), None]).name == "numpy"


def view_on(device):
    return TensorView(4096, (4,), (1,), dtypes.f32, device)


def test_mixed_devices_name_each_argument():
    """Interop case mixed_devices: q on cuda:0, k on cuda:1."""
    views = [view_on(DeviceId("cuda", 0)), None, view_on(DeviceId("cuda", 1))]
    with pytest.raises(InvalidArgumentError, match="q is on cuda:0, k is on cuda:1") as caught:
        common_device(["q", "mask", "k"], views)
    assert isinstance(caught.value, ValueError)
    with pytest.raises(ValueError, match="q is on cuda:0, k is on cpu"):
        common_device(["q", "k"], [view_on(DeviceId("cuda", 0)), view_on(DeviceId("cpu", 0))])
    assert common_device(["q", "k"], views[:2]) == DeviceId("cuda", 0)


def test_all_violations_of_all_tensors_come_at_once():
    bad = np.zeros((2, 3), ">f4")[::-1]
    with pytest.raises(InvalidTypeError) as caught:
        require_valid(adapter_of(bad), ["x", "w", "b"], [bad, None, np.zeros(3, complex)])
    assert [problem.split()[0] for problem in caught.value.problems] == ["x", "x", "b"]
    assert isinstance(caught.value, CkiError)


@pytest.mark.parametrize(
    ("shape", "strides", "expected"),
    [
        ((3, 4), (4, 1), (4, 1)),
        ((3, 1), (4, 99), (4, 1)),
        ((1, 4), (-7, 2), (8, 2)),
        ((1, 1, 1), (9, 9, 9), (1, 1, 1)),
        ((2, 0, 5), (3, -1, 0), (5, 5, 1)),
        ((), (), ()),
        ((3, 4), (1, 3), (1, 3)),
        ((3, 4), (0, 1), (0, 1)),
    ],
)
def test_canonical_strides(shape, strides, expected):
    assert canonical_strides(shape, strides) == expected


def test_alignment_table():
    for address in range(16, 64):
        assert ALIGNMENT[address & 15] == min(address & -address, 16)


class Stream:
    def __init__(self, **attributes):
        self.__dict__.update(attributes)


class StreamProtocol:
    def __cuda_stream__(self):
        return (0, 55)


class Handle:
    value = None  # what numba gives for the default stream


@pytest.mark.parametrize(
    ("stream", "handle"),
    [
        (0, 0),
        (94, 94),
        (StreamProtocol(), 55),
        (Stream(cuda_stream=7), 7),
        (Stream(ptr=8), 8),
        (Stream(handle=9), 9),
        (Stream(handle=Handle()), 0),
    ],
)
def test_stream_handles(stream, handle):
    assert stream_handle(stream) == handle


@pytest.mark.parametrize("stream", [-1, 2**64])
def test_a_handle_that_is_no_address(stream):
    """The driver would read there."""
    with pytest.raises(
        InvalidArgumentError, match=f"stream is {stream}, which is no address\n  hint: a handle, 0 for"
    ):
        stream_handle(stream)


@pytest.mark.parametrize("stream", ["main", 1.5, True, object()])
def test_what_is_no_stream_is_named(stream):
    with pytest.raises(
        InvalidTypeError, match=f"stream is of type {type(stream).__name__}, which is no CUDA stream"
    ):
        stream_handle(stream)


def test_adapters_import_only_the_framework_of_the_tensor():
    """Interop case import_is_inert, the adapters' half: no framework comes with cki or with another one's tensors."""
    program = (
        "import sys, numpy as np\n"
        "import cki.adapter, cki.dlpack\n"
        "frameworks = {'torch', 'tensorflow', 'jax', 'cupy', 'keras', 'numba'}\n"
        "assert not frameworks & set(sys.modules), frameworks & set(sys.modules)\n"
        "cki.adapter.adapter_of(np.zeros(3)).view(np.zeros(3))\n"
        "assert not frameworks & set(sys.modules), frameworks & set(sys.modules)\n"
        "class Foreign:\n"
        "    def __dlpack__(self, **kwargs): return np.zeros(3).__dlpack__(**kwargs)\n"
        "    def __dlpack_device__(self): return (1, 0)\n"
        "cki.adapter.adapter_of(Foreign()).begin(['x'], [Foreign()])\n"
        "assert not frameworks & set(sys.modules), frameworks & set(sys.modules)\n"
    )
    done = run_program(program)
    assert (done.returncode, done.stderr) == (0, "")
