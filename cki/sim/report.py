"""Turning the addresses in a report into files and lines."""

from __future__ import annotations

import functools
import re
from pathlib import Path

from cki.sim.dwarf import LineTable

_SITE = re.compile(r" @(\S+)\+(0x[0-9a-f]+)")

#: Parts of the simulation itself: a call inlined from there is shown as its caller in the kernel.
_OWN = ("cuda_src/sim/", "cki_sim_entry")


@functools.lru_cache(maxsize=32)
def _lines(module: str) -> LineTable:
    return LineTable(Path(module))


def _is_own(file: str) -> bool:
    return any(part in file for part in _OWN)


def _place(match: re.Match[str]) -> str:
    try:
        frames = _lines(match[1]).frames(int(match[2], 16))
    except (OSError, ValueError, LookupError):
        return match[0]
    shown = [frame for frame in frames if not _is_own(frame[0])] or frames
    if not shown:
        return match[0]
    return " at " + ", inlined at ".join(f"{Path(file).name}:{line}" for file, line in shown)


def resolve(text: str) -> str:
    """The report with ` @module+address` replaced by ` at file:line, inlined at file:line`, innermost first."""
    return _SITE.sub(_place, text)
