"""The last few problems of one operation, and which of them a call is probably of.

Models call an operation with several problems in turn (four linear layers in a block), again and again in the same
order.  So each problem remembers which one came after it, and that is tried first: trying a wrong one costs 0.5 us.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

#: Problems that are kept.
_LIMIT = 8

#: (inputs, attributes, outs) -> the call's result, or None when it is another problem.
SteadyCall = Callable[[tuple[Any, ...], tuple[Any, ...], tuple[Any, ...]], Any]


class Known:
    """One problem's function, and the problem that came after it."""

    __slots__ = ("call", "next")

    def __init__(self, call: SteadyCall) -> None:
        self.call = call
        self.next = self


class Recent:
    """Threads may share it: what one of them writes is only another's guess.

    expected: the problem to try first; None while there is none.  last: the problem of the call before.
    """

    __slots__ = ("_known", "_lock", "expected", "last")

    def __init__(self) -> None:
        self._known: list[Known] = []
        self._lock = threading.Lock()
        self.expected: Known | None = None
        self.last: Known | None = None

    def __contains__(self, call: object) -> bool:
        return any(known.call is call for known in self._known)

    def add(self, call: SteadyCall) -> None:
        """A new problem, which a call was just made with.  The oldest goes where there are too many."""
        known = Known(call)
        with self._lock:
            self._known = [known, *self._known[: _LIMIT - 1]]
        self._follow(known)

    def search(
        self, inputs: tuple[Any, ...], attributes: tuple[Any, ...], outs: tuple[Any, ...], tried: Known
    ) -> Any:
        """The call by any problem but the one that was tried, or None."""
        for known in self._known:
            if known is not tried:
                result = known.call(inputs, attributes, outs)
                if result is not None:
                    self._follow(known)
                    return result
        return None

    def _follow(self, known: Known) -> None:
        if self.last is not None:
            self.last.next = known
        self.last, self.expected = known, known.next
