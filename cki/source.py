"""The text that is compiled: prelude + kernel + headers, as one self-contained source.

The prelude holds a kernel's compile-time choices (`constexpr int kHeadDim = 64;`, `using Element = cki::bf16;`).
Headers are put in place of their `#include` once, with `#line` directives, so that messages name the file and line
the author wrote, and the text alone decides the binary: a cache key over it sees an edited header.
"""

from __future__ import annotations

import math
import re
import struct
from pathlib import Path

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

    def expand(self, text: str, shown_name: str, directory: Path, *, conditional: bool = False) -> str:
        """`text` with its headers; `shown_name` is what messages call it; `directory` is where it lies."""
        out = [f'#line 1 "{shown_name}"']
        depth = 0
        in_comment = False
        for number, line in enumerate(text.split("\n"), start=1):
            was_in_comment, in_comment = in_comment, _ends_in_comment(line, in_comment)
            if was_in_comment:
                out.append(line)
                continue
            if found := _CONDITIONAL.match(line):
                depth += -1 if found[1] == "endif" else 1
            include = _INCLUDE.match(line)
            if include is None:
                out.append("" if _ONCE.match(line) else line)
                continue
            out.append(self._header(include[1], shown_name, number, directory, conditional or depth > 0))
            out.append(f'#line {number + 1} "{shown_name}"')
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
        for base in (directory, self._kernel_directory, cuda_src()):
            path = base / name
            if path.is_file():
                return path.resolve()
        return None

    @staticmethod
    def _shown(path: Path, name: str) -> str:
        root = cuda_src().resolve()
        return path.relative_to(root).as_posix() if path.is_relative_to(root) else name
