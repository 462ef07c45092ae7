"""Keys and values out of a paged e4m3 cache as packed 16-bit tensors (`cuda_src/kv/gather.cu`)."""

from __future__ import annotations

from cki import dtypes
from cki.dtypes import DType
from cki.kernel import KernelSpec, kernel_spec
from cki.operand import Operand
from cki.plan import Step

_THREADS = 256


def plan_gather_cache(
    cache: tuple[Operand, Operand], scales: tuple[Operand, Operand], block_table: Operand, offsets: Operand,
    packed: tuple[Operand, Operand],
) -> tuple[Step, ...]:  # fmt: skip
    """The launch.

    cache: keys and values, e4m3 [blocks, block_size, kv_heads, head_dim], dense.  scales: f32 [blocks, block_size,
    kv_heads].  block_table: i32 [sequences, columns].  offsets: i32 [sequences + 1], where each sequence's keys begin.
    packed: f16 or bf16 [keys, kv_heads, head_dim], dense; rows from offsets[-1] on are left alone.
    """
    k, v = cache
    blocks, block_size, heads, dim = k.shape
    assert k.shape == v.shape
    assert dim % 8 == 0
    keys = packed[0].shape[0]
    units = keys * heads * dim // 8
    step = Step(
        gather_kernel(packed[0].dtype, heads, dim, block_size), (-(-units // _THREADS), 2, 1), (_THREADS, 1, 1),
        (k, v, *scales, block_table, offsets, *packed, block_table.shape[0], blocks, keys, block_table.strides[0]),
        reason=f"up to {keys} keys of {heads} x {dim}",
    )  # fmt: skip
    return (step,)


def gather_kernel(dtype: DType, heads: int, head_dim: int, block_size: int) -> KernelSpec:
    """The kernel of one configuration."""
    return kernel_spec(
        "kv/gather.cu", "gather_cache", "P" * 8 + "iii" + "q",
        Element=dtype, kThreads=_THREADS, kHeadDim=head_dim, kHeads=heads, kBlockSize=block_size,
    )  # fmt: skip


def representative_specs(arch: str) -> list[KernelSpec]:
    """Kernels that stand for all: both types."""
    return [gather_kernel(dtypes.f16, 3, 64, 16), gather_kernel(dtypes.bf16, 8, 128, 16)]
