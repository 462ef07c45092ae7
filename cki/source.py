"""The text that is compiled: prelude + kernel + headers, as one self-contained source.

The prelude holds a kernel's compile-time choices (`constexpr int kHeadDim = 64;`, `using Element = cki::bf16;`).
Headers are put in place of their `#include` once, with `#line` directives, so that messages name the file and line
the author wrote, and the text alone decides the binary: a cache key over it sees an edited header.
"""

from __future__ import annotations

import functools
import math
import re
import struct
from pathlib import Path
from typing import NamedTuple

from cki._checkout import cuda_src
from cki.dtypes import DType
from cki.errors import CompileError
from cki.kernel import ConstantValue, KernelSpec

_INCLUDE = re.compile(r'^[ \t]*#[ \t]*include[ \t]*"([^"]+)"[^\n]*$')
_CONDITIONAL = re.compile(r"^[ \t]*#[ \t]*(if|ifdef|ifndef|endif)\b")
_ONCE = re.compile(r"^[ \t]*#[ \t]*pragma[ \t]+once\b", re.MULTILINE)


def constant_text(name: str, value: ConstantValue) -> str:
    """One line of the prelude.  Floats are written as their exact bits in hexadecimal."""
    if isinstance(value, DType):
        return f"using {name} = {value.cuda};"
    if isinstance(value, bool):
        return f"constexpr bool {name} = {'true' if value else 'false'};"
    if isinstance(value, int):
        kind, suffix = ("int", "") if -(2**31) < value < 2**31 else ("long long", "LL")
        return f"constexpr {kind} {name} = {value}{suffix};"
    if not math.isfinite(value):
        raise CompileError(f"constant {name} is {value}; a prelude constant is a finite number")
    rounded = struct.unpack("<f", struct.pack("<f", value))[0]
    return f"constexpr float {name} = {rounded.hex()}f;"


def prelude(spec: KernelSpec) -> str:
    """What stands before the kernel's own text."""
    lines = ['#include "common/types.cuh"', *(constant_text(name, value) for name, value in spec.constants)]
    return "\n".join(lines) + "\n"


def source_path(spec: KernelSpec) -> Path:
    """The file of a kernel: below `cuda_src`, or an absolute path."""
    path = Path(spec.source)
    return path if path.is_absolute() else cuda_src() / path


def read(path: Path) -> str:
    """A source file's text, or a CompileError that names it."""
    try:
        return path.read_text(encoding="utf-8")
    except OSError as error:
        raise CompileError(f"source {path} cannot be read: {error.strerror or error}") from error


def full_source(spec: KernelSpec) -> str:
    """Prelude and kernel with every quoted header in place."""
    path = source_path(spec)
    inliner = _Inliner(path.parent)
    head = inliner.expand(prelude(spec), "prelude of " + spec.entry, path.parent)
    return head + inliner.expand(read(path), spec.source, path.parent)


def _ends_in_comment(line: str, in_comment: bool) -> bool:
    """Whether a /* comment is open at the end of a line.  Text in double quotes opens none."""
    if not in_comment:
        line = re.sub(r'"(\\.|[^"\\])*"', '""', line).split("//", 1)[0]
    last_open, last_close = line.rfind("/*"), line.rfind("*/")
    return last_open > last_close if last_open >= 0 else in_comment and last_close < 0


class _Piece(NamedTuple):
    """lines: of a source up to an include or its end, None where there are none.  include: that header's name, on line
    `number`; conditional: inside an #if."""

    lines: str | None
    include: str
    number: int
    conditional: bool


@functools.lru_cache(maxsize=512)
def _pieces(text: str) -> tuple[_Piece, ...]:
    """A source cut at its includes.  Remembered by its text, for kernels share headers and differ by their preludes."""
    pieces: list[_Piece] = []
    lines: list[str] = []
    depth = 0
    in_comment = False
    for number, line in enumerate(text.split("\n"), start=1):
        was_in_comment, in_comment = in_comment, _ends_in_comment(line, in_comment)
        if was_in_comment:
            lines.append(line)
            continue
        if found := _CONDITIONAL.match(line):
            depth += -1 if found[1] == "endif" else 1
        include = _INCLUDE.match(line)
        if include is None:
            lines.append("" if _ONCE.match(line) else line)
            continue
        pieces.append(_Piece("\n".join(lines) if lines else None, include[1], number, depth > 0))
        lines = []
    return (*pieces, _Piece("\n".join(lines) if lines else None, "", 0, False))


class _Inliner:
    """Expands `#include "..."`; `<...>` is left to the compiler.

    A header with `#pragma once` is wrapped in a guard of its own, because an include inside an #if may be skipped by
    the compiler and must then be in place at the next one.  Outside of any #if the second include is dropped.
    """

    def __init__(self, kernel_directory: Path) -> None:
        self._kernel_directory = kernel_directory
        self._guards: dict[Path, str] = {}
        self._placed: set[Path] = set()
        self._open: list[Path] = []
        self._found: dict[tuple[str, Path], Path | None] = {}
        self._root = cuda_src()
        self._real_root = self._root.resolve()

    def expand(self, text: str, shown_name: str, directory: Path, *, conditional: bool = False) -> str:
        """`text` with its headers; `shown_name` is what messages call it; `directory` is where it lies."""
        out = [f'#line 1 "{shown_name}"']
        for piece in _pieces(text):
            if piece.lines is not None:
                out.append(piece.lines)
            if piece.include:
                within = conditional or piece.conditional
                out.append(self._header(piece.include, shown_name, piece.number, directory, within))
                out.append(f'#line {piece.number + 1} "{shown_name}"')
        return "\n".join(out) + "\n"

    def _header(self, name: str, includer: str, number: int, directory: Path, conditional: bool) -> str:
        path = self._find(name, directory)
        if path is None:
            raise CompileError(
                f'{includer}:{number}: #include "{name}" is in none of {directory}, {self._kernel_directory}, cuda_src'
            )
        if path in self._placed or path in self._open:
            return ""
        text = read(path)
        once = _ONCE.search(text) is not None
        if once and not conditional:
            self._placed.add(path)
        self._open.append(path)
        body = self.expand(text, self._shown(path, name), path.parent, conditional=conditional)
        self._open.pop()
        if not once:
            return body
        guard = self._guards.setdefault(path, f"CKI_INLINED_{len(self._guards)}")
        return f"#ifndef {guard}\n#define {guard}\n{body}#endif"

    def _find(self, name: str, directory: Path) -> Path | None:
        key = name, directory
        if key not in self._found:
            paths = (base / name for base in (directory, self._kernel_directory, self._root))
            self._found[key] = next((path.resolve() for path in paths if path.is_file()), None)
        return self._found[key]

    def _shown(self, path: Path, name: str) -> str:
        inside = path.is_relative_to(self._real_root)
        return path.relative_to(self._real_root).as_posix() if inside else name
