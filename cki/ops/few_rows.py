"""Products of a layer for few rows, of bf16 or of e4m3 codes, with what lies between them, and the rows that they begin
with: `cuda_src/gemm/hopper/few_rows.cu`, `cuda_src/embedding/embed_stream.cu`.

    project   y = p + bias                      p = x @ w.T, or of rms_norm(x) where x has squares
    heads     of Q, K, V = p + bias: norms of heads, rotation, y = Q, K and V to a paged cache
    gates     to = activation(gate) * up        [gate | up] = p
    stream    y = y + p, and to = y * gamma with the sums of y's squares, of which the next product makes its norm

The engine's own: there is no public name.
"""

from __future__ import annotations

from typing import NamedTuple

from cki import dtypes
from cki.device import DeviceInfo
from cki.dtypes import DType
from cki.errors import UnsupportedError
from cki.heuristics.linear import ACTIVATIONS
from cki.heuristics.linear_hopper import LAUNCH_REGISTERS
from cki.kernel import KernelSpec, kernel_spec
from cki.operand import Operand, dense
from cki.ops.linear_hopper import row_obstacles, tensor_map
from cki.plan import ArgumentValue, NullPointer, Step

#: Where it runs.
ARCH = "sm_90a"
_PARAMS = "TT" + "P" * 9 + "iii" + "f" + "q" * 4 + "P" * 7 + "q" * 7 + "i" * 4 + "f"
_EMBED_PARAMS = "PPPPPPP" + "iiq"
_MODES = {"project": 0, "gates": 1, "stream": 2, "heads": 3}
#: Stages that a block has not asked for when the launch behind may begin (an H200).
_LEFT = 4
#: Warps of a block of `embed_stream`.
_EMBED_WARPS = 2
#: Rows and columns of a tile; neighbours with one scale.
ROWS, BLOCK = 64, 128
_THREADS = 384
#: Bytes of a row of a stage: of K.
_SPAN = 128
#: Rows of x that are brought.
_ROWS_X = (16, 32, ROWS)
#: Of a block of sm_90.
_SHARED_BYTES = 232448
#: Blocks that share K of a tile.
_MOST_PARTS = 3
#: Registers of (producer, consumer) threads.
_REGISTER_SHARES = (40, 232)


class Rows(NamedTuple):
    """What a product reads: rows [rows, K], and where a norm is still to be applied the sums of their squares, over 128
    columns each, and its epsilon.

    values: bf16, or e4m3 codes with f32 scales of 128 neighbours [rows, K / 128]; or these in two parts: codes [64, K]
    of up to 32 rows, row r in 16 (r / 8) + r % 8 and eight below (W8A16).
    """

    values: Operand
    scales: Operand | None = None
    squares: Operand | None = None
    eps: float = 0.0

    @property
    def tokens(self) -> int:
        """Rows."""
        return (self.values if self.scales is None else self.scales).shape[0]

    @property
    def has_two_parts(self) -> bool:
        """Whether a row is two of codes."""
        return self.values.shape[0] != self.tokens

    def obstacles(self, dtype: DType) -> list[str]:
        """What is not as the rows' type, or that of w beside them, wants it."""
        found = []
        if self.values.dtype != dtype:
            found.append(f"rows of {self.values.dtype} beside {dtype}")
        if (self.scales is None) == (self.values.dtype == dtypes.e4m3):
            found.append("codes have scales, and bf16 has none")
        return found

    @property
    def arguments(self) -> tuple[ArgumentValue, ...]:
        """Of who writes them."""
        return self.values, self.scales or NullPointer(), self.squares or NullPointer()


class Heads(NamedTuple):
    """What becomes of a product of Q, K and V, rows of w in this order, heads of 128 each: as `append_kv` does.

    caches: bf16 [blocks, block_size, kv_heads, 128] of keys and of values.  slots: i64 [rows].  positions: i32 [rows].
    table: f32 [positions, 128], cosines, then sines.  norms: bf16 [128], of heads of queries and of keys, with eps.
    """

    caches: tuple[Operand, Operand]
    slots: Operand
    positions: Operand
    table: Operand
    norms: tuple[Operand, Operand] | None = None
    eps: float = 0.0

    def obstacles(self, rows: int, columns: int) -> list[str]:
        """Every reason why a product of so many rows and columns does not end so."""
        found = [] if rows <= ROWS else [f"{rows} rows of heads, not up to {ROWS}"]
        for cache in self.caches:
            dense_rows = cache.strides[3] == 1 and not any(stride % 4 for stride in cache.strides[:3])
            if cache.dtype != dtypes.bf16 or cache.shape[3] != BLOCK or not dense_rows:
                found.append("a cache is not of dense bf16 rows of 128")
        if columns % BLOCK or columns // BLOCK <= 2 * self.caches[0].shape[2]:
            found.append(f"{columns} columns are not heads of queries, keys and values")
        if self.slots.dtype != dtypes.i64 or self.positions.dtype != dtypes.i32:
            found.append("slots are not i64, or positions not i32")
        return found

    def arguments(self, columns: int) -> tuple[ArgumentValue, ...]:
        """Of the kernel."""
        k, v = self.caches
        heads, (blocks, block_size, kv_heads, _) = columns // BLOCK, k.shape
        return (
            *(self.norms or (NullPointer(),) * 2), k, v, self.slots, self.positions, self.table, *k.strides[:3],
            *v.strides[:3], blocks * block_size, self.table.shape[0], block_size, heads - 2 * kv_heads, kv_heads,
            self.eps,
        )  # fmt: skip


#: The arguments of a product without heads.
_NO_HEADS: tuple[ArgumentValue, ...] = (NullPointer(),) * 7 + (0,) * 7 + (0,) * 4 + (0.0,)


def plan_few_rows(
    x: Rows, w: Operand, w_scale: Operand | None, device: DeviceInfo, *, y: Operand | None = None,
    to: Rows | None = None, bias: Operand | None = None, gamma: Operand | None = None, activation: str | None = None,
    split: int | None = None, heads: Heads | None = None,
) -> tuple[Step, ...]:  # fmt: skip
    """The launch, which reads w before the one ahead of it has ended; UnsupportedError names every obstacle.

    w: bf16, or e4m3 with f32 scales of blocks of 128 x 128; x and to likewise.  y: "project" writes it; "stream", with
    gamma [N], adds to it, and writes `to`; "heads", with heads, writes queries to it.  Without y: "gates", of
    w [2 N, K], writes `to`.  y, bias and gamma are bf16; all rows dense but w's.
    split: blocks of a cluster that share K, 1 to 3; unless told, as many as there are SMs for.
    """
    mode = "gates" if y is None else "heads" if heads else "project" if to is None else "stream"
    rows, depth, columns = x.tokens, x.values.shape[1], w.shape[0] // (2 if y is None else 1)
    codes, two_parts = w_scale is not None, x.has_two_parts
    obstacles = [] if device.arch == ARCH else [f"it needs {ARCH}, the device is {device.arch}"]
    for handed in (x, *(() if to is None else (to,))):
        obstacles += handed.obstacles(dtypes.e4m3 if codes else dtypes.bf16)
    if columns % (BLOCK if to else 2):
        obstacles.append(f"{columns} columns are no whole blocks of {BLOCK}")
    if x.squares is not None and (depth % BLOCK or rows > ROWS):
        obstacles.append(f"a norm of {rows} rows of {depth}, not of up to {ROWS} of whole blocks of {BLOCK}")
    if heads is not None:
        obstacles += heads.obstacles(rows, columns)
    if any(t is not None and t.dtype != dtypes.bf16 for t in (y, bias, gamma)):
        obstacles.append("y, bias and gamma are not bf16")
    if two_parts and (rows > ROWS // 2 or x.values.shape[0] != ROWS):
        obstacles.append(f"{rows} rows in two parts, not up to {ROWS // 2} in {ROWS}")
    obstacles += row_obstacles("x", x.values, depth, x.values.strides[1], x.values.strides[0], rows)
    obstacles += row_obstacles("w", w, depth, w.strides[1], w.strides[0], w.shape[0])
    if obstacles:
        raise UnsupportedError("few_rows", obstacles, "linear or linear_fp8, and launches between")
    tiles = -(-rows // ROWS) * -(-columns // BLOCK)
    stage_depth = _SPAN // w.dtype.itemsize
    most = 1 if mode == "gates" else min(_MOST_PARTS, -(-depth // stage_depth))
    split = min(most, max(1, device.sm_count // tiles) if split is None else split)
    brought = 16 * -(-rows // 8) if two_parts else ROWS if codes else rows
    rows_x = next(n for n in _ROWS_X if n >= brought or n == ROWS)
    blocks = tiles * split if split > 1 else min(tiles, device.sm_count)
    one_tile = tiles * split == blocks
    kernel = few_rows_kernel(
        mode,
        split,
        codes=codes,
        two_parts=two_parts,
        rows_x=rows_x,
        norm=x.squares is not None,
        bias=bias is not None,
        activation=activation,
        heads=heads,
        one_tile=one_tile,
    )
    null = NullPointer()
    nothing = (null, null, null)
    return (Step(
        kernel, (blocks, 1, 1), (_THREADS, 1, 1),
        (
            tensor_map(x.values, depth, x.values.shape[0], x.values.strides[0], (stage_depth, rows_x)),
            tensor_map(w, depth, w.shape[0], w.strides[0], (stage_depth, BLOCK)), x.scales or null, w_scale or null,
            x.squares or null, bias or null, gamma or null, y or null, *(nothing if to is None else to.arguments),
            rows, columns, depth, x.eps, *(x.scales.strides if x.scales else (0, 0)),
            *(w_scale.strides if w_scale else (0, 0)), *(_NO_HEADS if heads is None else heads.arguments(columns)),
        ),
        smem=_memory(mode, split, rows_x, one_tile, two_parts, codes)[1], cluster=(split, 1, 1), programmatic=True,
        reason=f"{rows} x {depth} by {w.shape[0]}, {mode}: {w.dtype} wgmma, {tiles} tiles, K in {split} parts",
    ),)  # fmt: skip


def _memory(
    mode: str, split: int, rows_x: int, one_tile: bool, two_parts: bool, codes: bool
) -> tuple[int, int]:
    """(stages of the ring: as many as fit, bytes of shared memory)."""
    stage = (rows_x + (2 if mode == "gates" else 1) * BLOCK) * _SPAN + 16  # x and w, barriers
    stage += (ROWS + 4) * 4 if codes else 0  # scales
    # Sums of other blocks, or by rows; what heads read; factors of rows, and barriers of sums.
    sums = (
        (split - 1) * 4 * 4096 if split > 1 else 0 if one_tile else (2 if mode == "gates" else 1) * 8 * 4096
    )
    heads = ROWS // (2 if two_parts else 1) // min(split, 2) * (4 * BLOCK + 8) if mode == "heads" else 0
    fixed = sums + heads + 4 * ROWS + 4 * 8
    stages = (_SHARED_BYTES - fixed) // stage
    return stages, fixed + stages * stage


def few_rows_kernel(
    mode: str,
    split: int = 1,
    *,
    codes: bool = True,
    two_parts: bool = False,
    rows_x: int = ROWS,
    norm: bool = False,
    bias: bool = False,
    activation: str | None = None,
    heads: Heads | None = None,
    one_tile: bool = True,
) -> KernelSpec:
    """The kernel of one configuration.

    codes: of e4m3, else of bf16.  norm: x has squares.  rows_x: of its rows that are brought.  one_tile: a block has
    one at most.
    """
    stages, shared = _memory(mode, split, rows_x, one_tile, two_parts, codes)
    producer, consumer = _REGISTER_SHARES
    block_size = 0 if heads is None else heads.caches[0].shape[1]
    is_power = block_size > 0 and block_size & (block_size - 1) == 0
    return kernel_spec(
        "gemm/hopper/few_rows.cu", "few_rows", _PARAMS, archs=(ARCH,), max_registers=LAUNCH_REGISTERS,
        kCodes=codes, kStages=stages, kSplit=split, kMode=_MODES[mode], kTwoParts=two_parts, kRowsX=rows_x,
        kRowFactors=norm, kHasBias=bias, kActivation=ACTIVATIONS[activation], kProducerRegisters=producer,
        kConsumerRegisters=consumer, kSharedBytes=shared, kNormHeads=heads is not None and heads.norms is not None,
        kBlockShift=block_size.bit_length() - 1 if is_power else -1, kLeft=_LEFT,
        kOneTile=one_tile,
    )  # fmt: skip


def plan_embed_stream(
    tokens: Operand, table: Operand, gamma: Operand, x: Operand, to: Rows, device: DeviceInfo
) -> tuple[Step, ...]:
    """The launch: x = table[tokens], to = x * gamma with x's squares.  UnsupportedError names every obstacle.

    tokens: i32 [rows].  table: bf16 [words, columns].  gamma: bf16 [columns].  x: bf16 [rows, columns], dense.
    """
    rows, columns = x.shape
    obstacles = [] if device.arch == ARCH else [f"it needs {ARCH}, the device is {device.arch}"]
    obstacles += to.obstacles(dtypes.bf16 if to.scales is None else dtypes.e4m3)
    if columns % BLOCK:
        obstacles.append(f"{columns} columns are no whole blocks of {BLOCK}")
    if any(t.dtype != dtypes.bf16 for t in (table, gamma, x)) or tokens.dtype != dtypes.i32:
        obstacles.append("rows are not bf16, or tokens not i32")
    if table.strides[1] != 1 or table.strides[0] % 4 or not table.is_aligned(8):
        obstacles.append("rows of the table are not read four elements at a time")
    if to.squares is None:
        obstacles.append("there is no memory for sums of squares")
    if obstacles:
        raise UnsupportedError("embed_stream", obstacles, "embed_tokens, and a norm")
    grid = (-(-columns // (4 * BLOCK * _EMBED_WARPS)), rows, 1)
    arguments = (tokens, table, gamma, x, *to.arguments, table.shape[0], columns, table.strides[0])
    kernel = embed_stream_kernel(codes=to.scales is not None, two_parts=to.has_two_parts)
    reason = "a warp has 512 columns of a token"
    return (Step(kernel, grid, (_EMBED_WARPS * 32, 1, 1), arguments, programmatic=True, reason=reason),)


def embed_stream_kernel(*, codes: bool, two_parts: bool) -> KernelSpec:
    """The kernel of one configuration."""
    return kernel_spec(
        "embedding/embed_stream.cu", "embed_stream", _EMBED_PARAMS, archs=(ARCH,), max_registers=64,
        kWarps=_EMBED_WARPS, kCodes=codes, kTwoParts=two_parts,
    )  # fmt: skip


def representative_specs() -> list[KernelSpec]:
    """Kernels that stand for all."""
    cache = dense("k_cache", (100, 16, 8, BLOCK), dtypes.bf16)
    slots, positions = dense("slots", (64,), dtypes.i64), dense("positions", (64,), dtypes.i32)
    heads = Heads((cache, cache), slots, positions, dense("table", (4096, BLOCK), dtypes.f32))
    normed = heads._replace(norms=(dense("gamma", (BLOCK,), dtypes.bf16),) * 2)
    return [
        embed_stream_kernel(codes=True, two_parts=False), embed_stream_kernel(codes=True, two_parts=True),
        embed_stream_kernel(codes=False, two_parts=False),
        few_rows_kernel("heads", 2, norm=True, heads=normed),
        few_rows_kernel("heads", norm=True, bias=True, heads=heads, one_tile=False),
        few_rows_kernel("heads", 2, two_parts=True, rows_x=16, norm=True, heads=normed),
        few_rows_kernel("gates", norm=True, activation="silu"),
        few_rows_kernel("gates", activation="gelu_tanh", one_tile=False),
        few_rows_kernel("gates", two_parts=True, norm=True, activation="silu"),
        few_rows_kernel("stream", 3), few_rows_kernel("stream", 2), few_rows_kernel("stream", one_tile=False),
        few_rows_kernel("stream", 3, two_parts=True, rows_x=16), few_rows_kernel("project", norm=True),
        few_rows_kernel("project", 2, norm=True, bias=True), few_rows_kernel("project", two_parts=True, norm=True),
        few_rows_kernel("heads", 2, codes=False, rows_x=16, norm=True, heads=normed),
        few_rows_kernel("heads", codes=False, norm=True, bias=True, heads=heads, one_tile=False),
        few_rows_kernel("gates", codes=False, norm=True, activation="silu"),
        few_rows_kernel("gates", codes=False, rows_x=32, norm=True, activation="silu"),
        few_rows_kernel("stream", 3, codes=False), few_rows_kernel("stream", codes=False, one_tile=False),
        few_rows_kernel("project", 2, codes=False, norm=True, bias=True),
    ]  # fmt: skip
