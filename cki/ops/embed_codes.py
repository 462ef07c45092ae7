"""A decoder's first rows as e4m3 codes: `cuda_src/embedding/embed_codes.cu`, what `few_rows_fp8` reads.

The engine's own: there is no public name.
"""

from __future__ import annotations

from cki import dtypes
from cki.device import DeviceInfo
from cki.errors import UnsupportedError
from cki.kernel import KernelSpec, kernel_spec
from cki.operand import Operand
from cki.ops.few_rows_fp8 import ARCH, BLOCK, Codes
from cki.plan import Step

_WARPS = 2
_PARAMS = "PPPPPPP" + "iiq"


def plan_embed_codes(
    tokens: Operand, table: Operand, gamma: Operand, x: Operand, to: Codes, device: DeviceInfo
) -> tuple[Step, ...]:
    """The launch: x = table[tokens], codes of x * gamma with their squares.  UnsupportedError names every obstacle.

    tokens: i32 [rows].  table: bf16 [words, columns].  gamma: bf16 [columns].  x: bf16 [rows, columns], dense.
    """
    rows, columns = x.shape
    obstacles = [] if device.arch == ARCH else [f"it needs {ARCH}, the device is {device.arch}"]
    if columns % BLOCK:
        obstacles.append(f"{columns} columns are no whole blocks of {BLOCK}")
    if any(t.dtype != dtypes.bf16 for t in (table, gamma, x)) or tokens.dtype != dtypes.i32:
        obstacles.append("rows are not bf16, or tokens not i32")
    if table.strides[1] != 1 or table.strides[0] % 4 or not table.is_aligned(8):
        obstacles.append("rows of the table are not read four elements at a time")
    if to.squares is None:
        obstacles.append("there is no memory for sums of squares")
    if obstacles:
        raise UnsupportedError("embed_codes", obstacles, "embed_tokens, and rms_norm_quantize")
    assert to.squares is not None
    grid = (-(-columns // (4 * BLOCK * _WARPS)), rows, 1)
    arguments = (
        tokens,
        table,
        gamma,
        x,
        to.codes,
        to.scales,
        to.squares,
        table.shape[0],
        columns,
        table.strides[0],
    )
    reason = "a warp has 512 columns of a token"
    kernel = embed_codes_kernel(two_parts=to.has_two_parts)
    return (Step(kernel, grid, (_WARPS * 32, 1, 1), arguments, programmatic=True, reason=reason),)


def embed_codes_kernel(*, two_parts: bool) -> KernelSpec:
    """The kernel of one configuration."""
    return kernel_spec(
        "embedding/embed_codes.cu", "embed_codes", _PARAMS, archs=(ARCH,), max_registers=64, kWarps=_WARPS,
        kTwoParts=two_parts,
    )  # fmt: skip


def representative_specs(arch: str) -> list[KernelSpec]:
    """Both."""
    return [embed_codes_kernel(two_parts=two_parts) for two_parts in (False, True)]
