"""An encoder's first and last steps: token embedding, and pooling of tokens into one vector a sentence.

Tables and activations are f32, f16 or bf16; sums are fp32 and rounded once.  Kernels: `cuda_src/embedding`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from cki import config, dtypes
from cki.device import DeviceInfo
from cki.dtypes import DType
from cki.errors import InvalidArgumentError, UnsupportedError
from cki.heuristics.norm import vector_size
from cki.kernel import KernelSpec, kernel_spec
from cki.operand import Operand
from cki.ops.call import call
from cki.ops.spec import Attribute, Input, OpSpec, OutputSpec, Problem
from cki.ops.validate import host_values, reads_values, shape_of
from cki.plan import ArgumentValue, NullPointer, Plan, Step

_FLOATS = (dtypes.f32, dtypes.f16, dtypes.bf16)
_FLOAT_NAMES = "f32, f16 or bf16"
_INDICES = (dtypes.i32, dtypes.i64)
_MASKS = (dtypes.bool_, dtypes.u8, dtypes.i8, dtypes.i32, dtypes.i64)
_LENGTHS = (dtypes.i32, dtypes.i64)
_EMBED_THREADS = 128
_POOL_THREADS = 512
_MAX_BLOCKS = 1 << 20


def embed_tokens(
    token_ids: Any, word_table: Any, position_table: Any = None, token_type_ids: Any = None, type_table: Any = None,
    positions: Any = None, *, out: Any = None, stream: Any = None,
) -> Any:  # fmt: skip
    """word_table[token_ids] + position_table[positions] + type_table[token_type_ids], the last two where given.

    token_ids: [seq] or [batch, seq] of int32 or int64.  Tables: [entries, width] of f32, f16 or bf16, all alike; rows
    may lie apart, elements of a row may not.  positions: the shape of token_ids, or [seq]; None counts 0, 1, ... along
    the sequence.  token_type_ids: the shape of token_ids; None with a type_table means type 0.  The sum is fp32,
    rounded to the tables' type.

    Returns [..., seq, width].  An id outside its table adds zeros and reads nothing; with CKI_VALIDATE=1 it raises
    InvalidArgumentError instead.
    Raises InvalidArgumentError or InvalidTypeError, before any launch, with every rule that is broken.
    """
    if config.flag("CKI_VALIDATE"):
        validate_ids(token_ids, word_table, position_table, token_type_ids, type_table, positions)
    inputs = (token_ids, word_table, position_table, token_type_ids, type_table, positions)
    return call(EMBED_TOKENS, inputs, (), (out,), stream)


def mean_pool(x: Any, mask: Any, *, normalize: bool = True, out: Any = None, stream: Any = None) -> Any:
    """The mean over each sequence's kept tokens, then its L2 normalisation, as sentence-transformers computes them.

    x: [batch, seq, width] of f32, f16 or bf16, any strides.  mask: [batch, seq], bool, uint8, int8, int32 or
    int64, nonzero keeps; or lengths [batch], int32 or int64: the first tokens are kept.  normalize: divide by
    max(L2 norm, 1e-12).

    Returns [batch, width] of x's type; sums are fp32.  Hidden tokens are not read: NaN in padding does not matter.  A
    sequence with none kept gives zeros.
    Raises InvalidArgumentError or InvalidTypeError, before any launch, with every rule that is broken.
    """
    return call(MEAN_POOL, (x, mask), (normalize,), (out,), stream)


@reads_values
def validate_ids(
    token_ids: Any, word_table: Any, position_table: Any, token_type_ids: Any, type_table: Any, positions: Any
) -> None:
    """Raise InvalidArgumentError for ids outside their tables, after waiting for the device."""
    pairs = (
        ("token_ids", token_ids, "word_table", word_table),
        ("positions", positions, "position_table", position_table),
        ("token_type_ids", token_type_ids, "type_table", type_table),
    )
    problems = []
    for name, ids, table_name, table in pairs:
        if ids is None or not shape_of(table):  # what is no table is left to the rules
            continue
        values, entries = host_values(ids, name), int(table.shape[0])
        outside = values[(values < 0) | (values >= entries)]
        if outside.size:
            problems.append(f"{name} holds {int(outside[0])}, but {table_name} has {entries} rows")
    if problems:
        raise InvalidArgumentError(
            "embed_tokens: ids outside their tables", problems, "ids from 0 to rows - 1"
        )


def _check_embed(problem: Problem) -> None:
    ids, word = problem["token_ids"], problem["word_table"]
    if ids.ndim not in (1, 2):
        problem.reject(f"token_ids has shape {ids.shape}", "token_ids of shape [seq] or [batch, seq]")
    elif ids.shape[-1] >= 2**31:
        problem.reject(f"token_ids has shape {ids.shape}", "fewer than 2**31 tokens a sequence")
    for name in ("token_ids", "token_type_ids", "positions"):
        tensor = problem.get(name)
        if tensor is not None and tensor.dtype not in _INDICES:
            problem.reject_type(f"{name} is {tensor.dtype}", f"{name} of int32 or int64")
    if word.dtype not in _FLOATS:
        problem.reject_type(f"word_table is {word.dtype}", f"tables of {_FLOAT_NAMES}")
    for name in ("word_table", "position_table", "type_table"):
        table = problem.get(name)
        if table is None:
            continue
        if table.ndim != 2 or 0 in table.shape:
            problem.reject(
                f"{name} has shape {table.shape}", f"{name} of shape [entries, width], none of them 0"
            )
            continue
        if table.shape[1] != 1 and table.strides[1] != 1:
            problem.reject(
                f"{name} has strides {table.strides}: rows with gaps between elements",
                f"{name} with dense rows",
            )
        if word.ndim == 2 and table.shape[1] != word.shape[1]:
            problem.reject(
                f"{name} has shape {table.shape}, word_table has shape {word.shape}",
                f"{name} of width {word.shape[1]}",
            )
        if table.dtype != word.dtype:
            problem.reject_type(
                f"{name} is {table.dtype}, word_table is {word.dtype}", f"{name} of {word.dtype}"
            )
    _check_companions(problem, ids)


def _check_companions(problem: Problem, ids: Operand) -> None:
    """Ids that belong to a table other than the word table."""
    types, positions, table = (problem.get(n) for n in ("token_type_ids", "positions", "position_table"))
    if types is not None and problem.get("type_table") is None:
        problem.reject("token_type_ids is given without type_table", "a type_table")
    if types is not None and types.shape != ids.shape:
        problem.reject(
            f"token_type_ids has shape {types.shape}, token_ids has shape {ids.shape}",
            f"token_type_ids of shape {ids.shape}",
        )
    if positions is not None and table is None:
        problem.reject("positions is given without position_table", "a position_table")
    if positions is not None and positions.shape not in (ids.shape, ids.shape[-1:]):
        problem.reject(
            f"positions has shape {positions.shape}, token_ids has shape {ids.shape}",
            f"positions of shape {ids.shape} or {ids.shape[-1:]}",
        )
    if (
        positions is None
        and table is not None
        and table.ndim == 2
        and ids.ndim
        and ids.shape[-1] > table.shape[0]
    ):
        problem.reject(
            f"the sequence has {ids.shape[-1]} tokens, position_table has {table.shape[0]} rows",
            "a shorter sequence, or positions",
        )


def _infer_embed(problem: Problem) -> Mapping[str, OutputSpec]:
    word = problem["word_table"]
    return {"out": OutputSpec((*problem["token_ids"].shape, word.shape[1]), word.dtype)}


def _matrix_strides(operand: Operand | None) -> tuple[int, int]:
    """Strides of [batch, seq]; a missing batch axis has stride 0."""
    if operand is None:
        return 0, 0
    return (0, operand.strides[0]) if operand.ndim == 1 else (operand.strides[0], operand.strides[1])


def plan_embed_tokens(
    token_ids: Operand, word_table: Operand, out: Operand, device: DeviceInfo, *, position_table: Operand | None = None,
    token_type_ids: Operand | None = None, type_table: Operand | None = None, positions: Operand | None = None,
) -> tuple[Step, ...]:  # fmt: skip
    """Steps of one embedding over operands (see `embed_tokens`).  `out` has any strides."""
    width, length = word_table.shape[1], token_ids.shape[-1]
    tables = [table for table in (word_table, position_table, type_table) if table is not None]
    size = vector_size([out, *tables], width)
    kernel = embed_kernel(
        word_table.dtype, width, size, token_ids.dtype,
        positions=None if positions is None else positions.dtype,
        types=None if token_type_ids is None else token_type_ids.dtype,
        position_table=position_table is not None, type_table=type_table is not None,
    )  # fmt: skip
    lanes = _threads_per_token(width, size)
    blocks = min(_MAX_BLOCKS, -(-token_ids.size // (_EMBED_THREADS // lanes)))
    pointers: tuple[ArgumentValue, ...] = tuple(
        operand or NullPointer()
        for operand in (token_ids, word_table, position_table, token_type_ids, type_table, positions)
    )
    rows = tuple(0 if t is None else t.shape[0] for t in (word_table, position_table, type_table))
    row_strides = tuple(0 if t is None else t.strides[0] for t in (word_table, position_table, type_table))
    out_strides = (0, *out.strides) if out.ndim == 2 else out.strides
    arguments: tuple[ArgumentValue, ...] = (
        *pointers, out, token_ids.size, length, width, *rows, *_matrix_strides(token_ids),
        *_matrix_strides(token_type_ids), *_matrix_strides(positions), *row_strides, *out_strides,
    )  # fmt: skip
    reason = f"{lanes} threads a token of width {width}, {size} elements an access"
    return (Step(kernel, (blocks, 1, 1), (_EMBED_THREADS, 1, 1), arguments, reason=reason),)


def _threads_per_token(width: int, size: int) -> int:
    """A power of two, up to a warp: no more than the row has vectors."""
    return min(32, 1 << (width // size - 1).bit_length())


def embed_kernel(
    dtype: DType, width: int, size: int, index: DType, *, positions: DType | None = None, types: DType | None = None,
    position_table: bool = True, type_table: bool = True,
) -> KernelSpec:  # fmt: skip
    """The kernel for tables of `width`, read in vectors of `size`.  index, positions, types: types of the ids given."""
    return kernel_spec(
        "embedding/embed_tokens.cu", "embed_tokens", "PPPPPPPqiiiiiqqqqqqqqqqqq", max_registers=64,
        Element=dtype, Index=index, PositionIndex=positions or index, TypeIndex=types or index,
        kHasPositions=positions is not None, kHasTypeIds=types is not None, kHasPositionTable=position_table,
        kHasTypeTable=type_table, kThreads=_EMBED_THREADS, kThreadsPerToken=_threads_per_token(width, size),
        kVectorSize=size, kMinBlocks=8,
    )  # fmt: skip


def _plan_embed(problem: Problem, outputs: Mapping[str, Operand], device: DeviceInfo) -> Plan:
    return Plan(plan_embed_tokens(
        problem["token_ids"], problem["word_table"], outputs["out"], device,
        position_table=problem.get("position_table"), token_type_ids=problem.get("token_type_ids"),
        type_table=problem.get("type_table"), positions=problem.get("positions"),
    ))  # fmt: skip


def _check_pool(problem: Problem) -> None:
    x, mask = problem["x"], problem["mask"]
    if x.dtype not in _FLOATS:
        problem.reject_type(f"x is {x.dtype}", f"x of {_FLOAT_NAMES}")
    if x.ndim != 3 or x.shape[-1] == 0:
        problem.reject(f"x has shape {x.shape}", "x of shape [batch, seq, width], width at least 1")
        problem.require_dtypes(_MASKS, "bool, uint8, int8, int32 or int64", "mask")
        return
    allowed: tuple[DType, ...]
    if mask.shape == x.shape[:1]:
        allowed, names = _LENGTHS, "lengths of int32 or int64"
    elif mask.shape == x.shape[:2]:
        allowed, names = _MASKS, "a mask of bool, uint8, int8, int32 or int64"
    else:
        problem.reject(
            f"mask has shape {mask.shape}, x has shape {x.shape}",
            f"a mask of shape {x.shape[:2]} or lengths of shape {x.shape[:1]}",
        )
        problem.require_dtypes(_MASKS, "bool, uint8, int8, int32 or int64", "mask")
        return
    if mask.dtype not in allowed:
        problem.reject_type(f"mask of shape {mask.shape} is {mask.dtype}", names)


def _infer_pool(problem: Problem) -> Mapping[str, OutputSpec]:
    x = problem["x"]
    return {"out": OutputSpec((x.shape[0], x.shape[2]), x.dtype)}


def plan_mean_pool(
    x: Operand, mask: Operand, out: Operand, device: DeviceInfo, *, normalize: bool = True, packed: bool = False,
    first_only: bool = False,
) -> tuple[Step, ...]:  # fmt: skip
    """Steps of one pooling over operands (see `mean_pool`).  UnsupportedError for rows beyond shared memory.

    packed: x is [1, tokens, width], sequences one behind the other, and mask their offsets [batch + 1].  first_only:
    of each the first token alone.
    """
    _, length, width = x.shape
    batch = mask.shape[0] - 1 if packed else x.shape[0]
    size = vector_size([x], width)
    kernel = pool_kernel(
        x.dtype, width, size, mask.dtype, lengths=mask.ndim == 1, normalize=normalize, packed=packed,
        first_only=first_only,
    )  # fmt: skip
    slices, slice_threads = _slices(width, size)
    threads = slices * slice_threads
    smem = 4 * (width + threads * size)
    if smem > device.shared_memory_per_block:
        widest = device.shared_memory_per_block // 4 - threads * size
        raise UnsupportedError(
            f"mean_pool: no kernel for this problem on {device.name}",
            [
                f"width {width} needs {smem} bytes of shared memory, the device has {device.shared_memory_per_block}"
            ],
            f"width up to {widest}",
        )
    mask_strides = (mask.strides[0], 0) if mask.ndim == 1 else mask.strides
    arguments: tuple[ArgumentValue, ...] = (
        x,
        mask,
        out,
        length,
        width,
        *x.strides,
        *mask_strides,
        *out.strides,
    )
    reason = f"{slices} slices of the sequence, {size} elements an access"
    return (Step(kernel, (batch, 1, 1), (threads, 1, 1), arguments, smem=smem, reason=reason),)


def _slices(width: int, size: int) -> tuple[int, int]:
    """(slices of the sequence, threads of each): as many threads as the row has vectors, in warps."""
    threads = min(_POOL_THREADS, -(-(width // size) // 32) * 32)
    return _POOL_THREADS // threads, threads


def pool_kernel(
    dtype: DType, width: int, size: int, mask: DType, *, lengths: bool, normalize: bool, packed: bool = False,
    first_only: bool = False,
) -> KernelSpec:  # fmt: skip
    """The kernel for rows of `width`, read in vectors of `size`."""
    slices, slice_threads = _slices(width, size)
    return kernel_spec(
        "embedding/mean_pool.cu", "mean_pool", "PPPiiqqqqqqq", max_registers=128 if packed else 64, Element=dtype,
        Mask=mask, kMaskIsLengths=lengths, kNormalize=normalize, kPacked=packed, kFirstOnly=first_only,
        kThreads=slices * slice_threads, kSlices=slices, kVectorSize=size, kMinBlocks=1 if packed else 2,
    )  # fmt: skip


def _plan_pool(problem: Problem, outputs: Mapping[str, Operand], device: DeviceInfo) -> Plan:
    normalize = problem.attribute("normalize")
    return Plan(plan_mean_pool(problem["x"], problem["mask"], outputs["out"], device, normalize=normalize))


EMBED_TOKENS = OpSpec(
    name="embed_tokens",
    inputs=(
        Input("token_ids"), Input("word_table"), Input("position_table", True), Input("token_type_ids", True),
        Input("type_table", True), Input("positions", True),
    ),
    attributes=(),
    outputs=("out",),
    check=_check_embed,
    infer=_infer_embed,
    plan=_plan_embed,
)  # fmt: skip

MEAN_POOL = OpSpec(
    name="mean_pool",
    inputs=(Input("x"), Input("mask")),
    attributes=(Attribute("normalize", bool, True),),
    outputs=("out",),
    check=_check_pool,
    infer=_infer_pool,
    plan=_plan_pool,
)


def representative_specs(arch: str) -> list[KernelSpec]:
    """Kernels that stand for all, for the compile test and list-kernels."""
    del arch  # the same for all
    specs = []
    for dtype in _FLOATS:
        size = 16 // dtype.itemsize
        for vector in (size, 1):
            specs.append(embed_kernel(dtype, 384, vector, dtypes.i64, types=dtypes.i64))
            specs.append(
                embed_kernel(dtype, 1024, vector, dtypes.i32, positions=dtypes.i32, type_table=False)
            )
            specs.append(pool_kernel(dtype, 384, vector, dtypes.bool_, lengths=False, normalize=True))
            specs.append(pool_kernel(dtype, 1024, vector, dtypes.i64, lengths=True, normalize=False))
        specs.append(pool_kernel(dtype, 384, size, dtypes.i32, lengths=True, normalize=True, packed=True))
    return specs
