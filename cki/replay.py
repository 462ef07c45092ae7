"""Launches that repeat themselves, as executable graphs.

A driver takes 3.6 to 5 us to launch a kernel on an H200's host, but 2.1 to 2.9 us to launch a graph that holds it
(`bench/launch_cost.py`).  A held plan that is called with the same memory over and over, as decoding loops do, is
therefore recorded and replayed.  What differs from the call before is launched as it is; so is what runs while its
stream is captured (a graph cannot be launched into a capture), on another device's context, while another thread
launches the same graph, or where recording failed.  The driver lets replays of one graph run one behind the other, on
whatever streams they are launched on (CUDA driver API, cuGraphLaunch), so a second stream may wait for the first.
"""

from __future__ import annotations

import contextlib
import logging
import sys
from collections.abc import Sequence
from typing import Any

from cupy_backends.cuda.api.runtime import CUDARuntimeError, graphLaunch, streamIsCapturing

from cki import driver, log
from cki.errors import LaunchError
from cki.launch import Executable

_INFO = logging.INFO
#: Equal calls in a row before the first recording, which takes about 0.1 ms.  Doubles with each recording.
_PATIENCE = 8


class ExecutableGraph:
    """An instantiated graph of one call, freed with this object; launches in flight complete."""

    def __init__(self, executable: Executable, pointers: Sequence[int]) -> None:
        api = driver.api()
        self._api = api
        self._index = executable.device.index
        with driver.on_device(self._index), driver.allowed_while_capturing():
            (stream,) = _checked(api.cuStreamCreate(api.CUstream_flags.CU_STREAM_NON_BLOCKING))
            try:
                _checked(
                    api.cuStreamBeginCapture(
                        stream, api.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_THREAD_LOCAL
                    )
                )
                try:
                    executable.launch(pointers, int(stream))
                finally:
                    (graph,) = _checked(api.cuStreamEndCapture(stream))
                try:
                    (self._graph,) = _checked(api.cuGraphInstantiate(graph, 0))
                finally:
                    api.cuGraphDestroy(graph)
            finally:
                api.cuStreamDestroy(stream)
        self.handle = int(self._graph)

    def __del__(self) -> None:
        if not hasattr(self, "_graph"):
            return
        # Other addresses may come inside a capture of the caller's, which freeing a graph would break.
        with contextlib.suppress(Exception), driver.on_device(self._index), driver.allowed_while_capturing():
            self._api.cuGraphExecDestroy(self._graph)


def _checked(result: tuple[Any, ...]) -> tuple[Any, ...]:
    if int(result[0]) != 0:
        raise LaunchError(f"recording a held plan: {driver.error_text(result[0])}")
    return result[1:]


class RepeatedLaunch:
    """What `repeated_statements` know of one plan's calls so far."""

    __slots__ = ("_executable", "_index", "_many_devices", "_patience", "_repeats", "known")

    def __init__(self, executable: Executable) -> None:
        self._executable = executable
        self._index = executable.device.index
        self._many_devices = driver.device_count() > 1
        # The last call's addresses, and the graph of it: taken out while a thread launches it.
        self.known: tuple[tuple[int, ...], list[ExecutableGraph]] = ((), [])
        self._repeats = 0
        self._patience = _PATIENCE

    def observe(self, pointers: tuple[int, ...], stream: int) -> None:
        """Note a call that had no graph; record one when it is worth it."""
        if pointers != self.known[0]:
            self.known = (pointers, [])
            self._repeats = 0
            return
        self._repeats += 1
        if self._repeats >= self._patience and self.can_replay(stream):
            self._repeats = 0
            self._patience *= 2
            self._record(pointers)

    def _record(self, pointers: tuple[int, ...]) -> None:
        try:
            self.known = (pointers, [ExecutableGraph(self._executable, pointers)])
        except (
            Exception
        ) as error:  # a recording only saves time; what is wrong with the launch itself, that says
            self._patience = sys.maxsize
            log.logger.info("a held plan is launched as it is from now on: %s", error)

    def can_replay(self, stream: int) -> bool:
        """Whether a graph may be launched on a stream now."""
        if self._many_devices and driver.current_device() != self._index:
            return False
        try:
            return not streamIsCapturing(stream)
        except CUDARuntimeError:
            return False


def repeated_statements(
    executable: Executable, names: dict[str, Any], pointers: Sequence[str], finish: str
) -> list[str]:
    """`Executable.statements` for a caller that often repeats itself, perhaps in several threads."""
    history = RepeatedLaunch(executable)
    names |= {
        "history": history, "observe": history.observe, "can_replay": history.can_replay, "graph_launch": graphLaunch,
        "RuntimeRefusal": CUDARuntimeError,
    }  # fmt: skip
    # The legacy stream cannot be captured, and one device is always the right one.
    now = "not stream or can_replay(stream)" if driver.device_count() == 1 else "can_replay(stream)"
    launch = executable.statements(names, pointers, finish)
    return [
        f"pointers = ({''.join(f'{pointer}, ' for pointer in pointers)})",
        "known_pointers, graphs = history.known",
        "if pointers == known_pointers and graphs:",
        "    try: graph = graphs.pop()",
        "    except IndexError: graph = None",  # another thread was faster
        "    if graph is not None:",
        "        try:",
        f"            if {now}:",
        f"                if is_logging({_INFO}): log_steps()",
        "                graph_launch(graph.handle, stream)",
        f"                {finish}",
        "        except RuntimeRefusal: pass",  # the plain launch says what is wrong
        "        finally: graphs.append(graph)",
        "else: observe(pointers, stream)",
        *launch,
    ]
