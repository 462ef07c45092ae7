"""A fork waits until no thread of CKI is in the middle of what a child could never finish.

The child of a fork has the forking thread alone.  Whatever lock another thread held at that moment stays locked in
the child for ever: the lock of a module being imported, of `cuda.bindings` while it loads NVRTC, NVRTC's and the
loader's own.  None of them can be made anew from outside.  So CKI does such things inside the gate, `with gate:`, and
a fork first waits for the threads inside; meanwhile no other thread enters.

Threads inside wait for threads inside only, else a fork could wait for one that waits to enter: one enters before it
takes anything that others wait for (`cki.cache`).  Entering again inside is free.

`logging` is imported here because hooks run in the reverse order of their registration: its hook takes a lock that
every thread inside may want, and must run after the wait, not before.
"""

from __future__ import annotations

import logging
import os
import threading
import time

#: Seconds that a fork waits.  A compile takes a few at most; more means that the forking thread itself holds what a
#: thread inside wants, say the import of a module whose body forks.  Better a child that may hang than a parent.
PATIENCE = 60.0


class ForkGate:
    """Reentrant: `with gate:` around what must not be cut in two by a fork.  Any number of threads may be inside."""

    def __init__(self) -> None:
        self._thread = threading.local()
        self._reset(0)

    def _reset(self, inside: int) -> None:
        self._condition = threading.Condition()
        self._inside = inside  # threads
        self._forks = 0  # forks that wait or happen

    def _depth(self) -> int:
        depth: int = getattr(self._thread, "depth", 0)
        return depth

    def __enter__(self) -> None:
        depth = self._depth()
        if depth == 0:
            with self._condition:
                while self._forks:
                    self._condition.wait()
                self._inside += 1
        self._thread.depth = depth + 1

    def __exit__(self, *error: object) -> None:
        self._thread.depth -= 1
        if self._thread.depth == 0:
            with self._condition:
                self._inside -= 1
                self._condition.notify_all()

    def _own(self) -> int:
        """1 when the calling thread is inside: it goes on in the child as well."""
        return min(self._depth(), 1)

    def before_fork(self) -> None:
        """Wait for the threads inside, and keep the condition's lock over the fork so that none enters."""
        self._condition.acquire()
        self._forks += 1
        deadline = time.monotonic() + PATIENCE
        while self._inside > self._own() and (left := deadline - time.monotonic()) > 0:
            self._condition.wait(left)

    def after_fork_in_parent(self) -> None:
        """Open the gate, unless another fork waits."""
        late = self._inside > self._own()
        self._forks -= 1
        self._condition.notify_all()
        self._condition.release()
        if late:
            logging.getLogger("cki").warning(
                "forked in the middle of a compilation after %.0f s of waiting: the child may hang", PATIENCE
            )

    def after_fork_in_child(self) -> None:
        """The other threads are gone."""
        self._reset(self._own())


gate = ForkGate()
os.register_at_fork(
    before=gate.before_fork,
    after_in_parent=gate.after_fork_in_parent,
    after_in_child=gate.after_fork_in_child,
)
