"""The types of a GGUF file's tensors, and how the quantised ones become floats.

    Q8_0   32 numbers: f16 d, 32 i8 q             d * q
    Q4_0   32 numbers: f16 d, 16 bytes of two q   d * (q - 8)
    Q4_1   32 numbers: f16 d, f16 m, 16 bytes     d * q + m

A byte of 4-bit types holds number i in its low half and number i + 16 in its high half (ggml's ggml-common.h and
dequantize_row_*).  Products and sums are those of f32.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from cki import dtypes
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
}  # fmt: skip

#: Types that are not read, for messages.
OTHER_TYPES = {
    6: "Q5_0", 7: "Q5_1", 9: "Q8_1", 10: "Q2_K", 11: "Q3_K", 12: "Q4_K", 13: "Q5_K", 14: "Q6_K", 15: "Q8_K",
    16: "IQ2_XXS", 17: "IQ2_XS", 18: "IQ3_XXS", 19: "IQ1_S", 20: "IQ4_NL", 21: "IQ3_S", 22: "IQ2_S", 23: "IQ4_XS",
    24: "I8", 25: "I16", 26: "I32", 27: "I64", 28: "F64", 29: "IQ1_M", 34: "TQ1_0", 35: "TQ2_0", 39: "MXFP4",
}  # fmt: skip

_PLAIN: dict[str, np.dtype[Any]] = {"F32": np.dtype("<f4"), "F16": np.dtype("<f2"), "BF16": dtypes.bf16.numpy}


def floats(blocks: Array, kind: BlockType) -> Array:
    """The numbers of u8 [rows, bytes]: [rows, columns], a view for F32, F16 and BF16, else new f32."""
    plain = _PLAIN.get(kind.name)
    if plain is not None:
        return blocks.view(plain)
    rows, row_bytes = blocks.shape
    blocks = blocks.reshape(rows, row_bytes // kind.bytes, kind.bytes)
    with np.errstate(over="ignore", invalid="ignore"):  # a broken file's scales may be infinite
        return _scaled(blocks, kind).reshape(rows, -1)


def _scaled(blocks: Array, kind: BlockType) -> Array:
    """u8 [rows, blocks, bytes] to f32 [rows, blocks, elements]."""
    scale = blocks[:, :, :2].view("<f2").astype(np.float32)
    values = np.empty((*blocks.shape[:2], kind.elements), np.float32)
    if kind.name == "Q8_0":
        np.multiply(blocks[:, :, 2:].view(np.int8), scale, out=values, dtype=np.float32)
    else:
        pairs = blocks[:, :, -16:]
        values[:, :, :16] = pairs & 0x0F
        values[:, :, 16:] = pairs >> 4
        if kind.name == "Q4_0":
            values -= 8
        values *= scale
        if kind.name == "Q4_1":
            values += blocks[:, :, 2:4].view("<f2").astype(np.float32)
    return values
