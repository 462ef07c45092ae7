"""The arguments of a user's kernel (`cki.load`) as 64-bit words, and kinds of arguments.

Every argument travels as one word: the address of a tensor, the bits of a number in the type that the kernel declares
(the kernel reads the low bytes).  Two calls are of one kind when their tensors have equal signatures (shape, strides,
dtype, device, alignment) and their numbers are of equal classes: what was checked for one holds for the other, but for
the numbers' ranges.  Addresses and numbers may change from call to call.

`signature` finds the kind's key by asking each tensor.  `reader` generates a function for one kind, straight-line
comparisons that cost a tenth of it (`cki.ops.match` does the tensors).

`checked_constants`: what a caller may put in front of a kernel of their own.
"""

from __future__ import annotations

import re
import struct
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from cki.adapter import BY_TYPE, Adapter, type_name
from cki.arguments import LETTER_MEANING, NUMBERS
from cki.dtypes import LARGEST_F32, DType
from cki.errors import InvalidArgumentError, InvalidTypeError
from cki.kernel import ConstantValue
from cki.operand import Operand
from cki.ops.match import matcher
from cki.ops.spec import Problem
from cki.plan import TensorMapArg
from cki.signature import Parameter
from cki.tensor import TensorView

#: Arguments of a call -> their words, or None when they are not of the kind.
Reader = Callable[[Sequence[Any]], "list[int] | None"]

_RANGES = {"i": (-(2**31), 2**31 - 1), "I": (0, 2**32 - 1), "q": (-(2**63), 2**63 - 1), "Q": (0, 2**64 - 1)}
_MASKS = {"i": 2**32 - 1, "q": 2**64 - 1}


@dataclass(frozen=True)
class TensorMap:
    """An argument for a `const __grid_constant__ TensorMap` parameter: a tiled TMA descriptor over a tensor.

    box: extents of the tile that one copy moves, in the order of the tensor's axes, in elements (1 to 256 each).
    swizzle: 0, 32, 64 or 128 bytes.
    """

    tensor: Any
    box: tuple[int, ...]
    swizzle: int = 128


def check_pointer(parameter: Parameter, arg: Any, view: TensorView | None, problem: Problem) -> None:
    """Note why an argument cannot be passed for a pointer."""
    if arg is None:
        return
    if isinstance(arg, TensorMap) or view is None:
        problem.reject_type(
            f"{parameter.name} is {type_name(type(arg))}, the kernel takes a tensor (or None)"
        )
        return
    if parameter.element is not None and parameter.element != view.dtype:
        problem.reject_type(
            f"{parameter.name} is a {view.dtype} tensor, the kernel takes {parameter.element}*"
        )
    if view.ptr % view.dtype.itemsize:
        problem.reject(f"{parameter.name} lies at no multiple of its element size {view.dtype.itemsize}")


def number_word(parameter: Parameter, arg: Any, problem: Problem) -> int:
    """A number as the 64-bit word that holds it in its exact type; 0, and a note why, when it does not fit."""
    letter, meaning = parameter.letter, LETTER_MEANING[parameter.letter]
    if isinstance(arg, (bool, np.bool_)) or not isinstance(arg, (int, float, np.integer, np.floating)):
        problem.reject_type(f"{parameter.name} is {type_name(type(arg))}, the kernel takes {meaning}")
        return 0
    if letter not in "fd" and not isinstance(arg, (int, np.integer)):
        problem.reject_type(f"{parameter.name} is {arg!r}, the kernel takes {meaning}: int() rounds it")
        return 0
    try:
        packed = struct.pack(NUMBERS[letter], float(arg) if letter in "fd" else int(arg))
    except (struct.error, OverflowError):
        problem.reject(f"{parameter.name} is {arg!r}, out of range of {meaning}")
        return 0
    return int.from_bytes(packed, "little")


def map_argument(slot: str, arg: TensorMap, view: TensorView) -> TensorMapArg:
    """The descriptor that a `TensorMap` describes; InvalidArgumentError when there is none."""
    itemsize = view.dtype.itemsize
    if len(arg.box) != view.ndim or (view.ndim and view.strides[-1] != 1):
        raise InvalidArgumentError(
            f"a tensor map over shape {view.shape}, strides {view.strides} with box {arg.box}",
            hint="one box size for each axis, and a last axis of stride 1",
        )
    operand = Operand(slot, view.shape, view.strides, view.dtype)
    strides = tuple(stride * itemsize for stride in view.strides[-2::-1])
    return TensorMapArg(operand, view.shape[::-1], strides, tuple(arg.box)[::-1], arg.swizzle)


def signature(parameters: Sequence[Parameter], args: Sequence[Any]) -> tuple[Hashable, list[int]] | None:
    """The key of the arguments' kind, and their words.

    None where only a full check tells: a number that does not fit, no tensor at all, tensors of a type that is met
    for the first time, of several frameworks, or of one without stable addresses.
    """
    key: list[Any] = []
    words: list[int] = []
    adapter: Adapter | None = None
    problem = Problem({}, {})
    for parameter, arg in zip(parameters, args):
        if parameter.letter not in "PT":
            word = number_word(parameter, arg, problem)
            key.append(type(arg))
        elif arg is None:
            word = 0
            key.append(None)
        else:
            tensor = arg
            if parameter.letter == "T":
                if type(arg) is not TensorMap or type(arg.box) is not tuple:
                    return None
                if not all(type(size) is int for size in (*arg.box, arg.swizzle)):
                    return None
                tensor = arg.tensor
                key += [arg.box, arg.swizzle]
            found = BY_TYPE.get(type(tensor))
            if found is None or not found.direct or found is not (adapter or found):
                return None
            adapter = found
            word, described = found.signature(tensor)
            key.append(described)
        words.append(word)
    return None if adapter is None or problem.violations else ((adapter, *key), words)


def reader(adapter: Adapter, parameters: Sequence[Parameter], args: Sequence[Any]) -> Reader | None:
    """The function that recognises arguments of the kind of these, which were checked.

    None where only `signature` can: the framework has no guards, a tensor is empty or not at a multiple of 16 bytes.
    """
    names: dict[str, object] = {"errors": (ValueError, OverflowError), "from_bytes": int.from_bytes}
    conditions: list[str] = []  # that hold for other arguments of the kind
    ranges: list[str] = []  # of numbers, to be tested after their classes
    words: list[str] = []
    tensors: list[tuple[str, Any]] = []  # expression and example
    for index, (parameter, arg) in enumerate(zip(parameters, args)):
        a, letter = f"a{index}", parameter.letter
        if letter == "P":
            tensors.append((a, arg))
            words.append("0" if arg is None else f"p{index}")
            continue
        names[f"class{index}"] = type(arg)
        conditions.append(f"{a}.__class__ is class{index}")
        if letter == "T":
            names |= {f"box{index}": arg.box, f"swizzle{index}": arg.swizzle}
            conditions.append(f"{a}.box == box{index} and {a}.swizzle == swizzle{index}")
            tensors.append((f"{a}.tensor", arg.tensor))
            words.append(f"p{index}")
        elif letter in "fd":
            names[f"pack{index}"] = struct.Struct(NUMBERS[letter]).pack
            words.append(f'from_bytes(pack{index}({a}), "little")')
        else:
            low, high = _RANGES[letter]
            value = a if type(arg) is int else f"int({a})"
            ranges.append(f"{low} <= {value} <= {high}")
            words.append(f"{value} & {_MASKS[letter]}" if low else value)
    guards = [None if example is None else adapter.guard(example) for _, example in tensors]
    if any(guard is None and example is not None for guard, (_, example) in zip(guards, tensors)):
        return None
    likeness = adapter.likeness([example for _, example in tensors if example is not None])
    names["recognise"] = matcher(guards, likeness)
    lines = [
        "def read(args):",
        "    try:",
        f"        {''.join(f'a{index}, ' for index in range(len(args)))}= args",
        f"        if not ({' and '.join([*conditions, *ranges]) or 'True'}): return None",
        f"        pointers = recognise(({''.join(f'{text}, ' for text, _ in tensors)}))",
        "        if pointers is None: return None",
        f"        {''.join(f'{word}, ' for word in words if word.startswith('p'))}= pointers",
        f"        return [{', '.join(words)}]",
        # ValueError: another number of arguments, or a box that is no tuple.  OverflowError: beyond fp32 or fp64.
        "    except errors:",
        "        return None",
    ]
    exec(compile("\n".join(lines), "<arguments as before>", "exec"), names)
    found: Any = names["read"]
    return found  # type: ignore[no-any-return]


_NAME = re.compile(r"[A-Za-z_]\w*", re.ASCII)


def checked_constants(constants: Any) -> dict[str, ConstantValue]:
    """The constants in plain Python types: NumPy's numbers are as good as Python's.

    Raises InvalidTypeError or InvalidArgumentError that names every one that cannot be written in a source.
    """
    if constants is None:
        return {}
    if not isinstance(constants, Mapping):
        raise InvalidTypeError(
            f"constants is {type(constants).__name__}, not a mapping", hint='constants={"kBlock": 256}'
        )
    problems, values = [], {}
    for name, value in constants.items():
        if not isinstance(name, str) or not _NAME.fullmatch(name):
            problems.append(f"{name!r} is no C++ identifier")
            continue
        plain = _plain(value)
        if plain is None:
            problems.append(f"{name} is {value!r} of type {type(value).__name__}")
        else:
            values[name] = plain
    if problems:
        raise InvalidArgumentError(
            "constants that cannot stand in front of a kernel", problems,
            "bool, int of 64 bits, finite float of fp32, or a cki.dtypes type, by name",
        )  # fmt: skip
    return values


def _plain(value: object) -> ConstantValue | None:
    if isinstance(value, DType):
        return value
    if isinstance(value, (bool, np.bool_)):
        return bool(value)
    if isinstance(value, (int, np.integer)):
        return int(value) if -(2**63) <= value < 2**63 else None
    if isinstance(value, (float, np.floating)):
        return float(value) if abs(float(value)) <= LARGEST_F32 else None
    return None
