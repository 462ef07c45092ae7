"""`merge_states`: attention over all keys from attentions over parts of them (`cuda_src/kv/merge_states.cu`)."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from cki import dtypes
from cki.device import DeviceInfo
from cki.dtypes import DType
from cki.errors import UnsupportedError
from cki.heuristics.paged import SERIAL_ARCHS
from cki.kernel import ARCHITECTURES, KernelSpec, kernel_spec
from cki.operand import Operand
from cki.ops.call import call
from cki.ops.spec import Input, OpSpec, OutputSpec, Problem
from cki.plan import ArgumentValue, NullPointer, Plan, Step

_FLOATS = (dtypes.f32, dtypes.f16, dtypes.bf16)
_THREADS = 128
_MAX_DIM = 1024
_ROW_AXES = 3


def merge_states(
    outs: Any, lses: Any, *, out: Any = None, lse_out: Any = None, stream: Any = None
) -> tuple[Any, Any]:
    """The attention over all keys from attentions over disjoint parts of them (cascades, split contexts, rings).

    outs: [states, ..., dim], f32, f16 or bf16, up to three axes in the middle, dim 1 to 1024; outs[i] is of part i.
    lses: f32 [states, ...], natural logarithms of the sums of exponentials.  Any strides: the lse of
    `cki.attention`, [batch, heads, queries], becomes [batch, queries, heads] by a transposed view.
    out, lse_out: where to write.

    Returns (out [..., dim], lse [...]):  lse = ln sum_i exp(lses[i]),  out = sum_i exp(lses[i] - lse) outs[i].

    A state with lse -inf saw no key and has no influence, whatever its output holds; a row of such states only gives 0,
    and lse -inf.  Sums are fp32.  Raises InvalidArgumentError or InvalidTypeError before any launch.
    Section 3.1 of Juravsky et al. 2024, arXiv 2402.05099.
    """
    result: tuple[Any, Any] = call(MERGE_STATES, (outs, lses), (), (out, lse_out), stream)
    return result


def _check(problem: Problem) -> None:
    outs, lses = problem["outs"], problem["lses"]
    if outs.dtype not in _FLOATS:
        problem.reject_type(f"outs is {outs.dtype}", "outs of f32, f16 or bf16")
    if lses.dtype != dtypes.f32:
        problem.reject_type(f"lses is {lses.dtype}", "lses of f32")
    if not 2 <= outs.ndim <= _ROW_AXES + 2:
        problem.reject(
            f"outs has shape {outs.shape}", "outs of shape [states, ..., dim] with up to 3 axes in the middle"
        )
        return
    if outs.shape[0] == 0:
        problem.reject(f"outs has shape {outs.shape}: no state", "at least one state")
    if outs.shape[0] >= 2**31:
        problem.reject(f"outs has shape {outs.shape}: {outs.shape[0]} states", "fewer than 2**31 states")
    if not 1 <= outs.shape[-1] <= _MAX_DIM:
        problem.reject(f"outs has shape {outs.shape}", f"a last axis of 1 to {_MAX_DIM}")
    if lses.shape != outs.shape[:-1]:
        problem.reject(
            f"lses has shape {lses.shape}, outs has shape {outs.shape}", f"lses of shape {outs.shape[:-1]}"
        )


def _infer(problem: Problem) -> Mapping[str, OutputSpec]:
    outs = problem["outs"]
    return {"out": OutputSpec(outs.shape[1:], outs.dtype), "lse": OutputSpec(outs.shape[1:-1], dtypes.f32)}


def _three(strides: tuple[int, ...]) -> tuple[int, ...]:
    """Strides of the row axes, missing leading axes with stride 0."""
    return (0,) * (_ROW_AXES - len(strides)) + strides


def _vector_size(outs: Operand, out: Operand) -> int:
    """Elements that every row of both lets a thread move at once: up to 16 bytes of `outs`, else one."""
    for nbytes in (16, 8, 4):
        size = nbytes // outs.dtype.itemsize
        if (
            size > 1
            and outs.shape[-1] % size == 0
            and all(t.strides[-1] == 1 and t.is_aligned(size * t.dtype.itemsize) for t in (outs, out))
        ):
            return size
    return 1


def merge_kernel(
    dtype: DType, dim: int, vector_size: int, result: DType | None = None, programmatic: bool = False
) -> KernelSpec:
    """The kernel for rows of `dim` elements, `vector_size` of them a thread.  result: None for dtype."""
    return kernel_spec(
        "kv/merge_states.cu", "merge_states", "PPPPiqii" + "q" * 16, max_registers=64,
        archs=tuple(arch for arch in ARCHITECTURES if not programmatic or arch not in SERIAL_ARCHS),
        Element=dtype, Result=result or dtype, kDim=dim, kVectorSize=vector_size, kThreads=_THREADS,
        kProgrammatic=programmatic,
    )  # fmt: skip


def plan_merge_states(
    outs: Operand, lses: Operand, out: Operand, lse: Operand | None, programmatic: bool = False
) -> tuple[Step, ...]:
    """The launch of `merge_states` on checked operands; none for an empty output.

    out may be of another type than outs.  programmatic: it begins while the launch before it ends (sm_90 and later).
    """
    extents = (1,) * (_ROW_AXES - len(lses.shape) + 1) + lses.shape[1:]
    rows, dim = math.prod(lses.shape[1:]), outs.shape[-1]
    if not rows:
        return ()
    size = _vector_size(outs, out)
    blocks = -(-rows * (dim // size) // _THREADS)
    if blocks >= 2**31:
        raise UnsupportedError(
            f"merge_states: {blocks} blocks", ["a grid holds 2**31 - 1 blocks"], "fewer rows"
        )
    arguments: tuple[ArgumentValue, ...] = (
        outs, lses, out, lse or NullPointer(), outs.shape[0], rows, extents[1], extents[2],
        outs.strides[0], *_three(outs.strides[1:-1]), outs.strides[-1], lses.strides[0], *_three(lses.strides[1:]),
        *_three(out.strides[:-1]), out.strides[-1], *_three(lse.strides if lse else ()),
    )  # fmt: skip
    reason = f"{outs.shape[0]} states, {rows} rows of {dim}, {size} elements a thread"
    kernel = merge_kernel(outs.dtype, dim, size, out.dtype, programmatic)
    return (
        Step(kernel, (blocks, 1, 1), (_THREADS, 1, 1), arguments, programmatic=programmatic, reason=reason),
    )


def _plan(problem: Problem, outputs: Mapping[str, Operand], device: DeviceInfo) -> Plan:
    return Plan(plan_merge_states(problem["outs"], problem["lses"], outputs["out"], outputs["lse"]))


MERGE_STATES = OpSpec(
    name="merge_states",
    inputs=(Input("outs"), Input("lses")),
    attributes=(),
    outputs=("out", "lse"),
    check=_check,
    infer=_infer,
    plan=_plan,
)


def representative_specs(arch: str) -> list[KernelSpec]:
    """Kernels that stand for all: types, vector sizes."""
    return [
        merge_kernel(dtypes.bf16, 128, 8),
        merge_kernel(dtypes.f32, 128, 4),
        merge_kernel(dtypes.f16, 7, 1),
        *([merge_kernel(dtypes.f32, 128, 4, dtypes.bf16, True)] if arch == "sm_90a" else []),
    ]
