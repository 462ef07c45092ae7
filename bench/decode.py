"""Decoding over a paged cache: CKI beside cuDNN's dense kernel and FlashAttention-3, in turn in one run.

    python bench/decode.py                        # the grid of batches and contexts: 32/8 heads of 128, bf16
    python bench/decode.py --set blocks fp8       # other sets: blocks, groups, dims, fp8, skew, append
    python bench/decode.py --cell 4x16384 --tune  # one cell; other configurations, too
    python bench/decode.py --cell 8x32768:kv=e4m3,block=64,heads=64,kv_heads=8,dim=128,queries=1

Blocks of the cache are in random order, queries are one token a sequence.  GB/s counts keys and values (and scales)
once.  `cki` merges the blocks' parts in clusters or a second launch, `cki counters` instead of the latter in the block
that arrives last.  `cki one table` (--tune) takes lengths and tables from L2, where a model's layers before have left
them.  cuDNN reads a dense cache through torch's SDPA, FlashAttention-3 the same blocks.  `vs_` columns are the others'
time over ours, `of_read` our rate over that of reading alone in the same run (read_rate.py).  The very call that is
timed is first compared with float64 on some sequences and heads, with the bound of the tests; one that is wrong ends
the program.  Set `append` times `append_kv` for 64 sequences, checked likewise.
Method: CUDA graph replays over inputs that together exceed the L2 cache three times, in turn (bench/common.py).
"""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import multiprocessing
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from typing import Any

import common
import numpy as np
from decode_variants import CANDIDATES, Variant, parse_variant
from read_rate import read_rate

import cki
import cki.reference
from cki import cache as kernel_cache
from cki import driver, dtypes
from cki.device import DeviceInfo
from cki.heuristics.paged import choose_decode
from cki.operand import dense
from cki.ops.call import call
from cki.ops.paged import PAGED_ATTENTION, plan_paged_attention, plan_problem


@dataclasses.dataclass(frozen=True)
class Cell:
    """One problem.  skew: the first sequence has `context` tokens, the others 1024."""

    batch: int
    context: int
    heads: int = 32
    kv_heads: int = 8
    dim: int = 128
    block: int = 16
    kv: str = "bf16"
    queries: int = 1
    skew: int = 0

    @property
    def lengths(self) -> list[int]:
        return [self.context, *[1024 if self.skew else self.context] * (self.batch - 1)]

    @property
    def nbytes(self) -> int:
        """Keys, values and scales, once."""
        of_head = 2 * (self.dim * (1 if self.kv == "e4m3" else 2) + (4 if self.kv == "e4m3" else 0))
        return sum(self.lengths) * self.kv_heads * of_head

    def __str__(self) -> str:
        text = f"batch={self.batch} context={self.context}{' skewed' if self.skew else ''}"
        text += f" heads={self.heads}/{self.kv_heads} head_dim={self.dim}"
        return f"{text} block={self.block} queries={self.queries}"


_GRID = (
    (1, 1024), (1, 4096), (1, 16384), (1, 131072), (4, 512), (4, 2048), (4, 8192), (4, 16384), (4, 32768), (8, 4096),
    (16, 16384), (32, 16384), (64, 2048), (128, 1024),
)  # fmt: skip
SETS: dict[str, tuple[Cell, ...]] = {
    "grid": tuple(Cell(*cell) for cell in _GRID),
    "blocks": tuple(Cell(8, 8192, block=block) for block in (1, 8, 16, 64, 256)),
    # the bytes of 8 x 8192 tokens at 8 KV heads of 128
    "groups": tuple(Cell(8, 8192, heads=8 * group) for group in (1, 4, 7, 8, 16)),
    "dims": tuple(Cell(8, 8192 * 128 // dim, dim=dim) for dim in (64, 96, 128, 256)),
    "fp8": (Cell(8, 32768, kv="e4m3"), Cell(8, 32768), Cell(1, 16384, kv="e4m3")),
    "skew": (Cell(32, 65536, skew=1), Cell(32, 3040)),
}


def parse(text: str) -> Cell:
    """4x16384:kv=e4m3,block=64"""
    size, _, options = text.partition(":")
    batch, context = (int(part) for part in size.split("x"))
    pairs = (item.split("=") for item in options.split(",") if item)
    return Cell(batch, context, **{name: value if name == "kv" else int(value) for name, value in pairs})  # type: ignore[arg-type]


@dataclasses.dataclass
class Inputs:
    """One rotation's tensors, on the GPU."""

    q: Any
    cache: tuple[Any, ...]
    table: Any
    lengths: Any
    out: Any
    counters: Any
    dense: tuple[Any, Any] | None


def make_inputs(cell: Cell, seed: int, dense: bool) -> Inputs:
    import torch

    generator = torch.Generator(device="cuda").manual_seed(seed)

    def normal(*shape: int) -> Any:
        return torch.randn(shape, generator=generator, device="cuda", dtype=torch.bfloat16)

    columns = -(-cell.context // cell.block)
    blocks = sum(-(-length // cell.block) for length in cell.lengths)
    order = torch.randperm(blocks, generator=generator, device="cuda").int()
    table, used = torch.full((cell.batch, columns), -1, dtype=torch.int32, device="cuda"), 0
    for b, length in enumerate(cell.lengths):
        needed = -(-length // cell.block)
        table[b, :needed] = order[used : used + needed]
        used += needed
    shape = (blocks, cell.block, cell.kv_heads, cell.dim)
    cache = (normal(*shape), normal(*shape))
    if cell.kv == "e4m3":
        scales = tuple(
            torch.rand(shape[:3], generator=generator, device="cuda") * 0.01 + 0.01 for _ in range(2)
        )
        cache = (*((t * 50).to(torch.float8_e4m3fn) for t in cache), *scales)
    q = normal(cell.batch, cell.queries, cell.heads, cell.dim)
    dense_size = (cell.batch, cell.context, cell.kv_heads, cell.dim)
    return Inputs(
        q, cache, table, torch.tensor(cell.lengths, dtype=torch.int32, device="cuda"), torch.full_like(q, float("nan")),
        torch.zeros(cell.batch * cell.queries * cell.heads, dtype=torch.int32, device="cuda"),
        (normal(*dense_size), normal(*dense_size)) if dense else None,
    )  # fmt: skip


Run = Callable[[Inputs], Any]


def cki_call(counted: bool) -> Run:
    """The public function."""
    return lambda t: cki.paged_attention(
        t.q, t.cache, t.table, t.lengths, out=t.out, counters=t.counters if counted else None
    )


def variant_call(variant: Variant) -> Run:
    """The public function with this configuration."""
    spec = dataclasses.replace(
        PAGED_ATTENTION,
        plan=lambda problem, outputs, device: plan_problem(problem, outputs, device, variant.choose),
    )

    def run(t: Inputs) -> Any:
        scales = t.cache[2:] or (None, None)
        counters = t.counters if variant.counted else None
        inputs = (t.q, *t.cache[:2], t.table, t.lengths, *scales, None, None, counters)
        return call(spec, inputs, (None, (-1, -1), 0.0, False, False), (t.out, None))

    return run


def compile_kernels(cell: Cell, variant: Variant | None, counted: bool, device: DeviceInfo) -> None:
    """Into the cache on disk, in a process of its own: many kernels take long one after another."""
    kv = dtypes.from_name(cell.kv)
    q = dense("q", (cell.batch, cell.queries, cell.heads, cell.dim), dtypes.bf16)
    columns = -(-cell.context // cell.block)
    cache = dense("k", (cell.batch * columns, cell.block, cell.kv_heads, cell.dim), kv)
    scale = dense("scale", cache.shape[:3], dtypes.f32)
    plan = plan_paged_attention(
        q, cache, cache, dense("lengths", (cell.batch,), dtypes.i32), q, device,
        block_table=dense("table", (cell.batch, columns), dtypes.i32),
        scales=(scale, scale) if cell.kv == "e4m3" else None,
        counters=dense("counters", (cell.batch * cell.queries * cell.heads,), dtypes.u32) if counted else None,
        choose=variant.choose if variant else choose_decode,
    )  # fmt: skip
    for step in plan.steps:
        kernel_cache.get(step.kernel, device.arch)


def compile_ahead(cells: Sequence[Cell], tune: Sequence[Variant]) -> None:
    """All kernels that the cells need, side by side."""
    device = driver.device_info(0)
    wanted: list[tuple[Cell, Variant | None, bool]] = []
    wanted += [(cell, None, counted) for cell in cells for counted in (False, True)]
    wanted += [(cell, variant, variant.counted) for cell in cells for variant in tune]
    with ProcessPoolExecutor(mp_context=multiprocessing.get_context("spawn")) as pool:
        jobs = [pool.submit(compile_kernels, *arguments, device) for arguments in wanted]
        for job in jobs:
            if (error := job.exception()) is not None and not isinstance(error, cki.CkiError):
                raise error


def cudnn_call(t: Inputs) -> Any:
    import torch
    from torch.nn.attention import SDPBackend, sdpa_kernel

    assert t.dense is not None
    with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
        return torch.nn.functional.scaled_dot_product_attention(
            t.q.transpose(1, 2), *(x.transpose(1, 2) for x in t.dense), enable_gqa=True
        )


def fa3_call() -> Run | None:
    """FlashAttention-3 over the same blocks, where it is installed."""
    try:
        from flash_attn_interface import flash_attn_with_kvcache  # type: ignore[import-not-found]
    except ImportError:
        return None
    return lambda t: flash_attn_with_kvcache(
        t.q, *t.cache, cache_seqlens=t.lengths, page_table=t.table, causal=True
    )


def check(cell: Cell, run: Run, inputs: Inputs, what: str) -> None:
    """Runs once; compares the first and the last sequence, two query heads each, with float64."""
    import torch

    inputs.out.fill_(float("nan"))
    result = run(inputs)
    if not bool(torch.isfinite(result).all()) or bool(inputs.counters.any()):
        raise SystemExit(f"{what}: {cell}: output not finite, or counters not zero afterwards")
    for b, head in itertools.product({0, cell.batch - 1}, {0, cell.heads - 1}):
        length, kv_head = cell.lengths[b], head * cell.kv_heads // cell.heads
        ids = inputs.table[b, : -(-length // cell.block)].long()
        k, v = (t[ids, :, kv_head].double().reshape(-1, cell.dim)[:length] for t in inputs.cache[:2])
        if cell.kv == "e4m3":
            k, v = (
                t * s[ids, :, kv_head].double().reshape(-1, 1)[:length]
                for t, s in zip((k, v), inputs.cache[2:])
            )
        place = torch.arange(cell.queries, device="cuda")[:, None] + length - cell.queries
        hidden = torch.arange(length, device="cuda") > place
        outs = []
        for dtype in (torch.float64, torch.float32):
            logits = (inputs.q[b, :, head].to(dtype) @ k.to(dtype).T) / cell.dim**0.5
            weights = torch.softmax(logits.masked_fill(hidden, float("-inf")), -1)
            outs.append((weights if dtype == torch.float64 else weights.bfloat16().to(dtype)) @ v.to(dtype))
        truth, plain = outs[0], outs[1].bfloat16().double()
        limit = 2 * (plain - truth).abs().max().item() + 1e-5 * truth.abs().max().item()
        error = (result[b, :, head].double() - truth).abs().max().item()
        if not error <= limit:
            raise SystemExit(f"{what}: {cell}: error {error:.3g}, allowed {limit:.3g}")


def measure(cell: Cell, tune: Sequence[Variant], read: float) -> list[dict[str, object]]:
    """Rows of the result for one cell.  read: the rate of reading, GB/s."""
    dense = cell.kv == "bf16" and not cell.skew and cell.queries == 1
    inputs = common.rotated(lambda seed: (make_inputs(cell, seed, dense),), cell.nbytes, limit=16)
    variants: dict[str, Run] = {"cki": cki_call(False), "cki counters": cki_call(True)}
    if tune:
        first = inputs[0][0]
        variants["cki one table"] = lambda t: cki_call(False)(
            dataclasses.replace(t, table=first.table, lengths=first.lengths)
        )
    for variant in tune:
        try:
            variant_call(variant)(inputs[0][0])
        except (cki.CkiError, AssertionError) as error:
            print(f"left out {variant}: {str(error).splitlines()[0]}")
            continue
        variants[str(variant)] = variant_call(variant)
    for name, run in variants.items():
        check(cell, run, inputs[0][0], name)
    peers: dict[str, Run | None] = {"cudnn dense": cudnn_call if dense else None}
    if tune:
        peers["any small kernel"] = lambda t: t.counters.add_(0)
    peers["fa3 paged"] = fa3_call() if cell.kv == "bf16" else None
    present = {name: run for name, run in peers.items() if run is not None}
    timings = common.graph_times_in_turn({**variants, **present}, inputs)
    rows = []
    for name, timing in timings.items():
        ratios = {}
        if name in variants:
            ratios = {
                f"vs_{p.split()[0]}": round(timings[p].median_us / timing.median_us, 3)
                for p in timings
                if p in present
            }
        rows.append(
            common.row(
                "paged_attention",
                str(cell),
                cell.kv,
                name,
                timing,
                nbytes=cell.nbytes,
                of_read=round(cell.nbytes / timing.median_us / 1e3 / read, 3),
                **ratios,
            )
        )
    return rows


def measure_append() -> list[dict[str, object]]:
    """`append_kv` for 64 sequences of one new token, 32/8 heads of 128: all that a Qwen3 layer does, and e4m3."""
    import torch

    def make(kv: str) -> Callable[[int], tuple[Any, ...]]:
        def tensors(seed: int) -> tuple[Any, ...]:
            qkv = torch.randn(64, 48, 128, device="cuda", dtype=torch.bfloat16)
            dtype = torch.float8_e4m3fn if kv == "e4m3" else torch.bfloat16
            cache = [torch.zeros(1024, 16, 8, 128, device="cuda").to(dtype) for _ in range(2)]
            if kv == "e4m3":
                cache += [torch.zeros(1024, 16, 8, device="cuda") for _ in range(2)]
            slots = torch.randperm(1024 * 16, device="cuda")[:64]
            positions = torch.randint(0, 30000, (64,), device="cuda")
            weight = torch.rand(128, device="cuda", dtype=torch.bfloat16)
            return qkv, tuple(cache), slots, positions, weight, torch.empty_like(qkv[:, :32].contiguous())

        return tensors

    def append(qkv: Any, cache: Any, slots: Any, positions: Any, weight: Any, q_out: Any) -> Any:
        return cki.append_kv(
            qkv[:, 32:40], qkv[:, 40:], cache, slots, q=qkv[:, :32], positions=positions, rope_base=1e6,
            q_norm_weight=weight, k_norm_weight=weight, q_out=q_out,
        )  # fmt: skip

    def check_append(tensors: tuple[Any, ...], kv: str) -> None:
        """One call against the definition, at the slots that it writes."""
        append(*tensors)
        qkv, slots, positions, weight, q_out = (t.double().cpu().numpy() for t in tensors[:1] + tensors[2:])
        fresh = np.zeros((64, 1, 8, 128))
        truths = cki.reference.append_kv(
            qkv[:, 32:40], qkv[:, 40:], (fresh, fresh), np.arange(64), q=qkv[:, :32], positions=positions,
            rope_base=1e6, q_norm_weight=weight, k_norm_weight=weight,
        )  # fmt: skip
        stored = [t.double().cpu().numpy().reshape(1024 * 16, 8, -1)[slots.astype(int)] for t in tensors[1]]
        if kv == "e4m3":
            stored = [code * scale for code, scale in zip(stored[:2], stored[2:])]
        for name, value, given in zip("kvq", (*stored, q_out), truths):
            truth = np.reshape(np.asarray(given), value.shape)
            step = (2.0**-4 if kv == "e4m3" and name != "q" else 2.0**-8) * np.abs(truth).max(
                -1, keepdims=True
            )
            if not (np.abs(value - truth) <= step).all():
                raise SystemExit(f"append_kv {kv}: {name} is wrong")

    rows = []
    for kv in ("bf16", "e4m3"):
        check_append(make(kv)(8), kv)
        timing = common.graph_time(append, [make(kv)(seed) for seed in range(8)], framework="torch")
        rows.append(common.row("append_kv", "tokens=64 heads=32/8 head_dim=128 norm rope", kv, "cki", timing))
    return rows


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--set", nargs="+", choices=[*SETS, "append"], default=["grid", "append"])
    parser.add_argument("--cell", action="append", help="BATCHxCONTEXT[:name=value,...]; instead of sets")
    parser.add_argument("--tune", action="store_true", help="time other configurations, too")
    parser.add_argument(
        "--variant", action="append", type=parse_variant, help="8w3s@1, '4w6s@1 g8 cluster': --tune of these"
    )
    options = parser.parse_args(argv)
    common.require_gpu()
    cells = [parse(text) for text in options.cell or ()]
    sets = [] if cells else options.set
    cells += [cell for name in sets for cell in SETS.get(name, ())]
    tune = options.variant or (CANDIDATES if options.tune else ())
    compile_ahead(cells, tune)
    read = read_rate()
    rows = []
    for cell in cells:
        rows += measure(cell, tune, read)
        print(f"measured {cell} {cell.kv}", flush=True)
    if "append" in sets:
        rows += measure_append()
    common.write_csv("decode", rows)


if __name__ == "__main__":
    main()
