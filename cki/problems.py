"""Everything that is wrong with a model's weights or configuration, said at once."""

from __future__ import annotations

from cki.errors import InvalidArgumentError, InvalidTypeError


class Problems:
    """Broken rules as they are found, raised as one error."""

    def __init__(self, summary: str) -> None:
        self._summary = summary
        self.found: list[str] = []
        self._has_wrong_type = False
        self._hints: dict[str, None] = {}

    def note(self, problem: str, hint: str = "") -> None:
        """One broken rule, and what would pass."""
        self.found.append(problem)
        if hint:
            self._hints[hint] = None

    def note_type(self, problem: str, hint: str = "") -> None:
        """The same of a value whose type is wrong: the error is a TypeError then."""
        self.note(problem, hint)
        self._has_wrong_type = True

    def refuse(self) -> None:
        """Raise InvalidArgumentError, or InvalidTypeError, with all problems, if there are any."""
        if self.found:
            kind = InvalidTypeError if self._has_wrong_type else InvalidArgumentError
            raise kind(self._summary, self.found, "; ".join(self._hints))
