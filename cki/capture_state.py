"""What `cki.capture` needs from a call: hands off the memory it uses, and on the simulated device the launch itself.

A graph replays launches on fixed addresses, so what a captured call allocated (workspaces and outputs) must not go to
anybody else while the graph lives.  Memory of the capturing framework comes from a pool of the graph, which may hand it
out again within the graph; other memory is kept.  The simulated device has no graphs: there the launches are recorded
and replayed.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Sequence
from contextvars import ContextVar
from typing import Any, NamedTuple

from cki.errors import UnsupportedError
from cki.launch import Executable


class Recorded(NamedTuple):
    """One recorded launch of a plan."""

    executable: Executable
    pointers: tuple[int, ...]
    stream: int


class Recording:
    """What the calls inside one capture leave behind.

    framework: whose memory comes from the graph's pool.  stream: what is recorded; None on the simulated device.
    """

    def __init__(self, framework: str = "", stream: int | None = None) -> None:
        self.framework = framework
        self.stream = stream
        self.kept: list[Any] = []
        self.launches: list[Recorded] = []


#: Number of captures in progress in this process.  Calls look at the context variable only when it is not 0.
active = 0
current: ContextVar[Recording | None] = ContextVar("cki_recording", default=None)
_lock = threading.Lock()


def enter() -> None:
    """A capture begins."""
    global active
    with _lock:
        active += 1


def leave() -> None:
    """A capture ends."""
    global active
    with _lock:
        active -= 1


def _require_recorded(recording: Recording, stream: int) -> None:
    """Refuse a call beside the capture: it would run once, now, and no replay would repeat it."""
    from cki import driver

    if driver.capturing_graph(stream) is None:  # a stream that waits for the recorded one is recorded as well
        raise UnsupportedError(
            f"cki.capture records stream {recording.stream:#x} of {recording.framework}, this call went to {stream:#x}",
            ["no replay would repeat it"],
            "pass one of its tensors to cki.capture, which takes the framework from there; inside, use the current "
            "stream or one that waits for it",
        )


def _after_fork_in_child() -> None:
    global _lock
    _lock = threading.Lock()


os.register_at_fork(after_in_child=_after_fork_in_child)


def launch(executable: Executable, pointers: Sequence[int], stream: int, memory: Sequence[Any]) -> None:
    """Launch, or record, inside a capture of this thread; else plainly launch."""
    recording = current.get()
    if recording is None:
        executable.launch(pointers, stream)
        return
    if recording.stream not in (None, stream):
        _require_recorded(recording, stream)
    for item in memory:
        if type(item).__module__.partition(".")[0] != recording.framework:
            recording.kept.append(item)
    if executable.device.kind == "sim":
        recording.launches.append(Recorded(executable, tuple(pointers), stream))
    else:
        executable.launch(pointers, stream)
