"""The types of a GGUF file's tensors, and how the quantised ones become floats (ggml's dequantize_row_*).

    Q8_0   32 numbers: f16 d; 32 i8 q                              d q
    Q4_0   32 numbers: f16 d; 32 of 4 bits                         d (q - 8)
    Q4_1   32 numbers: f16 d, m; 32 of 4 bits                      d q + m
    Q5_0   32 numbers: f16 d; 32 fifth bits; 32 of 4 bits          d (q - 16)
    Q5_1   32 numbers: f16 d, m; 32 fifth bits; 32 of 4 bits       d q + m
    Q4_K   256 numbers: f16 d, m; 8 pairs (s, t) of 6 bits; 256 of 4 bits            (d s) q - m t   for each 32
    Q5_K   as Q4_K, with 256 fifth bits after the pairs
    Q6_K   256 numbers: 256 of 4 bits; 256 upper pairs of bits; 16 i8 s; f16 d       (d s) (q - 32)  for each 16

A byte of 4-bit numbers holds one in each half: of a run of bytes first all low halves count, then all high ones.
Products and sums are those of f32, in the order of the table.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from cki import dtypes
from cki.engine.parts import in_parts
from cki.engine.quantized import Array


class BlockType(NamedTuple):
    """elements: of a block; bytes: that it takes."""

    name: str
    elements: int
    bytes: int

    def row_bytes(self, columns: int) -> int:
        """Of a row of that many numbers, a multiple of `elements`."""
        return columns // self.elements * self.bytes


#: By ggml's numbers.
TYPES = {
    0: BlockType("F32", 1, 4), 1: BlockType("F16", 1, 2), 30: BlockType("BF16", 1, 2),
    8: BlockType("Q8_0", 32, 34), 2: BlockType("Q4_0", 32, 18), 3: BlockType("Q4_1", 32, 20),
    6: BlockType("Q5_0", 32, 22), 7: BlockType("Q5_1", 32, 24), 12: BlockType("Q4_K", 256, 144),
    13: BlockType("Q5_K", 256, 176), 14: BlockType("Q6_K", 256, 210),
}  # fmt: skip

#: Types that are not read, for messages.
OTHER_TYPES = {
    9: "Q8_1", 10: "Q2_K", 11: "Q3_K", 15: "Q8_K", 16: "IQ2_XXS", 17: "IQ2_XS", 18: "IQ3_XXS", 19: "IQ1_S",
    20: "IQ4_NL", 21: "IQ3_S", 22: "IQ2_S", 23: "IQ4_XS", 24: "I8", 25: "I16", 26: "I32", 27: "I64", 28: "F64",
    29: "IQ1_M", 34: "TQ1_0", 35: "TQ2_0", 39: "MXFP4",
}  # fmt: skip

#: Numbers that are read at a time: temporaries stay in the processor's cache.
_PART = 1 << 16

_PLAIN: dict[str, np.dtype[Any]] = {"F32": np.dtype("<f4"), "F16": np.dtype("<f2"), "BF16": dtypes.bf16.numpy}


def floats(blocks: Array, kind: BlockType) -> Array:
    """The numbers of u8 [rows, bytes]: [rows, columns], a view for F32, F16 and BF16, else new f32."""
    plain = _PLAIN.get(kind.name)
    if plain is not None:
        return blocks.view(plain)
    rows, columns = blocks.shape[0], blocks.shape[1] // kind.bytes * kind.elements
    values = np.empty((rows, columns), np.float32)

    def fill(part: slice) -> None:
        with np.errstate(over="ignore", invalid="ignore"):  # a broken file's scales may be infinite
            found = _READERS[kind.name](blocks[part].reshape(-1, kind.bytes))
        values[part] = found.reshape(-1, columns)

    in_parts(rows, max(_PART // max(columns, 1), 1), fill)
    return values


# Each of these takes u8 [blocks, bytes] and gives f32 [blocks, ...].


def _f16(pairs: Array) -> Array:
    """u8 [blocks, 2] as f32 [blocks, 1]."""
    return pairs.view("<f2").astype(np.float32)


def _halves(run: Array, codes: Array) -> Array:
    """4-bit numbers of u8 [..., n] into codes [..., 2 n], which may be of any type."""
    count = run.shape[-1]
    codes[..., :count] = run & 0x0F
    codes[..., count:] = run >> 4
    return codes


def _q8_0(blocks: Array) -> Array:
    return np.multiply(blocks[:, 2:].view(np.int8), _f16(blocks[:, :2]), dtype=np.float32)


def _q4_0(blocks: Array) -> Array:
    values = _halves(blocks[:, 2:], np.empty((len(blocks), 32), np.float32))
    values -= 8
    values *= _f16(blocks[:, :2])
    return values


def _q4_1(blocks: Array) -> Array:
    values = _halves(blocks[:, 4:], np.empty((len(blocks), 32), np.float32))
    values *= _f16(blocks[:, :2])
    values += _f16(blocks[:, 2:4])
    return values


def _five_bits(fifth: Array, run: Array) -> Array:
    """fifth: u8 [blocks, 4], number i's in bit i.  run: u8 [blocks, 16].  f32 [blocks, 32]."""
    codes = _halves(run, np.empty((len(run), 32), np.uint8))
    codes |= np.unpackbits(fifth, axis=1, bitorder="little") << 4
    return codes.astype(np.float32)


def _q5_0(blocks: Array) -> Array:
    return (_five_bits(blocks[:, 2:6], blocks[:, 6:]) - 16) * _f16(blocks[:, :2])


def _q5_1(blocks: Array) -> Array:
    return _five_bits(blocks[:, 4:8], blocks[:, 8:]) * _f16(blocks[:, :2]) + _f16(blocks[:, 2:4])


def _six_bit_pairs(packed: Array) -> tuple[Array, Array]:
    """u8 [blocks, 12] to s and t, f32 [blocks, 8].  The first four of each are whole in bytes 0 to 7; the others have
    4 bits in bytes 8 to 11 and 2 in the tops of those before."""
    first, second, low = packed[:, :4], packed[:, 4:8], packed[:, 8:]
    s = np.concatenate([first & 0x3F, (low & 0x0F) | (first >> 6) << 4], axis=1)
    t = np.concatenate([second & 0x3F, (low >> 4) | (second >> 6) << 4], axis=1)
    return s.astype(np.float32), t.astype(np.float32)


def _shifted(blocks: Array, codes: Array) -> Array:
    """codes: u8 [blocks, 8, 32].  (d s) q - m t."""
    s, t = _six_bit_pairs(blocks[:, 4:16])
    scale, shift = s * _f16(blocks[:, :2]), t * _f16(blocks[:, 2:4])
    values = codes.astype(np.float32)
    values *= scale[:, :, None]
    values -= shift[:, :, None]
    return values


def _q4_k(blocks: Array) -> Array:
    codes = np.empty((len(blocks), 4, 64), np.uint8)
    return _shifted(blocks, _halves(blocks[:, 16:].reshape(-1, 4, 32), codes).reshape(-1, 8, 32))


def _q5_k(blocks: Array) -> Array:
    """Number i of each 32 has its fifth bits in byte i: bit j that of the j-th 32."""
    codes = np.empty((len(blocks), 4, 64), np.uint8)
    codes = _halves(blocks[:, 48:].reshape(-1, 4, 32), codes).reshape(-1, 8, 32)
    fifth = blocks[:, None, 16:48] >> np.arange(8, dtype=np.uint8)[:, None] & 1
    return _shifted(blocks, codes | fifth << 4)


def _q6_k(blocks: Array) -> Array:
    """In two halves of 128: 64 bytes of 4-bit numbers, and 32 bytes with two more bits for each fourth of them."""
    codes = _halves(blocks[:, :128].reshape(-1, 2, 64), np.empty((len(blocks), 2, 128), np.uint8))
    upper = blocks[:, 128:192].reshape(-1, 2, 1, 32) >> np.arange(0, 8, 2, dtype=np.uint8)[:, None] & 3
    codes |= upper.reshape(-1, 2, 128) << 4
    scale = blocks[:, 192:208].view(np.int8) * _f16(blocks[:, 208:])
    values = codes.reshape(-1, 16, 16).astype(np.float32)
    values -= 32
    values *= scale[:, :, None]
    return values


_READERS = {
    "Q8_0": _q8_0, "Q4_0": _q4_0, "Q4_1": _q4_1, "Q5_0": _q5_0, "Q5_1": _q5_1, "Q4_K": _q4_k, "Q5_K": _q5_k,
    "Q6_K": _q6_k,
}  # fmt: skip
