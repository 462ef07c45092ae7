"""Operations by the names under which programs of a framework call them.

Those of the table go by their own name, in every process.  Others (of a user's kernel) go by where they can be
imported, if that was said, else by a name made for them, which this process alone knows.
"""

from __future__ import annotations

import importlib
import uuid

from cki.errors import CkiError, InvalidArgumentError
from cki.ops.spec import OpSpec
from cki.ops.table import public_specs
from cki.own_operation import OwnOperation, OwnSpec

_local: dict[str, OpSpec] = {}
_names: dict[int, str] = {}


def is_public(spec: OpSpec) -> bool:
    """Whether an operation is one of the table."""
    return public_specs().get(spec.name) is spec


def name_of(spec: OpSpec) -> str:
    """The name by which programs call an operation, which is known from now on.

    Raises InvalidArgumentError when it is not where it was said to be importable.
    """
    if is_public(spec):
        return spec.name
    known = _names.get(id(spec))
    if known is None:
        place = spec.importable_as if isinstance(spec, OwnSpec) else None
        if place is not None and _imported(place) is not spec:
            raise InvalidArgumentError(
                f"{spec.name}: importable_as is {place!r}, which is another operation",
                hint="the module and name that this operation is assigned to, once",
            )
        # Else of no other process either: programs outlive theirs in compilation caches.
        known = _names[id(spec)] = place or f"{spec.name}@{uuid.uuid4().hex}"
        _local[known] = spec  # kept, so no other operation gets its identity
    return known


def find(name: str) -> OpSpec:
    """The operation of that name; CkiError where there is none."""
    found = public_specs().get(name) or _local.get(name)
    if found is None and ":" in name:
        found = _local[name] = _imported(name)
    if found is None:
        plain, _, is_local = name.partition("@")
        if is_local:
            raise CkiError(
                f"CKI has no operation {plain!r} here: a program that calls a kernel of cki.load runs only in the "
                'process that traced it, unless cki.load(...).operation(rule, importable_as="package.module:name") '
                "says where others find it"
            )
        raise CkiError(
            f"this version of CKI has no operation {plain!r}: clear the compilation cache, or make the model again"
        )
    return found


def _imported(place: str) -> OpSpec:
    """The operation at "package.module:name"; CkiError where it cannot be had."""
    module, _, name = place.partition(":")
    try:
        found = getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError) as error:
        raise CkiError(
            f"a program calls the kernel {place}, which cannot be imported here: {error}"
        ) from error
    if not isinstance(found, OwnOperation):
        raise CkiError(f"a program calls the kernel {place}, which is a {type(found).__name__}, no operation")
    return found.spec
