"""From one decode step to the next without the host: tokens, lengths, slots (`cuda_src/sampling/advance.cu`).

tests/engine/advance_definition.py is the definition.
"""

from __future__ import annotations

from cki.kernel import KernelSpec, kernel_spec
from cki.operand import Operand
from cki.plan import Step

_THREADS = 128


def plan_advance(
    given: Operand, chosen: Operand, ends: Operand, limits: Operand, block_table: Operand, *, block_size: int,
    tokens: Operand, seq_lens: Operand, positions: Operand, slots: Operand,
) -> tuple[Step, ...]:  # fmt: skip
    """The launch, at the beginning of a decode step.

    given: u32 [1]; where it is not 0 the host has written the step's tokens and tables, and only it becomes 0.
    chosen: i32 [rows], the tokens that the last step chose.  ends: i32 [rows, columns], tokens that end a row; negative
    ones fill up.  limits: i32 [rows], the length at which it ends.  block_table: i32 [rows, columns].
    tokens i32, seq_lens i32, positions i32, slots i64 [rows]: of the last step, become those of the next.
    """
    rows = tokens.shape[0]
    assert all(
        t.strides[-1] == 1 for t in (chosen, ends, limits, block_table, tokens, seq_lens, positions, slots)
    )
    step = Step(
        advance_kernel(), (1, 1, 1), (_THREADS, 1, 1),
        (given, chosen, ends, limits, block_table, tokens, seq_lens, positions, slots, rows, ends.shape[1], block_size,
         block_table.shape[1], block_table.strides[0]),
        reason="one block for all rows",
    )  # fmt: skip
    return (step,)


def advance_kernel() -> KernelSpec:
    """The kernel; there is one."""
    return kernel_spec("sampling/advance.cu", "advance", "P" * 9 + "i" * 4 + "q", kThreads=_THREADS)
