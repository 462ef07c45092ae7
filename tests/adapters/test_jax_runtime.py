"""XLA's side of the calls on the simulated device: threads, devices, memory, errors, other processes.

What needs a process of its own (number of CPU devices, exit, a compilation cache) is run in one.
"""

from __future__ import annotations

import gc
import os
import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

jax = pytest.importorskip("jax")

import jax.numpy as jnp  # noqa: E402

import cki  # noqa: E402
import cki.adapters.jax as cki_jax  # noqa: E402
from cki.adapters import xla_calls  # noqa: E402
from cki.adapters.xla_calls import XlaCall  # noqa: E402
from cki.adapters.xla_ffi import Invocation  # noqa: E402
from cki.errors import CkiError, InvalidArgumentError, InvalidTypeError, LaunchError  # noqa: E402
from tests.adapters.programs import run_program  # noqa: E402
from tests.threads import in_threads  # noqa: E402

pytestmark = pytest.mark.jax


@pytest.fixture(autouse=True)
def simulated():
    with cki.device("sim"), jax.default_device(jax.local_devices(backend="cpu")[0]):
        yield


def normal(*shape: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng([seed, *shape]).standard_normal(shape).astype(np.float32)


def run_python(script: str, **environment: str) -> str:
    """Standard output of a script in a process of its own, on the simulated device."""
    begin = "import jax, jax.numpy as jnp, numpy as np, cki, cki.adapters.jax as cki_jax\n"
    variables = {"CKI_DEVICE": "sim", "JAX_PLATFORMS": "cpu", **environment}
    done = run_program(begin + script, timeout=120, **variables)
    assert done.returncode == 0, done.stderr
    assert "Exception" not in done.stderr
    return done.stdout


def test_the_interpreter_ends_while_results_are_outstanding():
    """XLA's client, destroyed with Python's lock held, waits for its threads; those wait for the lock to call us."""
    for keep in ("y = f(q)", "f(q)"):
        run_python(
            "q = jax.random.normal(jax.random.key(0), (1, 64, 2, 32))\n"
            f"f = jax.jit(lambda q: cki.attention(q, q, q, causal=True) * 2)\nfor _ in range(4):\n    {keep}\n"
        )


# ---------------------------------------------------------------- many calls, many threads


def test_eight_threads_one_function():
    x, w = jnp.asarray(normal(4, 96)), jnp.asarray(normal(96))
    compiled = jax.jit(lambda x, w: cki.layer_norm(x, w) + 1)
    wanted = np.asarray(compiled(x, w))
    wrong: list[object] = []

    def work() -> None:
        with cki.device("sim"):  # JAX traces again where its own settings differ, as default_device does here
            wrong.extend(1 for _ in range(30) if not np.array_equal(compiled(x, w), wanted))

    assert in_threads(work, 8) == []
    assert wrong == []


def test_threads_that_compile_at_the_same_time():
    results: dict[int, Any] = {}
    barrier = threading.Barrier(6)

    def work(width: int) -> None:
        with cki.device("sim"):
            barrier.wait()
            results[width] = jax.jit(lambda x: cki.softmax(x))(jnp.ones((2, width), jnp.float32))

    threads = [threading.Thread(target=work, args=(width,)) for width in (30, 31, 32, 30, 31, 32)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for width in (30, 31, 32):
        np.testing.assert_allclose(results[width], np.full((2, width), 1 / width), rtol=1e-6)


def test_a_thousand_calls_keep_nothing():
    x = jnp.asarray(normal(4, 96))
    compiled = jax.jit(lambda x: cki.rms_norm(x))

    def calls(number: int) -> None:
        for _ in range(number):
            y = compiled(x)
        y.block_until_ready()

    calls(50)
    gc.collect()
    prepared, objects, arrays = len(xla_calls._prepared), len(gc.get_objects()), len(jax.live_arrays())
    grown = []
    for _ in range(3):  # what calls keep grows each time; what else the process does, once
        resident = _resident_bytes()
        calls(1000)
        gc.collect()
        grown.append(_resident_bytes() - resident)
    assert len(xla_calls._prepared) == prepared and len(jax.live_arrays()) == arrays
    assert len(gc.get_objects()) - objects < 100
    assert min(grown) < 1 << 20


def _resident_bytes() -> int:
    fields = Path("/proc/self/statm").read_text().split()
    return int(fields[1]) * os.sysconf("SC_PAGE_SIZE")


def test_prepared_calls_are_bounded_and_made_again(monkeypatch):
    monkeypatch.setattr(xla_calls, "_prepared", {})
    monkeypatch.setattr(xla_calls, "_LIMIT", 4)
    functions = [jax.jit(lambda x: cki.softmax(x)) for _ in range(7)]
    arrays = [jnp.asarray(normal(2, 8 + n)) for n in range(7)]
    first = [np.asarray(function(array)) for function, array in zip(functions, arrays)]
    assert len(xla_calls._prepared) <= 4
    for function, array, wanted in zip(functions, arrays, first):
        np.testing.assert_array_equal(function(array), wanted)


# ---------------------------------------------------------------- errors while a program runs


def test_an_error_of_a_launch_is_xla_s_error_with_our_text(monkeypatch):
    compiled = jax.jit(lambda x: cki.softmax(x) + 1)
    x = jnp.asarray(normal(3, 40))
    wanted = np.asarray(compiled(x))

    def launch(self: Any, invocation: Any) -> None:
        raise LaunchError("the driver said no: launch softmax")

    with monkeypatch.context() as patched:
        patched.setattr(xla_calls.Prepared, "launch", launch)
        with pytest.raises(Exception, match="INTERNAL.*the driver said no: launch softmax"):
            compiled(x).block_until_ready()
    np.testing.assert_array_equal(compiled(x), wanted)


def test_a_call_of_another_version_is_refused():
    with pytest.raises(CkiError, match="no operation 'gone': clear the compilation cache"):
        xla_calls.run(Invocation(b'["gone", [], [], "sim:sm_90a", 0]', [], [], 0, 0))
    with pytest.raises(CkiError, match="no call of CKI: b'nonsense'"):
        xla_calls.run(Invocation(b"nonsense", [], [], 0, 0))
    call = XlaCall("softmax", (("x", "f32", (2, 8)),), (1.0,), "sim:sm_90a")
    with pytest.raises(CkiError, match="no call of CKI: .* 0 attributes, not 1"):
        xla_calls.run(Invocation(replace(call, attributes=()).text().encode(), [4096], [8192], 0, 0))
    with pytest.raises(CkiError, match="no call of CKI: .* 2 tensors, 1 addresses"):
        xla_calls.run(
            Invocation(replace(call, tensors=call.tensors * 2).text().encode(), [4096], [8192], 0, 0)
        )


def test_less_workspace_than_is_needed_is_refused():
    """A program from a cache on disk, whose workspace another version of CKI or another device has chosen."""
    x, w = ("x", "f32", (2, 7, 32)), [(name, "f32", (32, 32)) for name in ("wq", "wk", "wv", "wo")]
    attributes = (2, 16, None, False, True, True, 1e-5, None, "in_out", None)
    call = XlaCall("fused_attention", (x, *w), attributes, "sim:sm_90a").checked()
    needed = xla_calls.prepare_call(call, [0]).workspace
    assert needed > 0
    with pytest.raises(CkiError, match=f"needs {needed} bytes of workspace here, the XLA program has 0"):
        xla_calls.run(Invocation(call.text().encode(), [4096] * 5, [8192], 0, 0))


def test_written_memory_must_be_the_caches_own():
    arrays = (("k", (1, 2, 16)), ("v", (1, 2, 16)), ("k_cache", (2, 4, 2, 16)), ("v_cache", (2, 4, 2, 16)))
    tensors = (*((name, "f32", shape) for name, shape in arrays), ("slot_mapping", "i32", (1,)))
    call = XlaCall("append_kv", tensors, (None, None, False, 1e-6, 0.0), "sim:sm_90a").checked()
    text = call.text().encode()
    with pytest.raises(CkiError, match="in other memory than the tensor"):
        xla_calls.run(Invocation(text, [4096, 8192, 12288, 16384, 20480], [24576, 28672], 0, 0))


@pytest.mark.parametrize("shift", [0, 1, 2])
def test_memory_that_is_aligned_worse_than_xla_promises(shift):
    """In elements: the launch is planned for what the addresses are."""
    x, out = np.zeros(4 * 96 + 16, np.float32), np.zeros(4 * 96 + 16, np.float32)
    offsets = [(-array.ctypes.data % 64) // 4 + shift for array in (x, out)]
    source, target = (array[offset:][: 4 * 96].reshape(4, 96) for array, offset in zip((x, out), offsets))
    source[:] = normal(4, 96)
    text = XlaCall("softmax", (("x", "f32", (4, 96)),), (1.0,), "sim:sm_90a").text().encode()
    xla_calls.run(Invocation(text, [source.ctypes.data], [target.ctypes.data], 0, 0))
    np.testing.assert_allclose(target, np.asarray(jax.nn.softmax(source)), rtol=1e-5)
    assert not out[: offsets[1]].any() and not out[offsets[1] + 4 * 96 :].any()


# ---------------------------------------------------------------- processes of their own

TWO_DEVICES = """
from jax.sharding import AxisType, NamedSharding, PartitionSpec as P
assert len(jax.devices()) == 2
x = jnp.asarray(np.random.default_rng(0).standard_normal((8, 96)), jnp.float32)
w = jnp.linspace(1, 2, 96)
wanted = np.asarray(jax.jit(cki.layer_norm)(x, w))
for kind in (AxisType.Auto, AxisType.Explicit):
    mesh = jax.make_mesh((2,), ("rows",), axis_types=(kind,))
    spread = jax.device_put(x, NamedSharding(mesh, P("rows")))
    everywhere = jax.device_put(w, NamedSharding(mesh, P()))
    for check in (True, False):
        shards = jax.shard_map(lambda x, w: cki.layer_norm(x, w), mesh=mesh, in_specs=(P("rows"), P()),
                               out_specs=P("rows"), check_vma=check)
        y = jax.jit(shards)(spread, everywhere)
        assert len(y.addressable_shards) == 2 and y.addressable_shards[0].data.shape == (4, 96)
        np.testing.assert_array_equal(y, wanted)
    with jax.set_mesh(mesh):
        np.testing.assert_array_equal(jax.jit(lambda x, w: cki.layer_norm(x, w))(spread, everywhere), wanted)
# Caches whose heads lie on both devices, donated to a step of decoding.
k, slots = jnp.asarray(x.reshape(6, 4, 32)[:3]), jnp.array([0, 1, 6])
table, lengths, heads = jnp.array([[0, 1]] * 3), jnp.array([1, 2, 2]), P(None, None, "rows")
def step(k, k_cache, v_cache):
    cache = cki.append_kv(k, 2 * k, (k_cache, v_cache), slots)
    return cki.paged_attention(k[:, None], cache, table, lengths)[:, 0], *cache
empty = [np.zeros((2, 4, 4, 32), np.float32)] * 2
wanted_step = jax.jit(step)(k, *empty)
specs = (P(None, "rows"), heads, heads)
arrays = [jax.device_put(a, NamedSharding(mesh, spec)) for a, spec in zip((k, *empty), specs)]
step = jax.jit(jax.shard_map(step, mesh=mesh, in_specs=specs, out_specs=specs), donate_argnums=(1, 2))
for found, one in zip(step(*arrays), wanted_step):
    np.testing.assert_array_equal(found, one)
assert [array.is_deleted() for array in arrays] == [False, True, True]
there = jax.device_put(x, jax.devices()[1])
try:
    cki.layer_norm(there, jax.device_put(w, jax.devices()[0]))
except cki.CkiError as error:
    assert "x is on cpu:1, weight is on cpu:0" in str(error), error
else:
    raise AssertionError("devices were mixed")
np.testing.assert_array_equal(cki.layer_norm(there, w), wanted)  # w was put nowhere
y = jax.jit(lambda x: cki.layer_norm(x, w))(there)
assert y.devices() == {jax.devices()[1]}
np.testing.assert_array_equal(y, wanted)
try:
    cki_jax.layer_norm(there, jax.device_put(w, jax.devices()[0]))
except cki.CkiError as error:
    assert "x is on cpu:1, weight is on cpu:0" in str(error)
    print("right")
"""


def test_two_devices_and_shard_map():
    flags = f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count=2"
    assert run_python(TWO_DEVICES, XLA_FLAGS=flags) == "right\n"


CACHED = """
from cki.adapters import xla_calls
jax.config.update("jax_persistent_cache_min_compile_time_secs", 0)
jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)
jax.config.update("jax_compilation_cache_dir", {directory!r})
x = jnp.asarray(np.random.default_rng(0).standard_normal((4, 64)), jnp.float32)
heads = x.reshape(1, 4, 2, 32)
print(float(jax.jit(lambda q: cki.attention(q, q, q, causal=True).sum())(heads)))
"""


def test_programs_from_a_compilation_cache_on_disk(tmp_path):
    """A second process runs the first one's program: the text in it says all that a launch needs."""
    script = CACHED.format(directory=str(tmp_path))
    first = run_python(script)
    assert any("jit__lambda" in path.name for path in tmp_path.iterdir())
    before = {path: path.stat().st_mtime_ns for path in tmp_path.glob("*-cache")}
    assert run_python(script) == first
    assert {path: path.stat().st_mtime_ns for path in tmp_path.glob("*-cache")} == before


def test_an_exported_program_runs_in_a_process_that_never_traced_it(tmp_path):
    pytest.importorskip("flatbuffers")  # JAX serialises with it
    from jax import export

    checks = [export.DisabledSafetyCheck.custom_call("cki")]
    shape = jax.ShapeDtypeStruct((4, 96), jnp.float32)
    exported = export.export(jax.jit(lambda x: cki.rms_norm(x)), platforms=["cpu"], disabled_checks=checks)(
        shape
    )
    (tmp_path / "program").write_bytes(exported.serialize())
    x = normal(4, 96)
    np.save(tmp_path / "x.npy", x)
    script = f"""
from jax import export
cki_jax.register()
program = export.deserialize(bytearray(open({str(tmp_path / "program")!r}, "rb").read()))
np.save({str(tmp_path / "y.npy")!r}, program.call(jnp.asarray(np.load({str(tmp_path / "x.npy")!r}))))
"""
    run_python(script)
    np.testing.assert_array_equal(np.load(tmp_path / "y.npy"), cki.rms_norm(x))


def test_exit_while_calls_are_under_way():
    script = """
x = jnp.ones((64, 512))
compiled = jax.jit(lambda x: cki.softmax(x))
compiled(x)
for _ in range(20):
    x = compiled(x)
print("done")
"""
    assert run_python(script) == "done\n"


# ---------------------------------------------------------------- outside jit


@pytest.fixture
def through_xla(monkeypatch):
    """Calls outside jit take the way that they take on a GPU; the calls in XLA's programs are counted."""
    from cki.adapters import jax_ffi

    monkeypatch.setattr(cki_jax, "_THROUGH_XLA", ("cpu",))
    made: list[str] = []
    bind = jax_ffi.bind
    monkeypatch.setattr(jax_ffi, "bind", lambda spec, *rest: made.append(spec.name) or bind(spec, *rest))
    return made


def test_calls_outside_jit_go_through_xla(through_xla):
    x = jnp.asarray(normal(4, 96))
    found = cki.softmax(x)
    assert through_xla == ["softmax"] and found.devices() == x.devices()
    np.testing.assert_array_equal(found, cki.softmax(np.asarray(x)))
    codes, scale = cki.quantize_fp8(x)
    assert (codes.shape, scale.shape) == ((4, 96), (4, 1))


def test_arrays_are_never_written_outside_jit_either():
    heads, cache = jnp.ones((1, 2, 16)), (jnp.zeros((2, 4, 2, 16)), jnp.zeros((2, 4, 2, 16)))
    new_k, new_v = cki.append_kv(heads, heads, cache, jnp.array([5]))
    for old, new in zip(cache, (new_k, new_v)):
        assert not np.asarray(old).any()
        assert (np.asarray(new)[1, 1] == 1).all() and np.count_nonzero(new) == 32


def test_what_does_not_go_through_xla(through_xla):
    """A layer of a cache, in place; a stream of the caller's; and what is refused is refused in the same words."""
    from cki.memory import PagedKVCache

    x = jnp.asarray(normal(4, 96))
    cki.softmax(x, stream=0)
    layer = PagedKVCache(1, 4, block_size=4, num_kv_heads=2, head_dim=16, dtype="f32").layer(0)
    heads = jnp.ones((1, 2, 16))
    assert cki.append_kv(heads, heads, layer, jnp.array([5])) is None
    assert (layer.k.numpy()[1, 1] == 1).all()
    with pytest.raises(InvalidTypeError, match="x is of dtype complex64"):
        cki.softmax(x.astype(jnp.complex64))
    with pytest.raises(InvalidTypeError, match="out is a JAX array, which is immutable"):
        cki.softmax(x, out=x)
    with pytest.raises(InvalidArgumentError, match=r"weight has shape \(7,\)"):
        cki.rms_norm(x, x[0, :7])
    assert through_xla == ["rms_norm"]
