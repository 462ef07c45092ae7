"""Few query rows over many keys, with several query heads a KV head: which kernel serves them best.

    python bench/attention_rows.py                              # 12 cells, about 20 s on an H200
    python bench/attention_rows.py --queries 4 16 --batch 1

32 query heads on 8 KV heads, head dimension 128, bf16, causal at the bottom right (the queries are the newest tokens).
`cki` is `cki.attention` as it chooses; `generic` the kernel of mma.sync; `hopper` tiles of 64 queries of one head;
`packed` tiles of 64 rows that are all heads of a group; `few` what `choose_few_rows` says, which also cuts keys;
`decode` is `cki.decode_attention` (16 queries at most); `fa3` and `fa3 splits` FlashAttention-3 without and with cut
keys, where `flash_attn_interface` imports.  Every call of ours is compared with float64 before it is timed (the bound
of the tests); all of a cell are replayed in turn (bench/common.py).  `vs_` columns are the others' time over that
row's.  `copy_share`: what reading keys and values once would take at 4.8 TB/s over the time.
Writes results/attention_rows.csv.
"""

from __future__ import annotations

import argparse
import importlib
import itertools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import attention
import common
import engine_models

import cki
from cki import dtypes
from cki.device import sim_device
from cki.heuristics.attention import AttentionTiles, choose_tiles
from cki.heuristics.attention_hopper import HopperTiles, choose_few_rows
from cki.kernel import KernelSpec
from cki.operand import dense
from cki.ops.attention import plan_attention
from cki.ops.call import call
from cki.ops.paged import plan_paged_attention

QUERIES = (1, 4, 16, 32, 64, 128)
BATCHES = (1, 16)
HEADS, KV_HEADS, DIM = 32, 8, 128
GROUP = HEADS // KV_HEADS
BYTES_PER_US = 4.8e6


class Cell(NamedTuple):
    batch: int
    queries: int
    keys: int = 4096

    @property
    def nbytes(self) -> int:
        """Of q, k, v and the output."""
        return 4 * DIM * self.batch * (self.queries * HEADS + self.keys * KV_HEADS)

    @property
    def flops(self) -> float:
        pairs = self.queries * self.keys - self.queries * (self.queries - 1) // 2
        return 4.0 * self.batch * HEADS * pairs * DIM

    def __str__(self) -> str:
        sizes = f"batch={self.batch} queries={self.queries} keys={self.keys}"
        return f"{sizes} heads={HEADS}/{KV_HEADS} head_dim={DIM} causal"


def make_inputs(cell: Cell, seed: int) -> tuple[Any, ...]:
    """(q, k, v, out, lengths) on the GPU."""
    import torch

    generator = torch.Generator(device="cuda").manual_seed(seed)

    def normal(*shape: int) -> Any:
        return torch.randn(shape, generator=generator, device="cuda").to(torch.bfloat16)

    q = normal(cell.batch, cell.queries, HEADS, DIM)
    k, v = (normal(cell.batch, cell.keys, KV_HEADS, DIM) for _ in range(2))
    lengths = torch.full((cell.batch,), cell.keys, dtype=torch.int32, device="cuda")
    return q, k, v, torch.empty_like(q), lengths


def with_tiles(tiles: Any) -> Callable[..., Any]:
    """`cki.attention` with these tiles."""
    spec, attributes = (
        attention.spec_with_tiles(tiles),
        (True, "bottom_right", None, (-1, -1), 0.0, False, 0.0, False, None),
    )
    return lambda q, k, v, out, lengths: call(spec, (q, k, v, *(None,) * 9), attributes, (out, None))


def tiles_of(cell: Cell) -> dict[str, AttentionTiles | HopperTiles]:
    """Those of `cki.attention` by name."""
    device = sim_device("sm_90a")  # the sizes of an H200
    rows = cell.queries * (GROUP if cell.queries < 64 else 1)
    few = choose_few_rows(cell.queries, cell.keys, cell.batch, KV_HEADS, GROUP, DIM, DIM, True, True, device)
    return {
        "generic": choose_tiles(rows, DIM, DIM, 2, True, device),
        "hopper": HopperTiles(1, 128, 2, False),
        "few": few,
        "packed": HopperTiles(1, 128, 2, False, heads=GROUP),
    }


def variants(cell: Cell) -> dict[str, Callable[..., Any]]:
    """Ours by name."""
    found: dict[str, Callable[..., Any]] = {
        "cki": lambda q, k, v, out, lengths: cki.attention(q, k, v, causal=True, out=out)
    }
    found |= {name: with_tiles(tiles) for name, tiles in tiles_of(cell).items()}
    if cell.queries <= 16:
        found["decode"] = lambda q, k, v, out, lengths: cki.decode_attention(q, k, v, lengths, out=out)
    return found


def kernels_of(cells: Sequence[Cell]) -> list[KernelSpec]:
    """Of all variants."""
    device = sim_device("sm_90a")
    steps: list[Any] = []
    for cell in cells:
        q = dense("q", (cell.batch, cell.queries, HEADS, DIM), dtypes.bf16)
        k = dense("k", (cell.batch, cell.keys, KV_HEADS, DIM), dtypes.bf16)
        for tiles in (None, *tiles_of(cell).values()):
            steps += plan_attention(q, k, k, q, device=device, causal=True, tiles=tiles)
        if cell.queries <= 16:
            lengths = dense("lengths", (cell.batch,), dtypes.i32)
            steps += plan_paged_attention(q, k, k, lengths, q, device).steps
    return list(dict.fromkeys(step.kernel for step in steps))


def fa3_calls() -> dict[str, Callable[..., Any]]:
    """FlashAttention-3, where it is installed."""
    try:
        attend = importlib.import_module("flash_attn_interface").flash_attn_func
    except ImportError:
        return {}
    return {
        "fa3": lambda q, k, v, out, lengths: attend(q, k, v, causal=True),
        "fa3 splits": lambda q, k, v, out, lengths: attend(q, k, v, causal=True, num_splits=0),
    }


def check(cell: Cell, run: Callable[..., Any], inputs: Sequence[Any], what: str) -> None:
    """Runs once and compares the first, a middle and the last query with float64."""
    import torch

    q, k, v, out, _ = inputs
    out.fill_(float("nan"))
    result = run(*inputs)
    rows = sorted({0, cell.queries // 2, cell.queries - 1})
    hidden = (
        torch.arange(cell.keys, device="cuda")
        > torch.tensor(rows, device="cuda")[:, None] + cell.keys - cell.queries
    )
    computed = []
    for dtype in (torch.float64, torch.float32):
        keys, values = (t[: min(cell.batch, 4)].to(dtype).repeat_interleave(GROUP, 2) for t in (k, v))
        logits = torch.einsum("bihd,bjhd->bhij", q[: len(keys), rows].to(dtype), keys) / DIM**0.5
        weights = torch.softmax(logits.masked_fill(hidden, float("-inf")), dim=-1)
        if dtype == torch.float32:
            weights = weights.to(v.dtype).to(dtype)
        computed.append(torch.einsum("bhij,bjhd->bihd", weights, values))
    truth, plain = computed[0], computed[1].to(q.dtype)
    limit = 2 * (plain - truth).abs().max().item() + 1e-5 * truth.abs().max().item()
    error = (result[: len(truth), rows] - truth).abs().max().item()
    if not (error <= limit and bool(torch.isfinite(result).all())):
        raise SystemExit(f"{what}: {cell}: error {error:.3g}, allowed {limit:.3g}")


def measure(cell: Cell) -> list[dict[str, object]]:
    """Rows of one cell, all implementations in turn."""
    inputs = common.rotated(lambda seed: make_inputs(cell, seed), cell.nbytes, limit=8)
    ours = variants(cell)
    for name, run in ours.items():
        check(cell, run, inputs[0], name)
    times = common.graph_times_in_turn(ours | fa3_calls(), inputs, rounds=20)
    rows = []
    for name, timing in times.items():
        ratios = {
            f"vs_{other.replace(' ', '_')}": round(times[other].median_us / timing.median_us, 3)
            for other in ("generic", "hopper", "packed", "few", "decode", "fa3", "fa3 splits")
            if other in times and other != name
        }
        copy_share = round(cell.nbytes / BYTES_PER_US / timing.median_us, 3)
        rows.append(
            common.row(
                "attention_rows", str(cell), "bf16", name, timing,
                nbytes=cell.nbytes, flops=cell.flops, copy_share=copy_share, **ratios,
            )
        )  # fmt: skip
    return rows


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--queries", nargs="+", type=int, default=QUERIES)
    parser.add_argument("--keys", nargs="+", type=int, default=(4096,))
    parser.add_argument("--batch", nargs="+", type=int, default=BATCHES)
    options = parser.parse_args(argv)
    cells = [Cell(*sizes) for sizes in itertools.product(options.batch, options.queries, options.keys)]
    engine_models.compile_ahead(kernels_of(cells), "sm_90a")
    common.require_gpu()
    rows: list[dict[str, object]] = []
    for cell in cells:
        rows += measure(cell)
    common.write_csv("attention_rows", rows)


if __name__ == "__main__":
    main()
