"""What `bert_large.py` prints and writes: the two tables that encoder benchmarks show, and the share of the GEMM rate.

The first has milliseconds and the speedup against each baseline, the second tokens a second and the gain in percent;
padding is no token.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import common
from bert_model import Problem

Line = dict[str, object]


class Measured(NamedTuple):
    """timings: of "cki" and of each baseline that ran, by name.  errors: relative to the largest value, likewise.
    gemm_rate: TFLOP/s of an fp16 product taken in turn.  flops: of the model.  launches: kernels of our pass."""

    problem: Problem
    timings: dict[str, common.Timing]
    errors: dict[str, float]
    gemm_rate: float
    flops: float
    launches: int

    def speedup(self, name: str) -> float:
        """The baseline's time over ours."""
        return self.timings[name].median_us / self.timings["cki"].median_us

    def tokens_per_s(self, name: str) -> float:
        return self.problem.tokens / self.timings[name].median_us * 1e6

    @property
    def gemm_share(self) -> float:
        """Of the model's FLOP/s in the rate of the fp16 product."""
        return self.flops / self.timings["cki"].median_us / 1e6 / self.gemm_rate


def baselines(measured: Sequence[Measured]) -> list[str]:
    """The names of all baselines of these problems, in the order in which they came."""
    return [name for name in dict.fromkeys(n for one in measured for n in one.timings) if name != "cki"]


def time_table(measured: Sequence[Measured]) -> list[Line]:
    """Milliseconds; speedup against each baseline, and against the best of torch."""
    lines = []
    for one in measured:
        line: Line = {
            "problem": one.problem,
            "cki ms": f"{one.timings['cki'].median_us / 1e3:.3f}",
        }
        for name in baselines(measured):
            has = name in one.timings
            line[f"{name} ms"] = f"{one.timings[name].median_us / 1e3:.3f}" if has else "-"
            line[f"vs {name}"] = f"{one.speedup(name):.2f}x" if has else "-"
        torch_speedups = [one.speedup(name) for name in one.timings if name.startswith("torch")]
        line["vs best torch"] = f"{min(torch_speedups):.2f}x" if torch_speedups else "-"
        lines.append(line)
    return lines


def token_table(measured: Sequence[Measured]) -> list[Line]:
    """Tokens a second, and the gain over each baseline."""
    lines = []
    for one in measured:
        line: Line = {"problem": one.problem, "cki tokens/s": f"{one.tokens_per_s('cki'):,.0f}"}
        for name in baselines(measured):
            has = name in one.timings
            line[f"{name} tokens/s"] = f"{one.tokens_per_s(name):,.0f}" if has else "-"
            line[f"gain on {name}"] = f"{(one.speedup(name) - 1) * 100:+.0f}%" if has else "-"
        lines.append(line)
    return lines


def rate_table(measured: Sequence[Measured]) -> list[Line]:
    """The model's TFLOP/s beside those of one large product."""
    return [
        {
            "problem": one.problem, "model TFLOP/s": f"{one.flops / one.timings['cki'].median_us / 1e6:.0f}",
            "fp16 GEMM TFLOP/s": f"{one.gemm_rate:.0f}", "share": f"{one.gemm_share:.3f}", "launches": one.launches,
        }
        for one in measured
    ]  # fmt: skip


def rows(measured: Sequence[Measured]) -> list[Line]:
    """One line of the result file for each implementation of each problem; speedup is its time over ours."""
    lines = []
    for one in measured:
        for name, timing in one.timings.items():
            is_ours = name == "cki"
            lines.append(common.row(
                "bert_large", str(one.problem), "f16", name, timing, flops=one.flops,
                tokens_per_s=round(one.tokens_per_s(name)), speedup=round(one.speedup(name), 3),
                error=f"{one.errors[name]:.1e}", gemm_tflop_per_s=round(one.gemm_rate, 1),
                gemm_share=round(one.gemm_share, 3) if is_ours else "", launches=one.launches if is_ours else "",
            ))  # fmt: skip
    return lines


def line(one: Measured) -> str:
    """A problem's result in a line, to be seen while others still run."""
    others = (
        f"{name} {one.timings[name].median_us / 1e3:.3f} ({one.speedup(name):.2f}x)"
        for name in baselines([one])
    )
    ours = f"cki {one.timings['cki'].median_us / 1e3:.3f} ms"
    return f"{one.problem}: {', '.join([ours, *others])}; {one.gemm_share:.3f} of the GEMM rate"


def write(measured: Sequence[Measured]) -> None:
    """The result file of what was measured so far, so that a run that is ended leaves it."""
    common.write_csv("bert_large", rows(measured), is_quiet=True)


def report(measured: Sequence[Measured]) -> None:
    """Prints the tables and writes the file.  Nothing where nothing was measured."""
    if not measured:
        return
    common.write_csv("bert_large", rows(measured))
    tables = {
        "time and speedup": time_table(measured),
        "throughput and gain": token_table(measured),
        "model FLOP/s": rate_table(measured),
    }
    for title, table in tables.items():
        print(f"\n{title}")
        common.print_table(table, list(table[0]))
