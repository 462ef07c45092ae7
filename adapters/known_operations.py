"""Operations by the names under which programs of a framework call them.

Those of the table go by their own name, in every process.  Others (of a user's kernel) are known to this process alone,
by a name made for them.
"""

from __future__ import annotations

import uuid

from cki.errors import CkiError
from cki.ops.spec import OpSpec
from cki.ops.table import public_specs

_local: dict[str, OpSpec] = {}
_names: dict[int, str] = {}


def is_public(spec: OpSpec) -> bool:
    """Whether an operation is one of the table."""
    return public_specs().get(spec.name) is spec


def name_of(spec: OpSpec) -> str:
    """The name by which programs call an operation, which is known from now on."""
    if is_public(spec):
        return spec.name
    known = _names.get(id(spec))
    if known is None:
        # Of no other process either: programs outlive theirs in compilation caches.
        known = _names[id(spec)] = f"{spec.name}@{uuid.uuid4().hex}"
        _local[known] = spec  # kept, so no other operation gets its identity
    return known


def find(name: str) -> OpSpec:
    """The operation of that name; CkiError where there is none."""
    found = public_specs().get(name) or _local.get(name)
    if found is None:
        plain, _, is_local = name.partition("@")
        if is_local:
            raise CkiError(
                f"CKI has no operation {plain!r} here: a program that calls a kernel of cki.load runs only in the "
                "process that traced it"
            )
        raise CkiError(
            f"this version of CKI has no operation {plain!r}: clear the compilation cache, or make the model again"
        )
    return found
