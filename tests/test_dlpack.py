"""DLPack in and out, on hand-made and real capsules: addresses, odd shapes, flags, lifetime, refusals."""

from __future__ import annotations

import ctypes
import gc
import subprocess
import sys
import weakref

import ml_dtypes
import numpy as np
import pytest

from cki import dlpack, dtypes
from cki.dlpack import DLPackExport, from_capsule, from_cuda_array_interface, from_dlpack, interface_stream
from cki.errors import InvalidTypeError
from cki.tensor import DeviceId, TensorView

_PRODUCERS = []  # a producer's memory and callbacks must outlive its capsules


# What a producer's destructor asks about a capsule that has no references left: by address.
_python = ctypes.PyDLL(None)
_dying_is_valid = ctypes.PYFUNCTYPE(ctypes.c_int, ctypes.c_void_p, ctypes.c_char_p)(
    ("PyCapsule_IsValid", _python)
)


@pytest.fixture
def new_exports():
    """The exports that a consumer holds since the test began: other tests of the process may hold some."""
    dlpack.collect_unconsumed()
    before = dict(dlpack._live)
    return lambda: {address: kept for address, kept in dlpack._live.items() if address not in before}


class Producer:
    """A capsule built field by field, as a foreign library would, that counts its deleter's calls."""

    def __init__(
        self, pointer, shape, strides=None, dtype=(2, 32, 1), device=(1, 0), byte_offset=0, flags=None, major=1
    ):  # fmt: skip
        rank = len(shape)
        self._shape = (ctypes.c_int64 * rank)(*shape)
        self._strides = None if strides is None else (ctypes.c_int64 * rank)(*strides)
        self.deleted = 0

        def deleter(address):
            self.deleted += 1

        def destructor(capsule):
            for name in (b"dltensor", b"dltensor_versioned"):
                if _dying_is_valid(capsule, name):
                    deleter(None)

        self._callbacks = (
            ctypes.CFUNCTYPE(None, ctypes.c_void_p)(deleter),
            ctypes.CFUNCTYPE(None, ctypes.c_void_p)(destructor),
        )
        tensor = dlpack._Tensor(
            pointer,
            dlpack._Device(*device),
            rank,
            dlpack._DataType(*dtype),
            self._shape,
            self._strides,
            byte_offset,
        )
        code = ctypes.cast(self._callbacks[0], ctypes.c_void_p)
        self.versioned = flags is not None
        if self.versioned:
            self._managed = dlpack._ManagedVersioned(major, 0, None, code, flags, tensor)
        else:
            self._managed = dlpack._Managed(tensor, None, code)

    def capsule(self):
        _PRODUCERS.append(self)
        name = b"dltensor_versioned" if self.versioned else b"dltensor"
        destructor = ctypes.cast(self._callbacks[1], ctypes.c_void_p)
        return dlpack._new_capsule(ctypes.addressof(self._managed), name, destructor)


def address(array):
    return array.__array_interface__["data"][0]


def read(view):
    """The elements behind a view of CPU memory."""
    nbytes = (1 + sum((e - 1) * s for e, s in zip(view.shape, view.strides))) * view.dtype.itemsize
    flat = np.frombuffer((ctypes.c_char * nbytes).from_address(view.ptr), view.dtype.numpy)
    return np.lib.stride_tricks.as_strided(
        flat, view.shape, [s * view.dtype.itemsize for s in view.strides], writeable=False
    )


# ---------------------------------------------------------------- reading


@pytest.mark.parametrize("flags", [None, 0], ids=["old", "versioned"])
def test_byte_offset_moves_the_first_element(flags):
    """Interop case dlpack_byte_offset: the first element is at data + byte_offset."""
    base = np.arange(24, dtype=np.float32)
    producer = Producer(address(base), (4, 4), (4, 1), byte_offset=8 * 4, flags=flags)
    view = from_capsule(producer.capsule())
    assert view.ptr == address(base) + 32
    np.testing.assert_array_equal(read(view), base[8:24].reshape(4, 4))


def test_null_strides_mean_row_major():
    base = np.arange(24, dtype=np.float32)
    view = from_capsule(Producer(address(base), (2, 3, 4)).capsule())
    assert view.strides == (12, 4, 1)
    np.testing.assert_array_equal(read(view), base.reshape(2, 3, 4))


@pytest.mark.parametrize("strides", [None, (0, 0, 0), (7, -3, 999)])
@pytest.mark.parametrize("pointer", [None, 4096])
def test_empty_tensor_may_have_any_pointer_and_strides(strides, pointer):
    """Interop case dlpack_empty_tensor, its reading half: shape (0, 4, 8) with a null pointer."""
    view = from_capsule(Producer(pointer, (0, 4, 8), strides).capsule())
    assert (view.ptr, view.shape, view.strides, view.size) == (0, (0, 4, 8), (32, 8, 1), 0)


def test_strides_of_axes_of_extent_one_are_made_plain():
    base = np.arange(6, dtype=np.float32)
    view = from_capsule(Producer(address(base), (1, 3, 1, 2, 1), (-5, 2, 77, 1, 0)).capsule())
    assert view.strides == (6, 2, 2, 1, 1)
    assert view.is_contiguous()


def test_scalar_has_no_strides():
    base = np.array(3.5, np.float32)
    view = from_capsule(Producer(address(base), ()).capsule())
    assert (view.shape, view.strides) == ((), ())
    assert read(view) == 3.5


@pytest.mark.parametrize("dtype", dtypes.ALL, ids=repr)
def test_every_element_type_is_read_by_its_code(dtype):
    base = np.zeros(4, dtype.numpy)
    view = from_capsule(Producer(address(base), (4,), dtype=(*dtype.dlpack, 1)).capsule())
    assert view.dtype is dtype


@pytest.mark.parametrize(
    ("dtype", "said"),
    [
        ((5, 64, 1), "code 5, 64 bits"),
        ((2, 32, 4), "4 lanes"),
        ((11, 8, 1), "code 11, 8 bits"),
        ((17, 4, 1), "4 bits"),
    ],
    ids=["complex64", "float32x4", "e4m3fnuz", "fp4"],
)
def test_unknown_element_types_are_refused(dtype, said):
    with pytest.raises(InvalidTypeError, match=said) as caught:
        from_capsule(Producer(4096, (4,), dtype=dtype).capsule())
    assert "bf16" in str(caught.value)  # says what would pass


@pytest.mark.parametrize(
    ("device", "expected"),
    [
        ((1, 0), DeviceId("cpu", 0)),
        ((2, 3), DeviceId("cuda", 3)),
        ((3, 1), DeviceId("cpu", 0)),
        ((13, 1), DeviceId("cuda", 1)),
    ],
    ids=["cpu", "cuda", "cuda_host", "cuda_managed"],
)
def test_device_kinds(device, expected):
    assert from_capsule(Producer(4096, (4,), device=device).capsule()).device == expected


def test_other_devices_are_refused_by_number():
    with pytest.raises(InvalidTypeError, match=r"device type 10 is neither a CUDA device nor the CPU"):
        from_capsule(Producer(4096, (4,), device=(10, 0)).capsule())


@pytest.mark.parametrize(("flags", "readonly"), [(0, False), (1, True), (2, False), (3, True)])
def test_read_only_flag(flags, readonly):
    assert from_capsule(Producer(4096, (4,), flags=flags).capsule()).readonly is readonly


def test_newer_major_version_is_refused():
    with pytest.raises(InvalidTypeError, match=r"version 2\.0; CKI reads versions 0 and 1"):
        from_capsule(Producer(4096, (4,), flags=0, major=2).capsule())


@pytest.mark.parametrize("flags", [None, 0], ids=["old", "versioned"])
def test_deleter_runs_once_when_the_view_goes(flags):
    base = np.zeros(4, np.float32)
    producer = Producer(address(base), (4,), flags=flags)
    view = from_capsule(producer.capsule())
    second = view  # a second reference keeps the memory
    del view
    gc.collect()
    assert producer.deleted == 0
    del second
    gc.collect()
    assert producer.deleted == 1


def test_consumed_capsule_is_refused():
    capsule = np.zeros(3, np.float32).__dlpack__()

    class Once:
        def __dlpack__(self, **kwargs):
            return capsule

        def __dlpack_device__(self):
            return (1, 0)

    np.from_dlpack(Once())
    with pytest.raises(InvalidTypeError, match="another consumer has taken it"):
        from_capsule(capsule)
    with pytest.raises(InvalidTypeError, match="no DLPack capsule"):
        from_capsule(object())


# ---------------------------------------------------------------- producers of every age


class Exporting:
    """Records the keyword arguments that it was called with and knows only some of them."""

    def __init__(self, known, array=None):
        self.known = known
        self.calls = []
        self.array = np.arange(4, dtype=np.float32) if array is None else array

    def __dlpack__(self, **kwargs):
        self.calls.append(kwargs)
        if set(kwargs) - set(self.known):
            raise TypeError(f"unexpected keyword {sorted(set(kwargs) - set(self.known))}")
        return Producer(address(self.array), self.array.shape).capsule()


@pytest.mark.parametrize(
    ("known", "calls"),
    [
        (("stream", "max_version"), [{"stream": 7, "max_version": (1, 1)}]),
        (("stream",), [{"stream": 7, "max_version": (1, 1)}, {"stream": 7}]),
        ((), [{"stream": 7, "max_version": (1, 1)}, {"stream": 7}, {}]),
    ],
)
def test_producers_without_max_version_or_stream(known, calls):
    producer = Exporting(known)
    assert from_dlpack(producer, 7).ptr == address(producer.array)
    assert producer.calls == calls


@pytest.mark.parametrize(("stream", "passed"), [(0, 1), (1, 1), (2, 2), (-1, -1), (94, 94)])
def test_stream_zero_is_never_passed_on(stream, passed):
    """Interop case dlpack_stream_values: 0 is invalid on CUDA, the legacy stream is 1, -1 asks for no wait."""
    producer = Exporting(("stream", "max_version"))
    from_dlpack(producer, stream)
    assert producer.calls[0]["stream"] == passed


def test_no_stream_argument_for_cpu_memory():
    producer = Exporting(("max_version",))
    from_dlpack(producer)
    assert producer.calls == [{"max_version": (1, 1)}]


def test_a_producer_that_refuses_is_named_with_its_own_words():
    class Stubborn:
        def __dlpack__(self, **kwargs):
            raise BufferError("not today")

    with pytest.raises(InvalidTypeError, match=r"Stubborn does not export its memory: not today"):
        from_dlpack(Stubborn())


def test_numpy_arrays_are_read_in_place_with_their_flags():
    array = np.arange(12, dtype=np.float32).reshape(3, 4)[:, 1:3]
    view = from_dlpack(array)
    assert (view.ptr, view.strides, view.readonly) == (address(array), (4, 1), False)
    array.flags.writeable = False
    assert from_dlpack(array).readonly is True


# ---------------------------------------------------------------- export


def view_of(array, **changes):
    from cki.adapters.numpy import NumpyAdapter

    view = NumpyAdapter().view(array)
    for name, value in changes.items():
        setattr(view, name, value)
    return view


def test_export_to_numpy_shares_memory_and_keeps_the_owner():
    owner = np.arange(12, dtype=np.float32).reshape(3, 4)
    alive = weakref.ref(owner)
    pointer = address(owner)
    imported = np.from_dlpack(DLPackExport(view_of(owner)))
    del owner
    gc.collect()
    assert alive() is not None
    assert address(imported) == pointer
    np.testing.assert_array_equal(imported, np.arange(12, dtype=np.float32).reshape(3, 4))
    del imported
    gc.collect()
    assert alive() is None


def test_export_that_nobody_takes_releases_the_owner(new_exports):
    owner = np.zeros(5, np.float32)
    alive = weakref.ref(owner)
    for max_version in (None, (1, 0)):
        DLPackExport(view_of(owner)).__dlpack__(max_version=max_version)
    del owner
    gc.collect()
    dlpack.collect_unconsumed()  # as the next export does
    assert alive() is None
    assert not new_exports()


def test_export_keeps_strides_offset_and_scalars():
    array = np.arange(24, dtype=np.int32).reshape(4, 6)[1:, ::2]
    imported = np.from_dlpack(DLPackExport(view_of(array)))
    assert (address(imported), imported.strides) == (address(array), array.strides)
    np.testing.assert_array_equal(imported, array)
    assert np.from_dlpack(DLPackExport(view_of(np.array(7, np.int64)))) == 7
    assert np.from_dlpack(DLPackExport(view_of(np.zeros((0, 4), np.float32)))).shape == (0, 4)


@pytest.mark.parametrize("dtype", dtypes.ALL, ids=repr)
def test_every_element_type_survives_the_round_trip(dtype):
    array = np.zeros((2, 3), dtype.numpy)
    for max_version in (None, (1, 0), (1, 3)):
        view = from_capsule(DLPackExport(view_of(array)).__dlpack__(max_version=max_version))
        assert (view.ptr, view.shape, view.strides, view.dtype) == (address(array), (2, 3), (3, 1), dtype)


def test_export_of_read_only_memory():
    view = view_of(np.zeros(3, np.float32), readonly=True)
    assert from_capsule(DLPackExport(view).__dlpack__(max_version=(1, 0))).readonly is True
    assert np.from_dlpack(DLPackExport(view)).flags.writeable is False
    with pytest.raises(BufferError, match=r"read-only memory needs a consumer of DLPack 1\.0"):
        DLPackExport(view).__dlpack__()


def cuda_view():
    return TensorView(1 << 20, (4,), (1,), dtypes.f16, DeviceId("cuda", 1))


@pytest.mark.parametrize(("stream", "told"), [(None, [1]), (1, [1]), (2, [2]), (77, [77]), (-1, [])])
def test_export_makes_the_consumers_stream_wait(stream, told):
    streams = []
    export = DLPackExport(cuda_view(), ready=streams.append)
    assert export.__dlpack_device__() == (2, 1)
    view = from_capsule(export.__dlpack__(stream=stream, max_version=(1, 0)))
    assert streams == told
    assert view.device == DeviceId("cuda", 1)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ({"stream": 0}, "stream 0 is ambiguous: pass 1"),
        ({"copy": True}, "without a copy; copy the imported tensor"),
        ({"dl_device": (1, 0)}, r"on device \(2, 1\), not on \(1, 0\)"),
    ],
)
def test_export_refuses_what_it_cannot_do(arguments, said, new_exports):
    with pytest.raises(BufferError, match=said):
        DLPackExport(cuda_view()).__dlpack__(**arguments)
    dlpack.collect_unconsumed()  # capsules of earlier tests
    assert not new_exports()


def test_exit_with_exported_memory_still_held_is_clean():
    """Consumers may drop their tensors after the interpreter is gone: no Python callback may run then."""
    program = (
        "import ctypes, numpy as np\n"
        "from cki.dlpack import DLPackExport, from_dlpack\n"
        "held = np.from_dlpack(DLPackExport(from_dlpack(np.ones(1000, 'f4'))))\n"
        "ctypes.pythonapi.Py_IncRef(ctypes.py_object(held))\n"  # never freed by Python
        "unconsumed = DLPackExport(from_dlpack(np.ones(5))).__dlpack__()\n"
        "np.unconsumed = unconsumed\n"  # dies late, when modules are being cleared
        "print(held.sum())\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout, done.stderr) == (0, "1000.0\n", "")


def test_deleters_do_nothing_once_the_interpreter_leaves(new_exports):
    capsule = DLPackExport(view_of(np.zeros(3, np.float32))).__dlpack__()
    managed = next(iter(new_exports().values()))[0]
    before = managed.deleter
    dlpack._detach_deleters()
    assert managed.deleter not in (None, 0, before)
    ctypes.CFUNCTYPE(None, ctypes.c_void_p)(managed.deleter)(ctypes.addressof(managed))  # harmless
    managed.deleter = before
    del capsule
    dlpack.collect_unconsumed()
    assert not new_exports()


# ---------------------------------------------------------------- __cuda_array_interface__


def interface(**changes):
    described = {"shape": (2, 3), "typestr": "<f4", "data": (4096, False), "version": 3}
    return {**described, **changes}


@pytest.mark.parametrize("version", [2, 3])
def test_interface_without_strides_is_row_major(version):
    view = from_cuda_array_interface(interface(version=version, strides=None), lambda pointer: 1)
    assert (view.ptr, view.shape, view.strides) == (4096, (2, 3), (3, 1))
    assert (view.dtype, view.device, view.readonly) == (dtypes.f32, DeviceId("cuda", 1), False)


def test_interface_strides_are_bytes_and_data_may_be_read_only():
    view = from_cuda_array_interface(interface(strides=(40, 8), data=(4096, True)), lambda pointer: 0)
    assert (view.strides, view.readonly) == ((10, 2), True)


def test_interface_of_an_empty_array():
    asked = []
    view = from_cuda_array_interface(interface(shape=(0, 3), data=(0, False)), lambda p: asked.append(p) or 2)
    assert (view.ptr, view.strides, view.device) == (0, (3, 1), DeviceId("cuda", 2))
    assert asked == [0]


@pytest.mark.parametrize(
    ("typestr", "dtype"),
    [("<f2", dtypes.f16), ("|b1", dtypes.bool_), ("|u1", dtypes.u8), ("<i8", dtypes.i64), ("|i1", dtypes.i8)],
)
def test_interface_element_types(typestr, dtype):
    assert from_cuda_array_interface(interface(typestr=typestr), lambda pointer: 0).dtype is dtype


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"mask": object()}, "it has a mask"),
        ({"typestr": ">f4"}, "element type >f4 is big-endian"),
        ({"typestr": "<c8"}, "element type <c8 has no kernels; numbers are f32, f16 or bf16"),
        ({"typestr": "<V2"}, "bfloat16 and float8 need __dlpack__"),
        ({"strides": (10, 3)}, r"strides \(10, 3\) are not multiples of the 4 bytes"),
        ({"strides": (4,)}, r"strides \(4,\) are not one for each of 2 axes"),
        ({"shape": (-1, 3)}, r"shape \(-1, 3\) has a negative extent"),
        ({"data": (None, False)}, "its address is null"),
        ({"data": None}, "cannot read: TypeError.*\n  hint: a dict of shape, typestr"),
        ({"data": (4096,)}, "cannot read: ValueError"),
        ({"shape": None}, "cannot read: TypeError"),
    ],
)
def test_interface_refusals(changes, said):
    with pytest.raises(InvalidTypeError, match=said):
        from_cuda_array_interface(interface(**changes), lambda pointer: 0)


def test_interface_reports_all_that_is_wrong():
    with pytest.raises(InvalidTypeError) as caught:
        from_cuda_array_interface(interface(mask=1, strides=(10, 3)), lambda pointer: 0)
    assert len(caught.value.problems) == 2


@pytest.mark.parametrize(("given", "expected"), [({}, None), ({"stream": None}, None), ({"stream": 2}, 2)])
def test_interface_stream(given, expected):
    assert interface_stream(interface(**given)) == expected


def test_interface_stream_zero_is_refused():
    with pytest.raises(InvalidTypeError, match="stream 0, which the protocol forbids"):
        interface_stream(interface(stream=0))
    for stream in (-1, "1", True):
        with pytest.raises(InvalidTypeError, match=f"names stream {stream!r}\n  hint: 1 for"):
            interface_stream(interface(stream=stream))


def test_bf16_through_ml_dtypes_keeps_its_bits():
    array = np.array([1.5, -2.25, 3e38], ml_dtypes.bfloat16)
    view = from_capsule(DLPackExport(view_of(array)).__dlpack__())
    assert view.dtype is dtypes.bf16
    np.testing.assert_array_equal(read(view).view(np.uint16), array.view(np.uint16))


def test_a_refused_capsule_leaves_the_consumers_own_error_and_is_let_go():
    class Memory:
        pass

    owner = Memory()
    view = from_dlpack(np.ones(5, np.float32))
    view.dtype, view.owner = dtypes.bf16, owner
    with pytest.raises((BufferError, RuntimeError)):  # NumPy has no bfloat16
        np.from_dlpack(DLPackExport(view))
    alive = weakref.ref(owner)
    del view, owner
    np.from_dlpack(DLPackExport(from_dlpack(np.ones(5))))  # the next export notices the dropped capsule
    assert alive() is None
