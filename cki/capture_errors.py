"""What to say of a function that cannot be captured: which of its lines did what a graph cannot record.

While a stream is captured the driver refuses whatever would wait for the device or needs an answer from it: `.item()`,
`print` of a tensor, a copy to the host, `synchronize()`, allocations by other means than the framework's pool.  The
frameworks report that in their own words, often from a place that is not the cause.
"""

from __future__ import annotations

import linecache
import os
import re
import sysconfig
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

from cki.errors import UnsupportedError

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
