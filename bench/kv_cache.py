"""Host cost of a step of the paged KV cache: allocate, fill the tables, enqueue the uploads.

    python bench/kv_cache.py            # on the GPU when there is one, else on the simulated device: printed alone

A step gives every running sequence one token.  "spread": lengths out of phase, so that in each step about
sequences / block_size of them open a block.  "in phase": all open one in the same step.  "one": the same batch and no
new block, where only the small tables move.  Measured on the wall clock, one sample a step; the device is waited for
between steps, outside the timed part.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Sequence

import common
import numpy as np

from cki.memory import PagedKVCache

STEPS = 300


def measure(device: str, sequences: int, context: int, block_size: int, phase: str) -> common.Timing:
    """Microseconds of `prepare_step` for `sequences` sequences of about `context` tokens."""
    steps = STEPS if phase != "one" else min(STEPS, block_size - 1)
    longest = context + STEPS + block_size
    cache = PagedKVCache(
        1, sequences * -(-longest // block_size), num_kv_heads=1, head_dim=16, dtype="f16", block_size=block_size,
        max_sequences=sequences, max_blocks_per_sequence=-(-longest // block_size), max_step_tokens=longest,
        device=device,
    )  # fmt: skip
    ids = [cache.allocate_sequence() for _ in range(sequences)]
    aligned = context // block_size * block_size
    for index, sequence in enumerate(ids):
        cache.prepare_step([sequence], aligned + (index % block_size if phase == "spread" else 0))
    if phase == "one":
        cache.prepare_step(ids)  # opens the blocks
    samples = []
    for _ in range(steps):
        cache.seq_lens.numpy()  # waits
        start = time.perf_counter()
        cache.prepare_step(ids)
        samples.append((time.perf_counter() - start) * 1e6)
    p10, median, p90 = np.percentile(samples, [10, 50, 90])
    return common.Timing(median, p10, p90)


def main(argv: Sequence[str] | None = None) -> None:
    from cki.nvml import gpu_count

    argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    ).parse_args(argv)
    device = "cuda" if gpu_count() else "sim"
    rows = [
        common.row(
            "prepare_step", f"sequences={sequences} context={context} block_size={block_size} {phase}", "",
            "cki" if device == "cuda" else "cki (simulated device)",
            measure(device, sequences, context, block_size, phase),
        )
        for sequences, context in ((1, 4096), (64, 2048), (256, 1024), (256, 4096))
        for block_size, phase in ((16, "spread"), (16, "in phase"), (16, "one"), (1, "spread"), (64, "spread"))
    ]  # fmt: skip
    if device == "cuda":
        common.write_csv("kv_cache", rows)
    else:
        common.print_table(rows, list(rows[0]))


if __name__ == "__main__":
    main()
