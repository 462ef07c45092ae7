"""Plan of a decoder's products of few tokens: norm, product, gates and residual in one launch
(`cuda_src/gemm/skinny/decode.cu`).

    y = activation(n @ w.T + bias) + residual                       n = x, or rms_norm(x, gamma)
    y = activation(n @ gate.T + bias) * (n @ up.T + bias) + ...     gate and up below one another in w

That is what `rms_norm`, `linear` (weight_layout "out_in") and `gated_linear` compute one after the other: n is rounded
to x's type, sums are fp32, y is rounded once.  w may be e4m3 with a scale for each block of 128 x 128 (W8A16).
"""

from __future__ import annotations

from typing import NamedTuple

from cki import dtypes
from cki.device import DeviceInfo, sim_device
from cki.dtypes import DType
from cki.errors import UnsupportedError
from cki.heuristics import linear_decode as heuristics
from cki.heuristics.linear import ACTIVATIONS
from cki.kernel import ARCHITECTURES, KernelSpec, kernel_spec
from cki.operand import Operand
from cki.plan import ArgumentValue, NullPointer, Step

_PARAMS = "P" * 7 + "i" * 4 + "f" + "q" * 6


class Norm(NamedTuple):
    """RMS norm of a product's rows: gamma [K] of x's type."""

    gamma: Operand
    eps: float


def row_obstacles(x: Operand, w: Operand, norm: Norm | None, scales: Operand | None) -> list[str]:
    """What is wrong with scales, or with how rows lie in memory, for kernels that copy 16 bytes at a time."""
    found = []
    blocks = tuple(-(-extent // heuristics.SCALE_BLOCK) for extent in w.shape)
    if w.dtype == dtypes.e4m3 and (scales is None or scales.shape != blocks or scales.strides[-1] != 1):
        found.append(f"scales is {scales}, not f32 {list(blocks)} with dense rows")
    for name, operand in (("x", x), ("w", w), ("gamma", norm.gamma if norm else None)):
        if operand is None:
            continue
        apart = (
            0 if operand.ndim == 1 or operand.shape[0] == 1 else operand.strides[0] * operand.dtype.itemsize
        )
        if operand.strides[-1] != 1 or apart % 16 or not operand.is_aligned(16):
            found.append(f"rows of {name} do not begin at multiples of 16 bytes")
    return found


def decode_obstacles(
    x: Operand, w: Operand, y: Operand, device: DeviceInfo, *, norm: Norm | None = None, gated: bool = False,
    scales: Operand | None = None, split: int | None = None,
) -> list[str]:  # fmt: skip
    """Why the kernel cannot compute a product; none where it can.  x, y: [tokens, ..]; w: [rows, K]."""
    split = split or heuristics.split(x.shape[1], w.dtype.itemsize, device, norm=norm is not None)
    found = heuristics.obstacles(
        x.shape[0], x.shape[1], w.dtype.itemsize, device, norm=norm is not None, split=split
    )
    if x.dtype not in (dtypes.f16, dtypes.bf16) or w.dtype not in (x.dtype, dtypes.e4m3):
        found.append(f"x is {x.dtype} and w is {w.dtype}, not both f16 or bf16, or w e4m3")
    if w.shape[0] != y.shape[1] * (2 if gated else 1):
        found.append(f"w has {w.shape[0]} rows for {y.shape[1]} columns of y")
    found += row_obstacles(x, w, norm, scales)
    if y.shape[1] > 1 and y.strides[1] != 1:
        found.append("y's rows are not dense")
    return found


def plan_linear_decode(
    x: Operand, w: Operand, bias: Operand | None, residual: Operand | None, y: Operand, device: DeviceInfo, *,
    norm: Norm | None = None, activation: str | None = None, gated: bool = False, scales: Operand | None = None,
    stages: int | None = None, split: int | None = None,
) -> tuple[Step, ...]:  # fmt: skip
    """The launch.  x [tokens, K], w [N, K] (gated: [2 N, K]), residual and y [tokens, N]; y may be the residual.

    scales: of w's blocks, f32 [ceil(rows / 128), ceil(K / 128)], where w is e4m3.
    stages: of the ring of w.  split: blocks of a cluster that share K (sm_90 and later, no norm).  None: as measured.
    w, scales and gamma must not be written by the launch before.  UnsupportedError names every obstacle.
    """
    obstacles = decode_obstacles(x, w, y, device, norm=norm, gated=gated, scales=scales, split=split)
    if obstacles:
        raise UnsupportedError("linear of few tokens", obstacles, "rms_norm, linear and gated_linear")
    tokens, depth = x.shape
    columns = y.shape[1]
    itemsize, normed = w.dtype.itemsize, norm is not None
    split = split or heuristics.split(depth, itemsize, device, norm=normed)
    tiles = -(-columns // (8 if gated else 16))
    clusters = heuristics.clusters(tiles, device, split)
    led, inboxes = heuristics.inboxes(tokens, tiles, clusters, split)
    rounds = -(-depth // (split * heuristics.round_depth(itemsize)))
    ring = stages or heuristics.stages(
        tokens, depth, itemsize, device, norm=normed, split=split, inboxes=inboxes,
        steps=-(-tiles // clusters) * rounds,
    )  # fmt: skip
    kernel = decode_kernel(
        x.dtype, device.arch, tokens, ring, bias=None if bias is None else bias.dtype, norm=normed, gated=gated,
        activation=activation, residual=residual is not None, codes=w.dtype == dtypes.e4m3,
        split_blocks=gated and columns % 8 != 0, split=split,
        whole_rounds=depth % (split * heuristics.round_depth(itemsize)) == 0,
    )  # fmt: skip
    arguments: tuple[ArgumentValue, ...] = (
        x, w, scales or NullPointer(), bias or NullPointer(), residual or NullPointer(), y,
        norm.gamma if norm else NullPointer(), tokens, columns, depth, led,
        norm.eps if norm else 0.0, x.strides[0], w.strides[0], scales.strides[0] if scales else 0,
        bias.strides[0] if bias else 0, residual.strides[0] if residual else 0, y.strides[0],
    )  # fmt: skip
    step = Step(
        kernel, (clusters * split, 1, 1), (heuristics.WARPS * 32, 1, 1), arguments,
        smem=heuristics.shared_memory(tokens, depth, itemsize, ring, norm=normed, split=split, inboxes=inboxes),
        cluster=(split, 1, 1), programmatic=bool(kernel.constant("kProgrammatic")),
        reason=f"{tokens} x {depth} by {w.shape[0]}: {tiles} tiles, {clusters} x {split} blocks of {ring} stages",
    )  # fmt: skip
    return (step,)


def decode_kernel(
    dtype: DType, arch: str, tokens: int, stages: int, *, bias: DType | None = None, norm: bool = False,
    gated: bool = False, activation: str | None = None, residual: bool = False, codes: bool = False,
    split_blocks: bool = False, whole_rounds: bool = True, split: int = 1,
) -> KernelSpec:  # fmt: skip
    """The kernel of one configuration.  split_blocks: a tile's ups may have two blocks of scales."""
    programmatic = arch in heuristics.PROGRAMMATIC
    return kernel_spec(
        "gemm/skinny/decode.cu", "linear_decode", _PARAMS,
        archs=heuristics.PROGRAMMATIC if programmatic else ARCHITECTURES, max_registers=128, Element=dtype,
        Bias=bias or dtype, Code=dtypes.e4m3 if codes else dtype, kSlots=heuristics.slots(tokens),
        kStages=stages, kSplit=split, kSplitBlocks=codes and split_blocks, kWholeRounds=whole_rounds, kNorm=norm,
        kGated=gated, kActivation=ACTIVATIONS[activation], kHasBias=bias is not None, kHasResidual=residual,
        kProgrammatic=programmatic,
    )  # fmt: skip


def representative_specs(arch: str) -> list[KernelSpec]:
    """Kernels that stand for all: both types, one and two tiles of tokens, with and without each part; on Hopper also
    those of `few_rows`, which serve the same products."""
    from cki.ops.few_rows import representative_specs as of_few_rows

    device = sim_device(arch)
    bf16, f16 = dtypes.bf16, dtypes.f16
    return [
        *(of_few_rows() if arch == "sm_90a" else ()),
        decode_kernel(bf16, device.arch, 1, 6, norm=True),
        decode_kernel(bf16, device.arch, 1, 4, residual=True),
        decode_kernel(bf16, device.arch, 16, 4, norm=True, gated=True, activation="silu"),
        decode_kernel(f16, device.arch, 4, 4, norm=True, gated=True, activation="gelu", bias=dtypes.f32),
        decode_kernel(f16, device.arch, 16, 4, residual=True, bias=f16),
        decode_kernel(bf16, device.arch, 1, 6, norm=True, codes=True),
        decode_kernel(
            bf16, device.arch, 16, 2, norm=True, gated=True, activation="silu", codes=True, split_blocks=True
        ),
        decode_kernel(bf16, device.arch, 4, 4, norm=True, gated=True, activation="silu", codes=True),
        decode_kernel(f16, device.arch, 16, 4, residual=True, bias=f16, codes=True),
    ]
