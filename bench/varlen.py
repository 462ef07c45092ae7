"""Packed sequences and paged prefill: the chosen kernel, other tiles, FA3, and our own dense kernel in the same run.

    python bench/varlen.py                        # all cells, about 2 minutes on an H200
    python bench/varlen.py --set ragged --tiles   # with every candidate of tiles
    python bench/varlen.py --set paged --variant stages=3   # the choice, and beside it with a field changed
    python bench/varlen.py --set paged --block-order rising # blocks in memory as in the table: by all kernels

ragged: 32 sequences of random length 16 .. 1024, width 2048, bf16, full and causal, beside FlashAttention-3's
`flash_attn_varlen_func` (where `flash_attn_interface` imports), the generic kernel, and the dense kernel over as many
sequences padded to the longest.  paged: whole prompts, and chunks of 512 tokens over 4096, with keys in blocks of 16,
64 and 128 in random order (or as `--block-order` says), beside `cki.attention` on the same keys in a dense tensor;
uniform: the same sequences packed.  few: 16 sequences of few queries over 4096 keys, packed and in blocks of 16, with 4
query heads a KV head, which tiles take together or apart.  `vs_dense` is the dense kernel's time over ours.  FLOPs
count what is visible, without padding.

Every call is compared with float64 on some rows of some sequences before it is timed (the bound of the tests); one of
ours that is wrong ends the program.  All of a cell are replayed in turn (bench/common.py); results/varlen.csv is
written after every cell.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import functools
import importlib
import io
from collections.abc import Callable, Sequence
from typing import Any

import common
import engine_models
import numpy as np
from attention_hopper import with_field

import cki
from cki import dtypes
from cki.device import sim_device
from cki.heuristics.attention import AttentionTiles, choose_tiles
from cki.heuristics.attention_hopper import FEW_QUERIES, HopperTiles, choose_packed_tiles, packable_heads
from cki.kernel import KernelSpec
from cki.operand import dense
from cki.ops import varlen
from cki.ops.attention import PackedSequences, plan_attention
from cki.ops.call import call
from cki.plan import Plan

RNG_SEED = 7


@dataclasses.dataclass(frozen=True)
class Cell:
    """One problem.  queries, keys: of each sequence.  block: keys a block of the cache; 0: packed."""

    name: str
    queries: tuple[int, ...]
    keys: tuple[int, ...]
    heads: int
    dim: int
    causal: bool
    block: int = 0
    shuffled: bool = True  # whether the blocks of the cache lie in random order
    group: int = 1  # query heads of a KV head

    @property
    def flops(self) -> float:
        """Of the two products, over visible pairs; causal at the bottom right."""
        pairs = sum(n * m - (n * (n - 1) // 2 if self.causal else 0) for n, m in zip(self.queries, self.keys))
        return 4.0 * pairs * self.heads * self.dim

    @property
    def nbytes(self) -> int:
        return 4 * (sum(self.queries) + sum(self.keys) // self.group) * self.heads * self.dim

    @property
    def kv_heads(self) -> int:
        return self.heads // self.group

    @property
    def is_uniform(self) -> bool:
        return len(set(self.queries)) == len(set(self.keys)) == 1

    def __str__(self) -> str:
        heads = f"{self.heads}/{self.kv_heads}" if self.group > 1 else f"{self.heads}"
        text = f"{self.name} heads={heads} head_dim={self.dim}{' causal' if self.causal else ''}"
        text += f" block={self.block}" if self.block else ""
        return text + ("" if self.shuffled else " rising")


def random_lengths() -> tuple[int, ...]:
    return tuple(np.random.default_rng(RNG_SEED).integers(16, 1025, 32).tolist())


def cells(which: str, shuffled: bool = True) -> list[Cell]:
    found = []
    for dim in (64, 128):
        if which in ("ragged", "all"):
            lengths = random_lengths()
            found += [Cell("32 x 16..1024", lengths, lengths, 2048 // dim, dim, c) for c in (False, True)]
        blocks = {"paged": (16, 64, 128), "uniform": (0,), "all": (0, 16, 64, 128)}.get(which, ())
        for block in blocks:
            for queries, keys in ((2048, 2048), (512, 4096)):
                name = f"8 x {queries} over {keys}"
                found += [Cell(name, (queries,) * 8, (keys,) * 8, 2048 // dim, dim, True, block, shuffled)]
    if which == "few":
        found = [
            Cell(f"{16} x {queries} over 4096", (queries,) * 16, (4096,) * 16, 32, 128, True, block, group=4)
            for block in (0, 16)
            for queries in (4, 16, 32, 64)
        ]
    return found


@dataclasses.dataclass
class Inputs:
    """One rotation's tensors on the GPU.  padded: of the sequences as a batch [batch, longest, heads, dim]."""

    q: Any
    k: Any
    v: Any
    out: Any
    offsets: Any
    key_offsets: Any
    lengths: Any
    cache: tuple[Any, ...] | None
    table: Any
    padded: tuple[Any, Any, Any, Any]


def make_inputs(cell: Cell, seed: int) -> Inputs:
    import torch

    generator = torch.Generator(device="cuda").manual_seed(seed)

    def normal(*shape: int) -> Any:
        return torch.randn(shape, generator=generator, device="cuda").to(torch.bfloat16)

    def starts(lengths: Sequence[int]) -> Any:
        return torch.tensor([0, *np.cumsum(lengths).tolist()], dtype=torch.int32, device="cuda")

    cache: tuple[Any, ...] | None
    q = normal(sum(cell.queries), cell.heads, cell.dim)
    k, v = (normal(sum(cell.keys), cell.kv_heads, cell.dim) for _ in range(2))
    cache, table = None, None
    if cell.block:
        # Lengths are multiples of the block's.
        count = sum(cell.keys) // cell.block
        order = torch.randperm(count, generator=generator, device="cuda")
        if not cell.shuffled:
            order = torch.arange(count, device="cuda")
        cache = (torch.empty_like(k), torch.empty_like(v))
        cache = tuple(t.view(len(order), cell.block, cell.kv_heads, cell.dim) for t in cache)
        for tensor, blocks in zip((k, v), cache):
            blocks[order] = tensor.view(blocks.shape)
        table = order.int().view(len(cell.keys), -1)
        if not cell.shuffled:  # the dense and the packed kernel read the same memory
            k, v = (t.view(k.shape) for t in cache)
    if cell.is_uniform:
        padded = tuple(t.reshape(len(cell.keys), -1, *t.shape[1:]) for t in (q, k, v))
    else:
        sizes = ((max(cell.queries), cell.heads), *((max(cell.keys), cell.kv_heads),) * 2)
        padded = tuple(normal(len(cell.keys), *size, cell.dim) for size in sizes)
    lengths = torch.tensor(cell.keys, dtype=torch.int32, device="cuda")
    return Inputs(
        q, k, v, torch.full_like(q, float("nan")), starts(cell.queries), starts(cell.keys), lengths, cache, table,
        (*padded, torch.empty_like(padded[0])),
    )  # fmt: skip


@functools.cache
def spec_with_tiles(tiles: AttentionTiles | HopperTiles) -> Any:
    """cki.varlen_attention's operation with these tiles; kept: the plan cache knows an operation by its identity."""

    def plan(problem: Any, outputs: Any, device: Any) -> Plan:
        return varlen.plan(problem, outputs, device, tiles)

    return dataclasses.replace(varlen.VARLEN_ATTENTION, plan=plan)


def cki_call(cell: Cell, tiles: AttentionTiles | HopperTiles | None = None) -> Callable[[Inputs], Any]:
    """By CKI; tiles None is the public function with the heuristics' choice."""
    longest = max(cell.queries)

    def run(at: Inputs) -> Any:
        k, v = at.cache if cell.block and at.cache else (at.k, at.v)
        paged = (None, at.lengths, at.table) if cell.block else (at.key_offsets, None, None)
        if tiles is None:
            return cki.varlen_attention(
                at.q, k, v, at.offsets, paged[0], seq_lens=paged[1], block_table=paged[2], causal=cell.causal,
                max_seqlen_q=longest, out=at.out,
            )  # fmt: skip
        attributes = (
            cell.causal,
            "bottom_right",
            None,
            (-1, -1),
            0.0,
            False,
            longest,
            None,
            0.0,
            False,
            None,
        )
        return call(
            spec_with_tiles(tiles), (at.q, k, v, at.offsets, *paged, *(None,) * 7), attributes, (at.out, None)
        )

    return run


def fa3_call(cell: Cell) -> Callable[[Inputs], Any] | None:
    """FlashAttention-3's varlen function, or None where it is not installed or the keys are paged."""
    try:
        attend = importlib.import_module("flash_attn_interface").flash_attn_varlen_func
    except ImportError:
        return None
    longest, longest_keys = max(cell.queries), max(cell.keys)

    def run(at: Inputs) -> Any:
        out = attend(at.q, at.k, at.v, at.offsets, at.key_offsets, longest, longest_keys, causal=cell.causal)
        return out[0] if isinstance(out, tuple) else out

    return None if cell.block else run


def dense_call(cell: Cell) -> Callable[[Inputs], Any]:
    """cki.attention on the sequences as a batch, padded to the longest."""
    return lambda at: cki.attention(*at.padded[:3], causal=cell.causal, out=at.padded[3])


def check(cell: Cell, run: Callable[[Inputs], Any], at: Inputs, what: str) -> None:
    """Runs once and compares some rows with float64; ends the program when the tests' bound is broken."""
    import torch

    at.out.fill_(float("nan"))
    result = run(at)
    if not bool(torch.isfinite(result).all()):
        raise SystemExit(f"{what}: {cell}: the output is not finite")
    starts, key_starts = np.cumsum([0, *cell.queries]), np.cumsum([0, *cell.keys])
    shortest, longest = int(np.argmin(cell.queries)), int(np.argmax(cell.queries))
    for b in sorted({0, shortest, longest, len(cell.queries) - 1}):
        n, m = cell.queries[b], cell.keys[b]
        rows = sorted({0, n // 3, n // 2, max(n - 2, 0), n - 1})
        k, v = (t[key_starts[b] : key_starts[b + 1]].repeat_interleave(cell.group, 1) for t in (at.k, at.v))
        position = torch.tensor(rows, device="cuda") + m - n
        hidden = torch.arange(m, device="cuda") > position[:, None]
        computed = []
        for dtype in (torch.float64, torch.float32):
            picked = at.q[[int(starts[b]) + r for r in rows]].to(dtype)
            logits = torch.einsum("ihd,jhd->hij", picked, k.to(dtype)) / cell.dim**0.5
            if cell.causal:
                logits.masked_fill_(hidden, float("-inf"))
            weights = torch.softmax(logits, dim=-1)
            if dtype == torch.float32:
                weights = weights.to(v.dtype).to(dtype)
            computed.append(torch.einsum("hij,jhd->ihd", weights, v.to(dtype)))
        truth, plain = computed[0], computed[1].to(at.q.dtype)
        limit = 2 * (plain - truth).abs().max().item() + 1e-5 * truth.abs().max().item()
        error = (result[[int(starts[b]) + r for r in rows]] - truth).abs().max().item()
        if not error <= limit:
            raise SystemExit(f"{what}: {cell}: sequence {b}: error {error:.3g}, allowed {limit:.3g}")


def candidates(dim: int) -> dict[str, HopperTiles]:
    """Tiles by name."""
    keys = 128
    shapes = [HopperTiles(2, keys), HopperTiles(1, keys, 2, False, "single")]
    if dim <= 64:
        shapes += [HopperTiles(3, keys), HopperTiles(2, keys, 3), HopperTiles(1, keys, 2, False, "single", 2)]
    found = [
        dataclasses.replace(s, schedule=schedule)
        for s in shapes
        for schedule in ("dynamic", "fixed", "single")
    ]
    return {f"hopper {tiles}": tiles for tiles in found}


def chosen_with(cell: Cell, variants: Sequence[str]) -> dict[str, HopperTiles]:
    """The heuristics' choice with fields changed (`stages=3,ping_pong=False`), by name, as far as it fits an SM."""
    device = sim_device("sm_90a")  # the sizes of an H200
    together = packable_heads(cell.group) if max(cell.queries) < FEW_QUERIES else 1
    chosen = choose_packed_tiles(
        sum(cell.queries),
        len(cell.queries),
        cell.heads,
        cell.dim,
        cell.dim,
        cell.causal,
        True,
        device,
        together,
    )
    varied = [functools.reduce(with_field, text.split(","), chosen) for text in variants]
    limit = device.shared_memory_per_block
    return {
        f"hopper {t}": t
        for t in varied
        if t.shared_memory(cell.dim, cell.dim, True) * t.blocks_per_sm <= limit
    }


def packed_heads(cell: Cell) -> dict[str, HopperTiles]:
    """Tiles whose rows are all heads of a group."""
    if cell.group == 1:
        return {}
    shapes = (HopperTiles(1, 128, 2, False), HopperTiles(2, 128))
    found = [
        dataclasses.replace(s, heads=cell.group, schedule=o) for s in shapes for o in ("single", "dynamic")
    ]
    return {f"hopper {tiles}": tiles for tiles in found}


def generic_tiles(cell: Cell) -> AttentionTiles:
    """The generic kernel's."""
    together = cell.group if max(cell.queries) < 64 else 1
    device = sim_device("sm_90a")
    return choose_tiles(max(cell.queries) * together, cell.dim, cell.dim, 2, True, device, bool(cell.block))


def kernels_of(all_cells: Sequence[Cell], variants: Sequence[str]) -> list[KernelSpec]:
    """Of all variants but the candidates of tiles."""
    device = sim_device("sm_90a")
    steps: list[Any] = []
    for cell in all_cells:
        q = dense("q", (1, sum(cell.queries), cell.heads, cell.dim), dtypes.bf16)
        count, own = len(cell.queries), (sum(cell.keys), cell.kv_heads, cell.dim)
        k = dense(
            "k", (1, *own) if not cell.block else (own[0] // cell.block, cell.block, *own[1:]), dtypes.bf16
        )
        offsets, lengths = (dense(name, (count + 1,), dtypes.i32) for name in ("offsets", "lengths"))
        table = dense("table", (count, max(cell.keys) // cell.block), dtypes.i32) if cell.block else None
        packed = PackedSequences(offsets, lengths, table, max(cell.queries))
        others = (*chosen_with(cell, variants).values(), *packed_heads(cell).values())
        for tiles in (None, *(() if variants else (generic_tiles(cell),)), *others):
            steps += plan_attention(q, k, k, q, device=device, causal=cell.causal, packed=packed, tiles=tiles)
        q = dense("q", (count, max(cell.queries), cell.heads, cell.dim), dtypes.bf16)
        k = dense("k", (count, max(cell.keys), *own[1:]), dtypes.bf16)
        steps += plan_attention(q, k, k, q, device=device, causal=cell.causal)
    return list(dict.fromkeys(step.kernel for step in steps))


def measure(cell: Cell, all_tiles: bool, variants_asked: Sequence[str] = ()) -> list[dict[str, object]]:
    """Rows of one cell, all implementations in turn."""
    inputs = common.rotated(lambda seed: (make_inputs(cell, seed),), cell.nbytes, limit=6)
    ours: dict[str, Callable[[Inputs], Any]] = {"cki": cki_call(cell)}
    if not variants_asked:
        ours["generic"] = cki_call(cell, generic_tiles(cell))
    ours |= {name: cki_call(cell, tiles) for name, tiles in packed_heads(cell).items()}
    ours |= {name: cki_call(cell, tiles) for name, tiles in chosen_with(cell, variants_asked).items()}
    if all_tiles:
        ours |= {name: cki_call(cell, tiles) for name, tiles in candidates(cell.dim).items()}
    for name, run in ours.items():
        check(cell, run, inputs[0][0], name)
    variants = ours | {"dense": dense_call(cell)}
    if cell.block and not cell.shuffled:
        variants["packed"] = cki_call(dataclasses.replace(cell, block=0))
    if (fa3 := fa3_call(cell)) is not None:
        variants["fa3"] = fa3
    times = common.graph_times_in_turn(variants, inputs, rounds=20)
    rows = []
    for name, timing in times.items():
        ratios = {
            f"vs_{other}": round(times[other].median_us / timing.median_us, 3)
            for other in ("generic", "dense", "fa3")
            if other in times and other != name
        }
        rows.append(
            common.row(
                "varlen_attention",
                str(cell),
                "bf16",
                name,
                timing,
                nbytes=cell.nbytes,
                flops=cell.flops,
                **ratios,
            )
        )
    return rows


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--set", choices=("ragged", "uniform", "paged", "few", "all"), default="all")
    parser.add_argument("--tiles", action="store_true", help="time every candidate of tiles too")
    parser.add_argument(
        "--variant", action="append", default=[], metavar="FIELD=VALUE[,...]",
        help="the choice with these fields of HopperTiles changed, beside it; may be repeated",
    )  # fmt: skip
    parser.add_argument("--blocks", nargs="+", type=int, help="only cells with blocks of so many keys")
    parser.add_argument("--dims", nargs="+", type=int, help="only cells of these head dimensions")
    parser.add_argument("--block-order", choices=("random", "rising"), default="random")
    options = parser.parse_args(argv)
    wanted = cells(options.set, options.block_order == "random")
    wanted = [
        cell
        for cell in wanted
        if cell.block in (options.blocks or (cell.block,)) and cell.dim in (options.dims or (cell.dim,))
    ]
    engine_models.compile_ahead(kernels_of(wanted, options.variant), "sm_90a")
    common.require_gpu()
    rows: list[dict[str, object]] = []
    for cell in wanted:
        rows += measure(cell, options.tiles, options.variant)
        with contextlib.redirect_stdout(io.StringIO()):  # the table grows with every cell
            common.write_csv("varlen", rows)
        print(f"measured {cell}", flush=True)
    common.print_table(
        rows, ("problem", "implementation", "median_us", "tflop_per_s", "vs_generic", "vs_dense", "vs_fa3")
    )


if __name__ == "__main__":
    main()
