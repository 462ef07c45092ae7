"""A baseline in a process of its own, which is asked for one time after the other.

So a framework that cannot be imported, brings other CUDA libraries, runs out of memory or compiles for minutes costs
that baseline alone: the process is ended at a time limit, and a later problem begins a new one.  Processes wait for
their turn without work on the GPU, so that all implementations of a run are timed in turn.
"""

from __future__ import annotations

import importlib
import multiprocessing
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from multiprocessing.connection import Connection
from typing import Any, Protocol

from bert_model import Array, Model, Problem


class Implementation(Protocol):
    """One way to compute the encoder."""

    def prepare(self, problem: Problem) -> Array:
        """Makes all that a timed run needs.  Returns the last hidden state of the tokens that count,
        float32 [tokens, hidden], from such a run."""
        ...

    def elapsed_us(self) -> float:
        """Microseconds of one forward pass, prepared and warm."""
        ...


class PeerError(Exception):
    """A baseline that could not be measured, and why."""


class PeerProcess:
    """The `Implementation` that `factory(model, device)` makes, elsewhere.

    factory: "module:name".  limit_s: seconds that `prepare` may take, imports and compilation included; a timed run may
    take 60.  Both raise PeerError.
    """

    def __init__(self, factory: str, model: Model, device: str, limit_s: float) -> None:
        self._arguments = (factory, model, device)
        self._limit_s = limit_s
        self._process: Any = None
        self._connection: Connection | None = None
        self._absent = ""  # why there is no use in another try

    def start(self) -> None:
        """Begins the process, if there is none, which imports its framework and makes its weights meanwhile."""
        if self._process is None:
            context = multiprocessing.get_context("spawn")
            self._connection, theirs = context.Pipe()
            self._process = context.Process(target=_serve, args=(theirs, *self._arguments))
            self._process.start()
            theirs.close()

    def prepare(self, problem: Problem) -> Array:
        if self._absent:
            raise PeerError(self._absent)
        self.start()
        output: Array = self._ask(problem, self._limit_s)
        return output

    def elapsed_us(self) -> float:
        return float(self._ask(None, 60.0))

    def close(self) -> None:
        """Ends the process.  Idempotent."""
        if self._process is not None:
            self._process.kill()
            self._process.join()
            self._process = None
        if self._connection is not None:
            self._connection.close()
            self._connection = None

    def _ask(self, problem: Problem | None, limit_s: float) -> Any:
        if self._connection is None:
            raise PeerError("not prepared")
        try:
            self._connection.send(problem)
            if not self._connection.poll(limit_s):
                self.close()
                raise PeerError(f"not done within {limit_s:.0f} s")
            kind, answer = self._connection.recv()
        except (EOFError, OSError):
            self.close()
            raise PeerError("its process died") from None
        if kind == "done":
            return answer
        self.close()
        if kind == "absent":
            self._absent = answer
        raise PeerError(answer)


class ShapeProcesses:
    """A baseline that takes long to prepare: a process for each shape, all prepared at the same time.

    make: begins nothing yet.  problems: all that will be asked for; those of one shape differ in the order of norms.
    """

    def __init__(self, make: Callable[[], PeerProcess], problems: Sequence[Problem]) -> None:
        self._problems: dict[
            Problem, list[Problem]
        ] = {}  # of a shape, by the problem with norms before the blocks
        for problem in problems:
            self._problems.setdefault(_shape(problem), []).append(problem)
        self._processes = {shape: make() for shape in self._problems}
        self._current: PeerProcess | None = None
        self._failures: dict[Problem, PeerError] = {}

    def start(self) -> None:
        """Begins all processes."""
        for process in self._processes.values():
            process.start()

    def prepare_all(self) -> None:
        """All problems of all shapes; one that fails says so when it is asked for."""

        def prepare(shape: Problem) -> None:
            for problem in self._problems[shape]:
                try:
                    self._processes[shape].prepare(problem)
                except PeerError as error:
                    self._failures[problem] = error

        with ThreadPoolExecutor(max(1, len(self._problems))) as pool:
            list(pool.map(prepare, self._problems))

    def prepare(self, problem: Problem) -> Array:
        if problem in self._failures:
            raise self._failures[problem]
        self._current = self._processes[_shape(problem)]
        return self._current.prepare(problem)

    def elapsed_us(self) -> float:
        if self._current is None:
            raise PeerError("not prepared")
        return self._current.elapsed_us()

    def close(self) -> None:
        """Ends all processes.  Idempotent."""
        for process in self._processes.values():
            process.close()


def _shape(problem: Problem) -> Problem:
    return problem._replace(pre_ln=True)


def _serve(connection: Connection, factory: str, model: Model, device: str) -> None:
    """The process: an answer ("done", value), ("failed", why) or ("absent", why) to each problem, or to None, which
    asks for a time."""
    module, name = factory.split(":")
    implementation: Implementation | None = None
    refusal = ("failed", "not made")
    try:
        implementation = getattr(importlib.import_module(module), name)(model, device)
    except ImportError as error:
        refusal = ("absent", _line(error))
    except Exception as error:  # whatever a framework raises: the baseline is left out, and the reason shown
        refusal = ("failed", _line(error))
    while True:
        try:
            problem = connection.recv()
        except (EOFError, OSError):
            return
        if implementation is None:
            connection.send(refusal)
            return
        try:
            answer: Any = implementation.elapsed_us() if problem is None else implementation.prepare(problem)
            connection.send(("done", answer))
        except ImportError as error:
            connection.send(("absent", _line(error)))
        except Exception as error:
            connection.send(("failed", _line(error)))


def _line(error: Exception) -> str:
    text = " ".join(str(error).split())
    return f"{type(error).__name__}: {text[:200]}"
