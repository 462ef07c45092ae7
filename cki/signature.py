"""The parameters of a kernel, read from its declaration in the source.

`extern "C" __global__ void __launch_bounds__(256, 1) scale(const float* x, float* y, float factor, int n)` gives
entry `scale` with four parameters.  Pointer parameters remember their element type and whether they are const, so a
call can check the tensors that it is given.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import NamedTuple

from cki import dtypes
from cki.dtypes import DType
from cki.errors import InvalidArgumentError, InvalidTypeError

_NUMBERS = {
    "int": "i", "signed": "i", "signed int": "i", "i32": "i", "int32_t": "i",
    "unsigned": "I", "unsigned int": "I", "u32": "I", "uint32_t": "I",
    "long": "q", "long int": "q", "long long": "q", "long long int": "q", "i64": "q", "int64_t": "q", "ptrdiff_t": "q",
    "unsigned long": "Q", "unsigned long int": "Q", "unsigned long long": "Q", "unsigned long long int": "Q",
    "u64": "Q", "uint64_t": "Q", "size_t": "Q", "float": "f", "double": "d",
}  # fmt: skip

_ELEMENTS = {
    "float": dtypes.f32, "double": dtypes.f64, "f16": dtypes.f16, "half": dtypes.f16, "__half": dtypes.f16,
    "bf16": dtypes.bf16, "__nv_bfloat16": dtypes.bf16, "nv_bfloat16": dtypes.bf16,
    "e4m3": dtypes.e4m3, "__nv_fp8_e4m3": dtypes.e4m3, "e5m2": dtypes.e5m2, "__nv_fp8_e5m2": dtypes.e5m2,
    "bool": dtypes.bool_, "unsigned char": dtypes.u8, "u8": dtypes.u8, "uint8_t": dtypes.u8,
    "signed char": dtypes.i8, "i8": dtypes.i8, "int8_t": dtypes.i8, "short": dtypes.i16, "i16": dtypes.i16,
    "int16_t": dtypes.i16, "unsigned short": dtypes.u16, "u16": dtypes.u16, "uint16_t": dtypes.u16,
    "int": dtypes.i32, "i32": dtypes.i32, "int32_t": dtypes.i32, "unsigned": dtypes.u32, "unsigned int": dtypes.u32,
    "u32": dtypes.u32, "uint32_t": dtypes.u32, "long": dtypes.i64, "long long": dtypes.i64, "i64": dtypes.i64,
    "int64_t": dtypes.i64, "unsigned long": dtypes.u64, "unsigned long long": dtypes.u64, "u64": dtypes.u64,
    "uint64_t": dtypes.u64, "size_t": dtypes.u64,
}  # fmt: skip

_LETTERS = (
    "P pointer, i int, I unsigned int, q long long, Q unsigned long long, f float, d double, T TensorMap"
)
_KERNEL = re.compile(
    r'(?P<linkage>extern\s*"C"\s*)?(?:static\s+|inline\s+)*__global__\s+(?:void\s+)?'
    r"(?:__launch_bounds__\s*\((?:[^()]|\([^()]*\))*\)\s*)?(?:void\s+)?(?P<name>[A-Za-z_]\w*)\s*\("
)


class Parameter(NamedTuple):
    """One kernel parameter.  letter: as in `KernelSpec.params`.  element: of a pointer, None where it is not known
    (void, vectors, a user's struct).  is_const: a pointer that is only read."""

    name: str
    letter: str
    element: DType | None = None
    is_const: bool = False


def strip_comments(text: str) -> str:
    """The source without comments; line ends are kept."""
    pattern = r'("(?:\\.|[^"\\\n])*")|//[^\n]*|/\*.*?\*/'
    return re.sub(pattern, lambda m: m[1] or "\n" * m[0].count("\n") or " ", text, flags=re.DOTALL)


def find_entry(text: str, entry: str | None, shown_name: str) -> tuple[str, str]:
    """(name, parameter list) of the kernel `entry`, or of the only one when entry is None."""
    text = strip_comments(text)
    block = [(m.start(), _closing(text, m.end() - 1, "{}")) for m in re.finditer(r'extern\s*"C"\s*\{', text)]
    found: dict[str, str] = {}
    mangled = []
    for match in _KERNEL.finditer(text):
        if match["linkage"] or any(start < match.start() < end for start, end in block):
            found[match["name"]] = text[match.end() : _closing(text, match.end() - 1, "()")]
        else:
            mangled.append(match["name"])
    hint = ""
    if mangled:
        hint = f'{", ".join(mangled)} lacks extern "C": write `extern "C" __global__ void {mangled[0]}(...)`'
    if entry is None and len(found) == 1:
        return next(iter(found.items()))
    if entry is None:
        what = f"{len(found)} kernels ({', '.join(found)})" if found else 'no extern "C" __global__ function'
        raise InvalidArgumentError(f"{shown_name} has {what}", hint=hint or "entry= names the one to load")
    if not isinstance(entry, str):
        raise InvalidTypeError(
            f"entry is {entry!r}, not a str", hint=f"its kernels: {', '.join(found) or 'none'}"
        )
    if entry not in found:
        listed = ", ".join(found) or "none"
        raise InvalidArgumentError(
            f'{shown_name} has no extern "C" __global__ function {entry!r}',
            hint=hint or f"its kernels: {listed}",
        )
    return entry, found[entry]


def _closing(text: str, opening: int, pair: str) -> int:
    """Position of the bracket that closes the one at `opening`."""
    depth = 0
    for position in range(opening, len(text)):
        if text[position] == pair[0]:
            depth += 1
        elif text[position] == pair[1]:
            depth -= 1
            if depth == 0:
                return position
    return len(text)


def parse_parameters(
    parameter_list: str, constants: Mapping[str, object], entry: str
) -> tuple[Parameter, ...]:
    """The parameters of a kernel.  constants: its prelude; a DType among them is a type name (`Element`).

    Raises InvalidArgumentError that names every parameter whose type cannot be passed.
    """
    parameters, problems = [], []
    aliases = {name: value for name, value in constants.items() if isinstance(value, DType)}
    for position, declaration in enumerate(_split(parameter_list)):
        parameter = _parse(declaration, aliases, position)
        if parameter is None:
            problems.append(
                f"parameter {position}: `{declaration}` is neither a pointer nor a number of a known type"
            )
        else:
            parameters.append(parameter)
    if problems:
        raise InvalidArgumentError(
            f"the parameters of {entry} cannot be read from its declaration", problems,
            f'params= states them, one letter each ({_LETTERS}), e.g. params="PPi"',
        )  # fmt: skip
    return tuple(parameters)


def parameters_from_letters(
    letters: str, parameter_list: str, constants: Mapping[str, object], entry: str
) -> tuple[Parameter, ...]:
    """Parameters stated by the caller, one letter each.

    Their number must be the declaration's, or a launch reads arguments that are not there.  A declaration that may be
    a macro (one word) is not counted.  What `parse_parameters` can read must agree.
    """
    if not isinstance(letters, str):
        raise InvalidTypeError(f"params of {entry} is {letters!r}, not a str", hint=_LETTERS)
    declared = _split(parameter_list)
    if len(declared) != len(letters) and all(re.search(r"\W", declaration) for declaration in declared):
        raise InvalidArgumentError(
            f"params={letters!r} states {len(letters)} parameters, {entry} declares {len(declared)}",
            hint=f"one letter a parameter: {_LETTERS}",
        )
    unknown = sorted(set(letters) - set("PiIqQfdT"))
    if unknown:
        raise InvalidArgumentError(
            f"params={letters!r} of {entry} has unknown letters {unknown}", hint=_LETTERS
        )
    aliases = {name: value for name, value in constants.items() if isinstance(value, DType)}
    problems = []
    for position, (letter, declaration) in enumerate(zip(letters, declared)):
        parameter = _parse(declaration, aliases, position)
        if parameter is not None and parameter.letter != letter:
            problems.append(f"parameter {position}: `{declaration}` is {parameter.letter}, not {letter}")
    if problems:
        raise InvalidArgumentError(
            f"params={letters!r} is not what {entry} declares", problems, "no params= for what can be read"
        )
    return tuple(Parameter(f"argument {position}", letter) for position, letter in enumerate(letters))


def _split(parameter_list: str) -> list[str]:
    parts, depth, start = [], 0, 0
    for position, character in enumerate(parameter_list):
        depth += (character in "(<[") - (character in ")>]")
        if character == "," and depth == 0:
            parts.append(parameter_list[start:position])
            start = position + 1
    parts.append(parameter_list[start:])
    cleaned = [" ".join(part.split()) for part in parts]
    return [part for part in cleaned if part and part != "void"]


def _parse(declaration: str, aliases: Mapping[str, DType], position: int) -> Parameter | None:
    text = re.sub(
        r"\b(__restrict__|__restrict|__grid_constant__|volatile|struct|typename)\b", " ", declaration
    )
    text = re.sub(r"\s*([*&\[\]])\s*", r"\1", text)
    is_pointer = "*" in text or "[" in text
    base, _, tail = text.partition("*")
    base = base.partition("[")[0]
    words = [word for word in base.split() if word != "const"]
    is_const = "const" in base.split()
    words = [word.removeprefix("cki::") for word in words]
    name = re.sub(r"\W", "", tail.replace("const ", "").partition("[")[0])
    if not name and len(words) > 1 and " ".join(words) not in _NUMBERS:
        name = words.pop()
    name = name or f"argument {position}"
    kind = " ".join(words)
    if is_pointer:
        return (
            Parameter(name, "P", aliases.get(kind, _ELEMENTS.get(kind)), is_const)
            if "&" not in text
            else None
        )
    if kind == "TensorMap":
        return Parameter(name, "T")
    alias = aliases.get(kind)
    kind = alias.cuda.removeprefix("cki::") if alias is not None else kind
    return Parameter(name, _NUMBERS[kind]) if kind in _NUMBERS and "&" not in text else None
