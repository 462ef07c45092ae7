"""Forks in the middle of what other threads do: the gate itself, then real forks while NVRTC compiles ahead."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from cki import fork_gate
from cki.fork_gate import ForkGate

ROOT = Path(__file__).resolve().parents[1]


class Holder:
    """A thread inside a gate until told to leave."""

    def __init__(self, gate: ForkGate) -> None:
        self.leave = threading.Event()
        self.inside = threading.Event()
        self._gate = gate
        self.thread = threading.Thread(target=self._run, daemon=True)
        self.thread.start()

    def _run(self) -> None:
        with self._gate, self._gate:
            self.inside.set()
            self.leave.wait()


def fork(gate: ForkGate, forked: list[str]) -> None:
    gate.before_fork()
    forked.append("fork")
    gate.after_fork_in_parent()


def test_a_fork_waits_for_threads_inside_and_holds_back_others() -> None:
    gate, forked = ForkGate(), list[str]()
    first = Holder(gate)
    assert first.inside.wait(10)
    forking = threading.Thread(target=fork, args=(gate, forked))
    forking.start()
    while not gate._forks:
        time.sleep(0.001)
    second = Holder(gate)
    assert not second.inside.wait(0.1)
    assert forked == []
    first.leave.set()
    forking.join(10)
    assert forked == ["fork"]
    assert second.inside.wait(10)
    second.leave.set()


def test_two_forks_at_once() -> None:
    gate, forked = ForkGate(), list[str]()
    holder = Holder(gate)
    assert holder.inside.wait(10)
    threads = [threading.Thread(target=fork, args=(gate, forked)) for _ in range(2)]
    for thread in threads:
        thread.start()
    holder.leave.set()
    for thread in threads:
        thread.join(10)
    assert forked == ["fork"] * 2
    with gate:
        assert gate._inside == 1


def test_a_thread_inside_may_fork_itself() -> None:
    gate, forked = ForkGate(), list[str]()
    with gate:
        fork(gate, forked)
        gate.before_fork()
        gate.after_fork_in_child()
        assert gate._inside == 1
    assert (gate._inside, forked) == (0, ["fork"])


def test_patience_ends(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setattr(fork_gate, "PATIENCE", 0.05)
    gate, forked = ForkGate(), list[str]()
    holder = Holder(gate)
    assert holder.inside.wait(10)
    fork(gate, forked)
    assert forked == ["fork"]
    assert "the child may hang" in caplog.text
    holder.leave.set()


def test_a_child_forked_while_a_thread_imports_can_import(tmp_path: Path) -> None:
    """Without the gate, the child waits for ever for the lock of the module that was being imported."""
    (tmp_path / "slow_to_import.py").write_text("import time; time.sleep(0.5)\n")
    code = (
        "import os, signal, threading, time\n"
        "from cki.fork_gate import gate\n"
        "def work():\n"
        "    with gate:\n"
        "        import slow_to_import\n"
        "threading.Thread(target=work).start()\n"
        "time.sleep(0.1)\n"
        "child = os.fork()\n"
        "if child == 0:\n"
        "    signal.alarm(20)\n"
        "    import slow_to_import\n"
        "    os._exit(0)\n"
        "print(os.waitpid(child, 0)[1])"
    )
    assert run(code, PYTHONPATH=f"{tmp_path}{os.pathsep}{ROOT}", CKI_COMPILE="lazy") == ["0"]


@pytest.mark.parametrize("delay", [0.0, 0.1, 0.5])
def test_children_forked_during_background_compilation_compile(tmp_path: Path, delay: float) -> None:
    """Children forked while the thread imports, loads NVRTC and compiles; each compiles a kernel of its own."""
    code = (
        "import os, signal, sys, time\n"
        "from cki import background\n"
        "background._DRIVER_FILES = ('/',)\n"
        "background.architectures = lambda: ['sm_90a']\n"
        "del os.environ['CKI_COMPILE']\n"
        "background.start()\n"
        "status = []\n"
        "for arch in ('sm_80', 'sm_89', 'sm_120a'):\n"
        f"    time.sleep({delay})\n"
        "    child = os.fork()\n"
        "    if child == 0:\n"
        "        signal.alarm(60)\n"
        "        from cki import cache\n"
        "        from cki.device import sim_device\n"
        "        from cki.heuristics.default_set import default_kernels\n"
        "        cache.get(default_kernels(sim_device(arch))[0], arch)\n"
        "        os._exit(0)\n"
        "    status.append(os.waitpid(child, 0)[1])\n"
        "print(background._thread.is_alive(), *status)"
    )
    alive, *status = run(code, CKI_CACHE_DIR=str(tmp_path), CKI_COMPILE="lazy")
    assert status == ["0"] * 3, f"killed by SIGALRM is {int(signal.SIGALRM)}"
    assert alive == "True"  # else nothing was being compiled


def run(code: str, **env: str) -> list[str]:
    """The words that a Python program prints; its standard error where it fails."""
    everything = {"PYTHONPATH": str(ROOT), **os.environ, **env}
    result = subprocess.run(
        [sys.executable, "-c", code], env=everything, capture_output=True, text=True, timeout=240, check=False
    )
    assert result.returncode == 0, result.stderr
    return result.stdout.split()
