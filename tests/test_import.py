"""`import cki`: fast, imports no framework, makes no CUDA context, and starts nothing where it must not."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

import cki

ROOT = Path(__file__).resolve().parents[1]


def python(code: str, **env: str) -> subprocess.CompletedProcess[str]:
    everything = {**os.environ, "PYTHONPATH": str(ROOT), **env}
    return subprocess.run(
        [sys.executable, "-c", code], env=everything, capture_output=True, text=True, timeout=120, check=False
    )


def test_imports_no_framework_and_no_numpy() -> None:
    heavy = ("numpy", "cupy", "torch", "tensorflow", "jax", "keras", "cuda", "ml_dtypes")
    result = python(f"import sys, cki; print([m for m in {heavy!r} if m in sys.modules])", CKI_COMPILE="lazy")
    assert result.stdout.strip() == "[]", result.stderr


def test_import_takes_under_50_ms() -> None:
    # The standard modules below are CuPy's own imports too.  Processor time, so that a busy machine counts for less.
    code = (
        "import time, dataclasses, contextvars, pathlib, typing, threading, collections\n"
        "start = time.process_time(); import cki; print(time.process_time() - start)"
    )
    assert min(float(python(code, CKI_COMPILE="lazy").stdout) for _ in range(7)) < 0.05


def test_public_names_resolve() -> None:
    for name in cki.__all__:
        assert getattr(cki, name) is not None, name
    assert set(cki.__all__) <= set(dir(cki))
    with pytest.raises(AttributeError, match="nothing_like_this"):
        cki.nothing_like_this  # noqa: B018


def test_device_stays_the_context_manager_whatever_is_imported() -> None:
    result = python(
        "import cki, cki.device, cki.plan, cki.graph\n"
        "from cki.device import DeviceInfo\n"
        "with cki.device('sim') as info: print(type(info) is DeviceInfo)"
    )
    assert result.stdout.strip() == "True", result.stderr


def test_works_without_cupy_and_cuda_bindings() -> None:
    code = (
        "import sys\n"
        "for name in ('cupy', 'cuda', 'torch', 'jax', 'tensorflow'): sys.modules[name] = None\n"
        "import cki, numpy\n"
        "x = numpy.ones((2, 64), 'f4')\n"
        "with cki.device('sim'): print(float(abs(cki.layer_norm(x)).max()))"
    )
    result = python(code)
    assert result.stdout.strip() == "0.0", result.stderr


def test_source_checkout_finds_adapters_and_sources() -> None:
    result = python("import cki.adapters.numpy, cki.cuda_src; print(cki.cuda_src.__file__)")
    assert "cuda_src" in result.stdout, result.stderr


@pytest.mark.parametrize("env", [{"CKI_COMPILE": "lazy"}, {"CKI_DEVICE": "sim"}])
def test_no_thread_when_told_so(env: dict[str, str]) -> None:
    result = python("import cki, threading; print(threading.active_count())", **env)
    assert result.stdout.strip() == "1", result.stderr


def test_default_set_is_compiled_once(tmp_path: Path) -> None:
    code = (
        "from cki import background, cache\n"
        "import cki.heuristics.default_set as d\n"
        "d.default_kernels = lambda device, all=d.default_kernels: all(device)[:3]\n"
        "print(background.compile_default_set(['sm_80']), cache.statistics().compiled)"
    )
    env = {"CKI_CACHE_DIR": str(tmp_path), "CKI_COMPILE": "lazy"}
    assert python(code, **env).stdout.split() == ["3", "3"]
    assert python(code, **env).stdout.split() == ["0", "0"]
    assert len(list(tmp_path.glob("default-sm_80-*.done"))) == 1


def test_default_set_needs_no_gpu_to_be_named() -> None:
    from cki.device import sim_device
    from cki.heuristics.default_set import default_kernels
    from cki.kernel import ARCHITECTURES

    for arch in ARCHITECTURES:
        entries = {spec.entry for spec in default_kernels(sim_device(arch))}
        assert {"layer_norm", "rms_norm"} <= entries
        assert any("attention" in entry for entry in entries)
        assert any("linear" in entry for entry in entries)


def test_long_work_says_so_once(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    from cki import background

    monkeypatch.setattr(background, "_QUIET_SECONDS", 0.0)
    progress = background.Progress("compiling 2 kernels", 2)
    progress.step()
    progress.step()
    progress.close()
    assert capsys.readouterr().err == "cki: compiling 2 kernels\n"


@pytest.mark.gpu
def test_import_makes_no_context_and_a_fork_is_fine(tmp_path: Path) -> None:
    code = (
        "import os, cki, time\n"
        "time.sleep(0.3)\n"
        "child = os.fork()\n"
        "if child == 0:\n"
        "    import cupy\n"
        "    y = cki.layer_norm(cupy.ones((2, 64), 'f4'))\n"
        "    os._exit(0 if float(abs(y).max()) == 0.0 else 1)\n"
        "print(os.waitpid(child, 0)[1])"
    )
    result = python(code, CKI_CACHE_DIR=str(tmp_path), CKI_COMPILE="background")
    assert result.stdout.strip() == "0", result.stderr


@pytest.mark.gpu
def test_background_compilation_fills_the_cache(tmp_path: Path) -> None:
    env = {"CKI_CACHE_DIR": str(tmp_path), "CKI_COMPILE": "background"}
    result = python(
        "from cki import background, cache; background.wait(); print(cache.statistics().compiled)", **env
    )
    assert int(result.stdout) > 10, result.stderr
    again = python(
        "from cki import background, cache; background.wait(); print(cache.statistics().compiled)", **env
    )
    assert int(again.stdout) == 0, again.stderr


@pytest.mark.gpu
def test_exit_during_background_compilation_is_clean(tmp_path: Path) -> None:
    start = time.monotonic()
    result = python(
        "import cki, time; time.sleep(0.5)", CKI_CACHE_DIR=str(tmp_path), CKI_COMPILE="background"
    )
    assert (result.returncode, time.monotonic() - start < 15) == (0, True), result.stderr
