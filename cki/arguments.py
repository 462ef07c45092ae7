"""The argument memory of a plan: packed once, patched with addresses on each call.

The driver takes an array of pointers to the kernel's parameters, so a parameter's value may lie anywhere.  All
steps of a plan share one block of host memory: first every distinct address (slot + offset) that any step
needs, then the constants, then the 128-byte tensor maps.  A call therefore writes its addresses with one
`struct.pack_into`, whatever the number of launches, and the constants are never touched again.

    | u64 address 0 | u64 address 1 | ... | constants, 8 bytes each | tensor maps, 128 bytes each, aligned to 128 |
"""

from __future__ import annotations

import ctypes
import struct
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from cki.errors import InvalidTypeError
from cki.operand import Operand
from cki.plan import ArgumentValue, NullPointer, Plan, Step, TensorMapArg

#: Parameter letters of `KernelSpec.params` that take a number -> struct format, and the same in CUDA's words.
NUMBERS = {"i": "<i", "I": "<I", "q": "<q", "Q": "<Q", "f": "<f", "d": "<d"}
LETTER_MEANING = {
    "P": "pointer", "i": "int", "I": "unsigned int", "q": "long long", "Q": "unsigned long long", "f": "float",
    "d": "double", "T": "TensorMap",
}  # fmt: skip

#: (address, argument) -> the 128 bytes of a tensor map.
EncodeTensorMap = Callable[[int, TensorMapArg], bytes]


@dataclass(frozen=True)
class ArgumentLayout:
    """Where everything lies in the block.

    addresses: (index into the call's base pointers, byte offset) of each address word.
    constants: (byte position, packed value).
    maps: (byte position, index of its address, argument).
    parameters: for each step, the byte position of each kernel parameter.
    """

    addresses: tuple[tuple[int, int], ...]
    constants: tuple[tuple[int, bytes], ...]
    maps: tuple[tuple[int, tuple[int, int], TensorMapArg], ...]
    parameters: tuple[tuple[int, ...], ...]
    nbytes: int


def check_step(step: Step) -> None:
    """Raise when a step's arguments do not fit its kernel's `params` (a planner's mistake)."""
    kernel = step.kernel
    if len(kernel.params) != len(step.args):
        raise InvalidTypeError(
            f"kernel {kernel.entry} takes {len(kernel.params)} parameters ({kernel.params}), "
            f"its step has {len(step.args)}"
        )
    for position, (letter, value) in enumerate(zip(kernel.params, step.args)):
        if not _fits(letter, value):
            raise InvalidTypeError(
                f"kernel {kernel.entry}, parameter {position}: {value!r} is no {LETTER_MEANING.get(letter, letter)}"
            )


def _fits(letter: str, value: ArgumentValue) -> bool:
    if letter == "P":
        return isinstance(value, (Operand, NullPointer))
    if letter == "T":
        return isinstance(value, TensorMapArg)
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return False
    try:
        struct.pack(NUMBERS[letter], value)
    except (struct.error, OverflowError, KeyError):
        return False
    return True


def lay_out(plan: Plan, slots: Sequence[str]) -> ArgumentLayout:
    """The layout of a plan whose base pointers are given in the order of `slots`."""
    index_of = {slot: index for index, slot in enumerate(slots)}

    def address(operand: Operand) -> tuple[int, int]:
        return index_of[operand.slot], operand.offset

    for step in plan.steps:
        check_step(step)
    values = [(letter, value) for step in plan.steps for letter, value in zip(step.kernel.params, step.args)]
    # Every slot has a word of its own, in order, so that a call without offsets packs its pointers as they come.
    words = [(index, 0) for index in range(len(slots))]
    words += [a for _, v in values if isinstance(v, Operand) and (a := address(v))[1] != 0]
    addresses = tuple(dict.fromkeys(words))
    word_of = {a: 8 * index for index, a in enumerate(addresses)}

    position = 8 * len(addresses)
    constants: dict[bytes, int] = {}
    for letter, value in values:
        packed = _constant(letter, value)
        if packed is not None and packed not in constants:
            constants[packed] = position
            position += 8
    maps: dict[TensorMapArg, int] = {}
    position = (position + 127) // 128 * 128
    for _, value in values:
        if isinstance(value, TensorMapArg) and value not in maps:
            maps[value] = position
            position += 128

    def locate(letter: str, value: ArgumentValue) -> int:
        if isinstance(value, TensorMapArg):
            return maps[value]
        if isinstance(value, Operand):
            return word_of[address(value)]
        packed = _constant(letter, value)
        assert packed is not None
        return constants[packed]

    return ArgumentLayout(
        addresses=addresses,
        constants=tuple((place, packed) for packed, place in constants.items()),
        maps=tuple((place, address(value.operand), value) for value, place in maps.items()),
        parameters=tuple(tuple(locate(lt, v) for lt, v in zip(s.kernel.params, s.args)) for s in plan.steps),
        nbytes=max(position, 8),
    )


def _constant(letter: str, value: ArgumentValue) -> bytes | None:
    if isinstance(value, NullPointer):
        return bytes(8)
    if isinstance(value, (Operand, TensorMapArg)):
        return None
    return struct.pack(NUMBERS[letter], value).ljust(8, b"\0")


class ArgumentBlock:
    """One copy of a plan's argument memory.  Belongs to one call at a time.

    memory: begins with the address words, which `packer` writes.
    arrays: for each step, its array of parameter pointers.  parameters: the addresses of those (`kernelParams`).
    map_addresses: what each tensor map in the block was encoded for.
    """

    def __init__(self, layout: ArgumentLayout, encode: EncodeTensorMap) -> None:
        self._raw = ctypes.create_string_buffer(layout.nbytes + 128)
        self._base = (ctypes.addressof(self._raw) + 127) // 128 * 128
        self.memory = (ctypes.c_char * layout.nbytes).from_address(self._base)
        for position, packed in layout.constants:
            ctypes.memmove(self._base + position, packed, 8)
        self.arrays = [
            (ctypes.c_void_p * max(len(step), 1))(*(self._base + position for position in step))
            for step in layout.parameters
        ]
        self.parameters = tuple(ctypes.addressof(array) for array in self.arrays)
        self._addresses = layout.addresses
        self._has_offsets = any(offset for _, offset in layout.addresses)
        self._pack_into = self.packer(layout)
        self._maps = layout.maps
        self.map_addresses = [-1] * len(layout.maps)
        self._encode = encode

    @staticmethod
    def packer(layout: ArgumentLayout) -> Callable[..., None]:
        """`pack_into(memory, 0, *words)` for the address words of such blocks."""
        # "N" is size_t in the machine's order, which takes little more than half the time of "<Q".
        return struct.Struct(f"@{len(layout.addresses)}N").pack_into

    def fill(self, pointers: Sequence[int]) -> None:
        """Write a call's base pointers, one for each slot."""
        if self._has_offsets:
            self._pack_into(self.memory, 0, *[pointers[slot] + offset for slot, offset in self._addresses])
        else:
            self._pack_into(self.memory, 0, *pointers)
        if self._maps:
            self.fill_maps(pointers)

    def fill_maps(self, pointers: Sequence[int]) -> None:
        """Encode the tensor maps anew whose base pointers differ from the last call's."""
        for index, (position, (slot, offset), argument) in enumerate(self._maps):
            address = pointers[slot] + offset
            if address != self.map_addresses[index]:
                ctypes.memmove(self._base + position, self._encode(address, argument), 128)
                self.map_addresses[index] = address
