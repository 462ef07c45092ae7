"""What `cki.capture` needs from a call: hands off the memory it uses, and on the simulated device the launch itself.

A graph replays launches on fixed addresses, so what a captured call allocated (workspaces and outputs) must not go to
anybody else while the graph lives.  Memory of the capturing framework comes from a pool of the graph, which may hand it
out again within the graph; other memory is kept.  The simulated device has no graphs: there the launches are recorded
and replayed.
"""

from __future__ import annotations

import linecache
import os
import re
import sysconfig
import threading
import traceback
from collections.abc import Callable, Sequence
from contextvars import ContextVar
from pathlib import Path
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


def launch(
    executable: Executable, pointers: Sequence[int], stream: int, memory: Sequence[Any], given: Sequence[Any] = ()
) -> None:  # fmt: skip
    """Launch, or record, inside a capture of this thread; else plainly launch.

    memory: what the call allocated.  given: the caller's tensors.  Those that the captured function made and let go of
    come from the graph's pool on a GPU; a recording on the simulated device keeps them.
    """
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
        recording.kept.append(given)
    else:
        executable.launch(pointers, stream)


# ---- what to say of a function that cannot be captured: which of its lines did what a graph cannot record.
#
# While a stream is captured the driver refuses whatever would wait for the device or needs its answer: `.item()`,
# `print` of a tensor, a copy to the host, `synchronize()`, allocations by other means than the framework's pool.  The
# frameworks report that in their own words, often from a place that is not the cause. ----

#: cudaErrorStreamCaptureUnsupported and its kin.
_CODES = range(900, 909)
_WORDS = re.compile(r"stream[ _]?capture|captur(e|ing)\b", re.IGNORECASE)
#: The driver's messages speak of CUDA, CuPy's own of the current stream.
_SPEAKERS = ("CUDA", "THE CURRENT STREAM IS CAPTURING")
_LIBRARIES = tuple({sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib")})
_PACKAGE = str(Path(__file__).resolve().parent)
_ADAPTERS = str(Path(__file__).resolve().parent.parent / "adapters")


def explained(error: BaseException, function: Callable[..., Any]) -> UnsupportedError | None:
    """An error that says where `function` did what a graph cannot record; None when `error` is about something else."""
    cause = _first_refusal(error)
    if cause is None:
        return None
    name = getattr(function, "__qualname__", repr(function))
    frame = _culprit(cause)
    place = "" if frame is None else f" at {frame.filename}:{frame.lineno}"
    line = "" if frame is None else linecache.getline(frame.filename, frame.lineno or 0).strip()
    return UnsupportedError(
        f"cki.capture: {name} does what a graph cannot record{place}",
        [
            *([f"there: {line}"] if line else []),
            f"{type(cause).__name__}: {str(cause).strip().splitlines()[0]}",
        ],
        "no .item(), no copy to the host, no synchronize() inside; allocate with the framework; compute on the device "
        "what decides, or before the capture",
    )


def _first_refusal(error: BaseException) -> BaseException | None:
    """The first in the chain of errors that the driver's refusal caused: later ones come from ending the capture."""
    found, chain = None, []
    link: BaseException | None = error
    while link is not None and link not in chain:
        chain.append(link)
        if _is_refusal(link):
            found = link
        link = link.__cause__ or link.__context__
    return found


def _is_refusal(error: BaseException) -> bool:
    if not isinstance(error, RuntimeError) or isinstance(error, UnsupportedError):
        return False
    status = getattr(error, "status", None)
    if isinstance(status, int) and int(status) in _CODES:
        return True
    text = str(error)
    return _WORDS.search(text) is not None and any(word in text.upper() for word in _SPEAKERS)


def _culprit(error: BaseException) -> traceback.FrameSummary | None:
    """The innermost line of the user's own."""
    frames = traceback.extract_tb(error.__traceback__)
    own = [frame for frame in frames if not _is_library(os.path.abspath(frame.filename))]
    return own[-1] if own else (frames[-1] if frames else None)


def _is_library(path: str) -> bool:
    # Compiled modules of Cython name their sources by paths that are relative to where they were built.
    return (
        path.endswith((".pyx", ".pxd", ".pxi"))
        or path.startswith((_PACKAGE + os.sep, _ADAPTERS + os.sep))
        or any(path.startswith(folder + os.sep) for folder in _LIBRARIES)
    )
