"""Functions made at run time of source text: straight-line code for one problem, where a loop or a further call costs.

What varies between problems becomes text (numbers, how many tensors); objects are reached through names.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple


class Expression(NamedTuple):
    """Source of one value, in which `{name}` stands for a constant."""

    text: str
    constants: Mapping[str, object]

    def inline(self, names: dict[str, Any], prefix: str, **variables: str) -> str:
        """The text for a function's body.  names: gets the constants, under names that begin with `prefix`.

        variables: what else stands in braces, as it is to be written.
        """
        fields = {name: f"{prefix}_{name}" for name in self.constants}
        names.update({fields[name]: value for name, value in self.constants.items()})
        return self.text.format(**variables, **fields)


def define(name: str, head: str, body: Sequence[str], names: Mapping[str, object]) -> Any:
    """The function of this source.  head: its parameters.  names: the objects that the body refers to."""
    source = "\n".join([f"def {name}({head}):", *(f"    {line}" for line in body)])
    scope = dict(names)
    exec(compile(source, f"<generated {name}>", "exec"), scope)
    return scope[name]
