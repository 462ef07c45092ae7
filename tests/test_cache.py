"""The kernel cache: where kernels come from, and everything that can go wrong with a directory.  No GPU needed."""

from __future__ import annotations

import errno
import fcntl
import logging
import os
import subprocess
import sys
import textwrap
import threading
import time
from pathlib import Path

import pytest

from cki import cache, compiler, disk
from cki.errors import CompileError
from cki.kernel import KernelSpec, kernel_spec
from tests.threads import in_threads

ARCH = "sm_90a"
ROOT = Path(__file__).resolve().parents[1]


@pytest.fixture
def fresh(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache directory and an empty memory, as in a new process."""
    directory = tmp_path / "cache"
    monkeypatch.setenv("CKI_CACHE_DIR", str(directory))
    monkeypatch.delenv("CKI_CUBIN_DIR", raising=False)
    forget()
    yield directory
    forget()


def forget() -> None:
    """Empty the memory, as in a new process."""
    cache._state = cache._State()
    cache._directories.clear()


def a_kernel(tmp_path: Path, number: int = 1) -> KernelSpec:
    path = tmp_path / "k.cu"
    path.write_text('#include "h.cuh"\nextern "C" __global__ void kernel(int* x) { x[0] = kN + kHeader; }\n')
    (tmp_path / "h.cuh").write_text("#pragma once\nconstexpr int kHeader = 1;\n")
    return kernel_spec(str(path), "kernel", "P", kN=number)


def counts() -> tuple[int, int, int]:
    found = cache.statistics()
    return found.compiled, found.from_cache_dir, found.from_cubin_dir


def run_python(code: str, **env: str) -> subprocess.CompletedProcess[str]:
    everything = {**os.environ, "PYTHONPATH": str(ROOT), "CKI_COMPILE": "lazy", **env}
    command = [sys.executable, "-c", textwrap.dedent(code)]
    return subprocess.run(command, env=everything, capture_output=True, text=True, timeout=120, check=False)


def test_memory_then_disk(fresh: Path, tmp_path: Path) -> None:
    spec = a_kernel(tmp_path)
    _, first = cache.get(spec, ARCH)
    assert counts() == (1, 0, 0)
    assert cache.get(spec, ARCH)[1] is first
    forget()
    _, again = cache.get(spec, ARCH)
    assert counts() == (0, 1, 0)
    assert again == first


def test_key_sees_header_constants_arch_and_compiler(
    fresh: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    spec = a_kernel(tmp_path)
    keys = {cache.get(spec, ARCH)[0], cache.get(spec, "sm_80")[0], cache.get(a_kernel(tmp_path, 2), ARCH)[0]}
    (tmp_path / "h.cuh").write_text("#pragma once\nconstexpr int kHeader = 2;\n")
    keys.add(cache.get(spec, ARCH)[0])
    assert len(keys) == 4
    key = next(iter(keys))
    before = cache.cache_key(key)
    monkeypatch.setattr(compiler, "fingerprint", lambda: "another NVRTC")
    assert cache.cache_key(key) != before


@pytest.mark.parametrize("damage", ["truncate", "flip", "empty", "garbage"])
def test_damaged_file_is_compiled_again_and_replaced(fresh: Path, tmp_path: Path, damage: str) -> None:
    """Interop case processes_share_the_kernel_cache: a broken entry is rebuilt, not loaded."""
    spec = a_kernel(tmp_path)
    _, good = cache.get(spec, ARCH)
    (file,) = disk.KernelDirectory(fresh).entries()
    content = bytearray(file.read_bytes())
    if damage == "flip":
        content[-20] ^= 1
    damaged = {
        "truncate": bytes(content[:-7]),
        "flip": bytes(content),
        "empty": b"",
        "garbage": b"not a kernel",
    }
    file.write_bytes(damaged[damage])
    forget()
    assert cache.get(spec, ARCH)[1].cubin == good.cubin
    assert counts() == (1, 0, 0)
    forget()
    cache.get(spec, ARCH)
    assert counts() == (0, 1, 0)


def test_directory_that_cannot_be_made(
    fresh: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog
) -> None:  # type: ignore[no-untyped-def]
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("CKI_CACHE_DIR", str(tmp_path / "file" / "cache"))
    with caplog.at_level(logging.WARNING, logger="cki"):
        cache.get(a_kernel(tmp_path, 1), ARCH)
        cache.get(a_kernel(tmp_path, 2), ARCH)
    assert counts() == (2, 0, 0)
    (warning,) = [r.getMessage() for r in caplog.records if "cannot be written" in r.getMessage()]
    assert warning == (
        f"cache directory {tmp_path / 'file' / 'cache'} cannot be written: Not a directory: "
        "kernels are kept in memory only"
    )


def test_read_only_home(fresh: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog) -> None:  # type: ignore[no-untyped-def]
    """Interop case processes_share_the_kernel_cache."""
    spec = a_kernel(tmp_path)
    cache.get(spec, ARCH)
    forget()
    real_open = os.open

    def read_only(path: object, flags: int, *more: object, **named: object) -> int:
        if str(path).startswith(str(fresh)) and flags & (os.O_WRONLY | os.O_RDWR | os.O_CREAT):
            raise OSError(errno.EROFS, os.strerror(errno.EROFS), str(path))
        return real_open(path, flags, *more, **named)  # type: ignore[arg-type]

    monkeypatch.setattr(os, "open", read_only)
    with caplog.at_level(logging.WARNING, logger="cki"):
        cache.get(spec, ARCH)
        assert counts() == (0, 1, 0)  # what is there is used
        cache.get(a_kernel(tmp_path, 2), ARCH)
        cache.get(a_kernel(tmp_path, 3), ARCH)
    assert counts() == (2, 1, 0)
    assert sum("Read-only file system" in record.getMessage() for record in caplog.records) == 1


def test_full_disk_leaves_no_partial_file(tmp_path: Path) -> None:
    """Interop case processes_share_the_kernel_cache."""
    a_kernel(tmp_path)
    # A file size limit makes the write fail half way, as a full disk does.
    result = run_python(
        f"""
        import resource
        from cki import cache
        from cki.kernel import kernel_spec
        resource.setrlimit(resource.RLIMIT_FSIZE, (1000, 1000))
        for n in (1, 2):
            compiled = cache.get(kernel_spec({str(tmp_path / "k.cu")!r}, "kernel", "P", kN=n), "sm_90a")[1]
            assert compiled.cubin[:4] == b"\\x7fELF"
        print(cache.statistics().compiled)
        """,
        CKI_CACHE_DIR=str(tmp_path / "cache"),
    )
    assert result.returncode == 0, result.stderr
    assert result.stdout.strip() == "2"
    assert result.stderr.count("cannot be written") == 1
    left = [path for path in (tmp_path / "cache").iterdir() if path.suffix != ".lock"]
    assert left == []


def test_file_system_without_locks(fresh: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def no_locks(*_: object) -> None:
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    monkeypatch.setattr(fcntl, "flock", no_locks)
    cache.get(a_kernel(tmp_path), ARCH)
    assert counts() == (1, 0, 0)
    assert len(disk.KernelDirectory(fresh).entries()) == 1


def test_lock_of_a_dead_holder_is_free(fresh: Path, tmp_path: Path) -> None:
    holder = run_python(
        f"""
        import os
        from cki.disk import KernelDirectory
        with KernelDirectory({str(fresh)!r}).lock("key"):
            os.kill(os.getpid(), 9)
        """
    )
    assert holder.returncode == -9
    start = time.monotonic()
    with disk.KernelDirectory(fresh).lock("key"):
        assert time.monotonic() - start < 1.0


def test_lock_of_a_hanging_holder_is_not_waited_for_for_ever(
    fresh: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(disk, "LOCK_PATIENCE", 0.2)
    directory = disk.KernelDirectory(fresh)
    start = time.monotonic()
    with directory.lock("key"), directory.lock("key"):  # two descriptors: the second waits for the first
        assert 0.2 <= time.monotonic() - start < 5.0


def test_lock_is_released_though_a_child_was_forked_meanwhile(fresh: Path) -> None:
    directory = disk.KernelDirectory(fresh)
    with directory.lock("key"):
        child = os.fork()
        if child == 0:
            time.sleep(5.0)
            os._exit(0)
    start = time.monotonic()
    with directory.lock("key"):
        assert time.monotonic() - start < 2.0
    os.kill(child, 9)
    os.waitpid(child, 0)


def test_many_processes_compile_once(tmp_path: Path) -> None:
    """Interop case processes_share_the_kernel_cache: eight start at once, each kernel is compiled once."""
    a_kernel(tmp_path)
    code = f"""
    from cki import cache
    from cki.kernel import kernel_spec
    for n in range(3):
        cache.get(kernel_spec({str(tmp_path / "k.cu")!r}, "kernel", "P", kN=n), "sm_90a")
    s = cache.statistics()
    print(s.compiled, s.from_cache_dir)
    """
    env = {
        **os.environ,
        "PYTHONPATH": str(ROOT),
        "CKI_COMPILE": "lazy",
        "CKI_CACHE_DIR": str(tmp_path / "cache"),
    }
    command = [sys.executable, "-c", textwrap.dedent(code)]
    processes = [subprocess.Popen(command, env=env, stdout=subprocess.PIPE, text=True) for _ in range(6)]
    found = [tuple(map(int, process.communicate(timeout=120)[0].split())) for process in processes]
    assert sum(compiled for compiled, _ in found) == 3
    assert sum(read for _, read in found) == 15


def test_many_threads_compile_once(fresh: Path, tmp_path: Path) -> None:
    spec = a_kernel(tmp_path)
    results: list[object] = []
    assert in_threads(lambda: results.append(cache.get(spec, ARCH)[1]), 8) == []
    assert counts() == (1, 0, 0)
    assert len({id(result) for result in results}) == 1


def test_error_reaches_every_waiting_thread(fresh: Path, tmp_path: Path) -> None:
    path = tmp_path / "bad.cu"
    path.write_text('extern "C" __global__ void kernel(int* x) { nonsense(); }')
    spec = kernel_spec(str(path), "kernel", "P")
    errors = in_threads(lambda: cache.get(spec, ARCH))
    assert [type(error) for error in errors] == [CompileError] * 3
    assert disk.KernelDirectory(fresh).entries() == []


def test_prebuilt_directory_serves_without_a_compiler(
    fresh: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    spec = a_kernel(tmp_path)
    key, compiled = cache.get(spec, ARCH)
    prebuilt = tmp_path / "prebuilt"
    assert disk.KernelDirectory(prebuilt).write(key, compiled)
    forget()
    monkeypatch.setattr(compiler, "fingerprint", lambda: None)
    monkeypatch.setattr(compiler, "compile_text", lambda *_: pytest.fail("compiled"))
    with pytest.raises(CompileError) as caught:
        cache.get(spec, ARCH)
    assert "CKI_CUBIN_DIR is not set" in str(caught.value)
    assert "cki-runtime[cuda13]" in str(caught.value)
    monkeypatch.setenv("CKI_CUBIN_DIR", str(prebuilt))
    assert cache.get(spec, ARCH)[1] == compiled
    assert counts() == (0, 0, 1)
    with pytest.raises(CompileError, match="does not hold it"):
        cache.get(spec, "sm_80")


def test_prebuilt_directory_with_a_compiler_saves_the_compilation(
    fresh: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    spec = a_kernel(tmp_path)
    key, compiled = cache.get(spec, ARCH)
    disk.KernelDirectory(tmp_path / "prebuilt").write(key, compiled)
    disk.KernelDirectory(fresh).clear()
    forget()
    monkeypatch.setenv("CKI_CUBIN_DIR", str(tmp_path / "prebuilt"))
    cache.get(spec, ARCH)
    assert counts() == (0, 0, 1)


def test_fork_during_compilation_leaves_the_child_able_to_compile(fresh: Path, tmp_path: Path) -> None:
    slow = tmp_path / "slow.cu"
    lines = "\n".join(f"  x[{i}] = x[{i + 1}] * x[{i + 2}] + {i};" for i in range(400))
    slow.write_text(f'extern "C" __global__ void kernel(float* x) {{\n{lines}\n}}\n')
    thread = threading.Thread(target=cache.get, args=(kernel_spec(str(slow), "kernel", "P"), ARCH))
    thread.start()
    time.sleep(0.02)
    child = os.fork()
    if child == 0:
        try:
            cache.get(kernel_spec(str(slow), "kernel", "P"), ARCH)
            os._exit(0)
        except BaseException:
            os._exit(1)
    assert os.waitpid(child, 0)[1] == 0
    thread.join()


def test_clear_removes_kernels_and_locks_only(fresh: Path, tmp_path: Path) -> None:
    cache.get(a_kernel(tmp_path), ARCH)
    (fresh / "notes.txt").write_text("mine")
    assert disk.KernelDirectory(fresh).clear() == 1
    assert [path.name for path in fresh.iterdir()] == ["notes.txt"]
