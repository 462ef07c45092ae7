"""Plan of products of up to 16 tokens with e4m3 weights, on sm_90a (`cuda_src/gemm/hopper/linear_tokens_e4m3.cu`).

    y = activation(n @ w.T + bias) + residual                       n = x, or rms_norm(x, gamma)
    y = activation(n @ gate.T + bias) * (n @ up.T + bias) + ...     gate and up below one another in w

x and y are bf16; w is e4m3 with a scale for each block of 128 x 128 (W8A16).  What `plan_linear_decode` computes of
fewer tokens.  With a norm x * gamma is rounded, and the root of x's mean square is a factor of the fp32 sums.
"""

from __future__ import annotations

from typing import Any

from cki import dtypes
from cki.device import DeviceInfo, sim_device
from cki.dtypes import DType
from cki.errors import UnsupportedError
from cki.heuristics import linear_tokens as heuristics
from cki.heuristics.linear import ACTIVATIONS
from cki.kernel import KernelSpec, kernel_spec
from cki.operand import Operand, dense
from cki.ops.linear_decode import Norm, row_obstacles
from cki.ops.linear_hopper import tensor_map
from cki.plan import ArgumentValue, NullPointer, Plan, Step, TensorMapArg

_ARCH, _ENTRY = "sm_90a", "linear_tokens_e4m3"
_PARAMS = "TT" + "P" * 7 + "iii" + "f" + "q" * 4
#: The workspace's slot: sums of tiles that several blocks share.
PARTS = "linear_parts"
#: A thread's registers: 65536 for the block's threads, in steps of 8.
_REGISTERS = 65536 // heuristics.THREADS // 8 * 8


def token_obstacles(
    x: Operand, w: Operand, y: Operand, device: DeviceInfo, *, norm: Norm | None = None,
    residual: Operand | None = None, gated: bool = False, scales: Operand | None = None,
) -> list[str]:  # fmt: skip
    """Why the kernel cannot compute a product; none where it can.  x, y: [tokens, ..]; w: [rows, K]."""
    found = [] if device.arch == _ARCH else [f"it needs {_ARCH}, the device is {device.arch}"]
    tokens, depth = x.shape
    if not 1 <= tokens <= heuristics.MAX_TOKENS:
        found.append(f"{tokens} tokens, not 1 to {heuristics.MAX_TOKENS}")
    if x.dtype != dtypes.bf16 or y.dtype != dtypes.bf16 or w.dtype != dtypes.e4m3:
        found.append(f"x is {x.dtype}, y {y.dtype} and w {w.dtype}, not bf16, bf16 and e4m3")
    if depth % 16 or not depth:
        found.append(f"K is {depth}, no multiple of 16")
    rows = y.shape[1] * (2 if gated else 1)
    if w.shape != (rows, depth):
        found.append(f"w has shape {w.shape}, not {(rows, depth)}")
    if gated and y.shape[1] % (heuristics.TILE_ROWS // 2):
        found.append(f"{y.shape[1]} columns of gates, no multiple of {heuristics.TILE_ROWS // 2}")
    found += row_obstacles(x, w, norm, scales)
    for name, operand in (("y", y), ("residual", residual)):
        if operand is not None and operand.shape[1] > 1 and operand.strides[1] != 1:
            found.append(f"{name}'s rows are not dense")
    return found


def plan_linear_tokens(
    x: Operand, w: Operand, bias: Operand | None, residual: Operand | None, y: Operand, device: DeviceInfo, *,
    counters: Operand, scales: Operand | None = None, norm: Norm | None = None, activation: str | None = None,
    gated: bool = False,
) -> Plan:  # fmt: skip
    """The launch.  x [tokens, K], w [N, K] (gated: [2 N, K]), residual and y [tokens, N]; y may be the residual.

    scales: of w's blocks, f32 [ceil(rows / 128), ceil(K / 128)].
    counters: u32, zeros before the launch and after it, `cki.heuristics.linear_tokens.counters` or more.
    w, scales and gamma must not be written by the launch before.  UnsupportedError names every obstacle.
    """
    obstacles = token_obstacles(x, w, y, device, norm=norm, residual=residual, gated=gated, scales=scales)
    tokens, depth = x.shape
    columns = y.shape[1]
    tiles = heuristics.tiles(columns, gated=gated)
    size = heuristics.token_size(min(tokens, heuristics.MAX_TOKENS))
    needed = heuristics.counters(columns, gated=gated)
    if counters.size < needed:
        obstacles.append(f"{counters.size} counters, not {needed}")
    if obstacles:
        raise UnsupportedError(
            "linear of few tokens", obstacles, "rms_norm, linear, gated_linear and linear_fp8"
        )
    has_norm = norm is not None
    stages = heuristics.stages(size, device.shared_memory_per_block, norm=has_norm)
    kernel = token_kernel(
        size, stages, bias=None if bias is None else bias.dtype, norm=has_norm, gated=gated,
        activation=activation, residual=residual is not None,
    )  # fmt: skip
    blocks = heuristics.blocks(columns, depth, device, gated=gated)
    rows = w.shape[0]
    nbytes = 2 * blocks * heuristics.part_bytes(size)
    arguments: tuple[ArgumentValue, ...] = (
        tensor_map(x, depth, tokens, x.strides[0], (64, tokens)),
        _weight_map(w, columns, gated=gated),
        scales or NullPointer(), bias or NullPointer(), residual or NullPointer(), y,
        norm.gamma if norm else NullPointer(), dense(PARTS, (nbytes // 4,), dtypes.f32), counters,
        tokens, columns, depth, norm.eps if norm else 0.0,
        scales.strides[0] if scales else 0, bias.strides[0] if bias else 0,
        residual.strides[0] if residual else 0, y.strides[0],
    )  # fmt: skip
    step = Step(
        kernel, (blocks, 1, 1), (heuristics.THREADS, 1, 1), arguments,
        smem=heuristics.shared_memory(size, stages, norm=has_norm),
        programmatic=True,
        reason=f"{tokens} x {depth} by {rows}: few tokens, {tiles} tiles cut evenly for {blocks} blocks",
    )  # fmt: skip
    return Plan((step,), ((PARTS, nbytes),))


def _weight_map(w: Operand, columns: int, *, gated: bool) -> TensorMapArg:
    """Stages of 128 rows; with gates eight of the gates', eight of the ups', and so on."""
    rows, depth = w.shape
    step = w.strides[0] * w.dtype.itemsize
    box = heuristics.STAGE_DEPTH
    if not gated:
        return tensor_map(w, depth, rows, w.strides[0], (box, heuristics.TILE_ROWS))
    return TensorMapArg(w, (depth, 8, 2, columns // 8), (step, columns * step, 8 * step), (box, 8, 2, 8))


def parts_workspace(steps: tuple[Step, ...]) -> tuple[tuple[str, int], ...]:
    """The temporary memory that all such launches among a plan's share."""
    sizes = [
        argument.size * argument.dtype.itemsize
        for step in steps
        for argument in step.args
        if isinstance(argument, Operand) and argument.slot == PARTS
    ]
    return ((PARTS, max(sizes)),) if sizes else ()


def token_kernel(
    size: int, stages: int, *, bias: DType | None = None, norm: bool = False, gated: bool = False,
    activation: str | None = None, residual: bool = False,
) -> KernelSpec:  # fmt: skip
    """The kernel of one configuration.  size: tokens of a product, `heuristics.token_size`."""
    return kernel_spec(
        f"gemm/hopper/{_ENTRY}.cu", _ENTRY, _PARAMS, archs=(_ARCH,), max_registers=_REGISTERS,
        Bias=bias or dtypes.bf16, kTokens=size, kStages=stages, kNorm=norm,
        kGated=gated, kActivation=ACTIVATIONS[activation], kHasBias=bias is not None, kHasResidual=residual,
    )  # fmt: skip


def representative_specs(arch: str) -> list[KernelSpec]:
    """Kernels that stand for all: both sizes, with and without each part."""
    room = sim_device(arch).shared_memory_per_block
    choices: list[tuple[int, dict[str, Any]]] = [
        (8, {"norm": True, "bias": dtypes.f32}),
        (8, {"residual": True}),
        (16, {"norm": True, "gated": True, "activation": "silu"}),
        (16, {"residual": True, "bias": dtypes.bf16}),
    ]
    return [
        token_kernel(size, heuristics.stages(size, room, norm=options.get("norm", False)), **options)
        for size, options in choices
    ]
