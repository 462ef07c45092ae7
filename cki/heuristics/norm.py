"""How a norm's rows are spread over threads and blocks: pure functions of shapes, alignment and device.

The kernels (`cuda_src/norm`) are bound by memory: they read each element once and write it once.  What decides
their speed is how many bytes each SM has in flight.  At 4.3 TB/s and a latency of 0.7 to 1 microsecond an H200 needs
23 to 33 KB an SM at every moment; blocks that wait in a reduction have none, so the aim is 64 KB or more.

* Vectors of 16 bytes wherever width and alignment allow, else the largest that divides both.
* A row of up to 1024 elements belongs to a warp or a power-of-two part of one, and several rows share a block: no
  barrier.  A wider row belongs to a block, with about four vectors a thread.
* Rows over 32768 elements (24576 with a residual, of fp32 half as many) do not fit in registers; the `*_long` kernels
  read them again from L2.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from cki.device import DeviceInfo
from cki.operand import Operand

#: Widest row: the kernels count columns in 32 bits.
MAX_WIDTH = 1 << 30
_REGISTERS_PER_SM = 65536


@dataclass(frozen=True)
class RowShape:
    """What a configuration is chosen for.

    size: elements that every tensor moves in one access (`vector_size`).  itemsize: bytes of an element;
    weight_itemsize: of a weight.  inputs: row tensors read (2 with a residual).  weights: 0, 1 (weight) or 2 (weight
    and bias).  centred: layer norm, which holds more at a time than RMS norm.
    """

    rows: int
    width: int
    size: int
    itemsize: int
    weight_itemsize: int = 4
    inputs: int = 1
    weights: int = 1
    centred: bool = False

    @property
    def vectors(self) -> int:
        """Accesses that a row takes; the size divides the width."""
        return self.width // self.size

    @property
    def max_threads(self) -> int:
        """Of a block: with two inputs a thread needs more than the 64 registers that 1024 threads have each."""
        return 1024 if self.inputs == 1 else 768


@dataclass(frozen=True)
class RowConfig:
    """How a norm kernel is specialised and launched.

    threads_per_row: up to 32 a part of a warp, above that the whole block.
    vectors_per_thread: 0 for the kernels that do not hold the row in registers.
    full_row: the row fills all vectors of all threads, so that the kernel tests no column against the width.
    prefetch: a block loads its next row before it reduces the present one.  hold_weight: weight and bias stay in
    registers from row to row.  Both are of use where a block walks over several rows.
    min_blocks: blocks an SM that the register budget must allow.
    blocks_per_sm: the grid's size; 0: a block for each row (or group of rows).
    """

    name: str
    size: int
    threads_per_row: int
    rows_per_block: int
    vectors_per_thread: int
    full_row: bool = False
    prefetch: bool = False
    hold_weight: bool = False
    min_blocks: int = 1
    blocks_per_sm: int = 0

    @property
    def threads(self) -> int:
        """Threads of a block."""
        return self.threads_per_row * self.rows_per_block

    @property
    def max_registers(self) -> int:
        """Registers a thread may use so that `min_blocks` blocks fit an SM (they are given out by eights)."""
        return min(255, _REGISTERS_PER_SM // (self.threads * self.min_blocks) // 8 * 8)

    def constants(self) -> dict[str, Any]:
        """What a kernel of rows is specialised by: one that holds no row in registers by three numbers only."""
        found = {
            "kThreadsPerRow": self.threads_per_row, "kVectorSize": self.size, "kMinBlocks": self.min_blocks,
        }  # fmt: skip
        if self.vectors_per_thread:
            found |= {
                "kRowsPerBlock": self.rows_per_block, "kVectorsPerThread": self.vectors_per_thread,
                "kFullRow": self.full_row,
            }  # fmt: skip
        return found

    def reason(self, rows: int, width: int) -> str:
        """What a launch says of itself."""
        threads = f"{self.threads_per_row} threads a row"
        return f"{self.name}: {rows} rows of {width}, {self.size} elements an access, {threads}"

    def grid(self, rows: int, device: DeviceInfo) -> int:
        """Number of blocks."""
        blocks = -(-rows // self.rows_per_block)
        return min(blocks, device.sm_count * self.blocks_per_sm) if self.blocks_per_sm else blocks


def vector_size(tensors: Sequence[Operand], width: int) -> int:
    """Elements that every tensor can move in accesses of at most 16 bytes; the first tensor's type sets the most.

    A vector of fp32 weights beside 16-bit rows is two accesses.  1 where a last axis is not dense.
    """
    if width > 1 and any(tensor.strides[-1] != 1 for tensor in tensors):
        return 1
    size = 16 // tensors[0].dtype.itemsize
    while size > 1 and (
        width % size
        or not all(tensor.is_aligned(min(16, size * tensor.dtype.itemsize)) for tensor in tensors)
    ):
        size //= 2
    return size


def choose(shape: RowShape, device: DeviceInfo) -> RowConfig:
    """The configuration for a problem."""
    return candidates(shape, device)[0]


def candidates(shape: RowShape, device: DeviceInfo) -> list[RowConfig]:
    """Configurations worth measuring for a problem (`bench/norms.py` does); the first is the choice."""
    few_rows = shape.rows <= 2 * device.sm_count
    in_warp, in_block = _values_per_thread(shape)
    if shape.width <= 32 * in_warp:
        return _rows_in_warps(shape, in_warp // shape.size, few_rows)
    if shape.width <= shape.max_threads * in_block:
        return _row_in_block(shape, in_block // shape.size, few_rows)
    return [RowConfig("long", shape.size, 1024, 1, 0)]


def _values_per_thread(shape: RowShape) -> tuple[int, int]:
    """The most values that a thread holds of a row in a warp, and of a row in a block of up to `max_threads`.  16-byte
    vectors of 16-bit elements wait for their use in half the registers."""
    if shape.size * shape.itemsize < 16:
        return 16, 16
    return 32, 32 if shape.itemsize == 2 else 16


def _rows_in_warps(shape: RowShape, most: int, few_rows: bool) -> list[RowConfig]:
    """Rows of a warp or less.  Among the splits of a row over 1, 2, ... 32 lanes the one that leaves the fewest vectors
    empty, and of those the one nearest to two vectors a lane: enough loads in flight, few shuffles."""
    splits = []
    for lanes in (32, 16, 8, 4, 2, 1):
        per_lane = _rounded_up(-(-shape.vectors // lanes), exact=shape.vectors % lanes == 0)
        if per_lane <= most:
            splits.append((lanes * per_lane - shape.vectors, abs(per_lane - 2), lanes, per_lane))
    empty, _, lanes, per_lane = min(splits)
    rows = 32 // lanes if few_rows else 128 // lanes
    plain = RowConfig("warp", shape.size, lanes, rows, per_lane, full_row=empty == 0)
    return _variants(shape, plain, few_rows)


def _row_in_block(shape: RowShape, most: int, few_rows: bool) -> list[RowConfig]:
    """Rows of a block: a few wide threads keep more bytes in flight, many narrow ones end sooner."""
    wide, narrow = _block(shape, most), _block(shape, max(1, most // 2))
    if few_rows:
        return [_with_occupancy(shape, _block(shape, 1)), _with_occupancy(shape, wide)]
    return [*_variants(shape, wide, few_rows), *_variants(shape, narrow, few_rows)]


def _block(shape: RowShape, per_thread: int) -> RowConfig:
    threads = min(shape.max_threads, -(-shape.vectors // (32 * per_thread)) * 32)
    needed = -(-shape.vectors // threads)
    full = shape.vectors == threads * needed
    return RowConfig("block", shape.size, threads, 1, _rounded_up(needed, exact=full), full)


def _rounded_up(count: int, *, exact: bool) -> int:
    """Vectors a thread: exact where rows fill all threads, else a power of two, so that many widths share a kernel."""
    return count if exact else 1 << (count - 1).bit_length()


def _variants(shape: RowShape, plain: RowConfig, few_rows: bool) -> list[RowConfig]:
    """A block a row; blocks that walk over rows and prefetch; the same with the weights in registers."""
    found = [_with_occupancy(shape, plain)]
    if few_rows or plain.threads > 512:
        return found
    for suffix, hold in (("walk", False), ("walk-hold", True)):
        if hold and not shape.weights:
            continue
        walking = replace(plain, name=f"{plain.name}-{suffix}", prefetch=True, hold_weight=hold)
        walking = _with_occupancy(shape, walking)
        found.append(replace(walking, blocks_per_sm=walking.min_blocks))
    return found


def _with_occupancy(shape: RowShape, config: RowConfig) -> RowConfig:
    """The same with as many blocks an SM as its registers allow: estimated from compiled kernels, checked by a test."""
    values = config.vectors_per_thread * config.size
    words = max(1, values * shape.itemsize // 4)
    registers = 34 + values
    if not config.full_row:
        registers += values // 4 * shape.inputs
    if shape.centred:
        registers += 8 + values // 4
    if shape.inputs == 2:
        registers += values // 4
    if config.prefetch:
        registers += words * shape.inputs
    if config.hold_weight:
        registers += max(1, values * shape.weight_itemsize // 4) * shape.weights
    registers = -(-registers // 8) * 8
    blocks = min(16, 1536 // config.threads, _REGISTERS_PER_SM // (config.threads * registers))
    return replace(config, min_blocks=max(1, blocks))
