"""Draws the results that are sweeps as curves and as heat maps, beside the bar charts of plot.py.  Needs no package.

    python bench/plot_sweeps.py [FOLDER]

    attention_hopper.csv   TFLOP/s against the number of tokens, a panel for each head dimension and mask, and the
                           time of the best peer over ours for each cell
    decode.csv             GB/s against the context, a panel for each batch, and the same ratios

Colour tells the ratio: white is 1, green is faster than the peers, red slower.
"""

from __future__ import annotations

import csv
import math
import re
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple
from xml.sax.saxutils import escape

COLOURS = {"cki": "#08306b", "fa3": "#e6820e", "cudnn": "#6a9a2d", "generic": "#7f7f7f"}
PANEL_WIDTH, PANEL_HEIGHT, COLUMNS, MARGIN = 300, 170, 3, 46
CELL_WIDTH, CELL_HEIGHT = 74, 26

Row = dict[str, str]


class Sample(NamedTuple):
    """One figure: the panel it belongs to, its place on the x axis, whose it is."""

    panel: str
    x: int
    owner: str
    rate: float
    median_us: float


class Sweep(NamedTuple):
    """How the rows of one result file become samples."""

    source: str
    x_label: str
    rate_column: str
    rate_label: str
    panel_and_x: Callable[[Row], tuple[str, int] | None]


def _attention(row: Row) -> tuple[str, int] | None:
    found = re.fullmatch(r"batch=(\d+) tokens=(\d+) heads=(\d+) head_dim=(\d+)( causal)?", row["problem"])
    if found is None:
        return None
    batch, tokens, heads, dim = map(int, found.groups()[:4])
    if batch * tokens != 16384 or heads * dim != 2048:
        return None
    return f"D = {dim}, {'causal' if found[5] else 'full'}", tokens


def _decode(row: Row) -> tuple[str, int] | None:
    pattern = r"batch=(\d+) context=(\d+) heads=32/8 head_dim=128 block=16 queries=1"
    found = re.fullmatch(pattern, row["problem"])
    return None if found is None or row["dtype"] != "bf16" else (f"batch {found[1]}", int(found[2]))


SWEEPS = (
    Sweep("attention_hopper", "tokens", "tflop_per_s", "TFLOP/s", _attention),
    Sweep("decode", "context", "gb_per_s", "GB/s", _decode),
)


def samples(rows: Sequence[Row], sweep: Sweep) -> list[Sample]:
    """The sweep's figures; of several of CKI's own for one cell the fastest, which is the one that is taken unasked."""
    best: dict[tuple[str, int, str], Sample] = {}
    for row in rows:
        place, owner = sweep.panel_and_x(row), _owner(row["implementation"])
        if place is None or owner is None or not row[sweep.rate_column]:
            continue
        sample = Sample(*place, owner, float(row[sweep.rate_column]), float(row["median_us"]))
        key = (*place, owner)
        if key not in best or sample.median_us < best[key].median_us:
            best[key] = sample
    return list(best.values())


def _owner(implementation: str) -> str | None:
    first = implementation.split()[0]
    return "cki" if first in ("cki", "hopper") else first if first in COLOURS else None


def curves(sweep: Sweep, found: Sequence[Sample], caption: str) -> str:
    """A panel of curves for each group, as SVG text."""
    panels = list(dict.fromkeys(sample.panel for sample in found))
    positions = sorted({sample.x for sample in found})
    highest = max(sample.rate for sample in found) * 1.05
    lines_of_panels = -(-len(panels) // COLUMNS)
    lines = _head(
        COLUMNS * (PANEL_WIDTH + MARGIN) + MARGIN,
        lines_of_panels * (PANEL_HEIGHT + MARGIN) + 2 * MARGIN,
        caption,
    )
    for i, owner in enumerate(owner for owner in COLOURS if any(s.owner == owner for s in found)):
        lines.append(f'<rect x="{MARGIN + 90 * i}" y="34" width="12" height="12" fill="{COLOURS[owner]}"/>')
        lines.append(f'<text x="{MARGIN + 90 * i + 17}" y="44">{owner}</text>')
    for number, panel in enumerate(panels):
        left = MARGIN + number % COLUMNS * (PANEL_WIDTH + MARGIN)
        bottom = 2 * MARGIN + number // COLUMNS * (PANEL_HEIGHT + MARGIN) + PANEL_HEIGHT - 10
        top = bottom - PANEL_HEIGHT + 30

        def x_of(x: int, left: int = left) -> float:
            span = math.log2(positions[-1] / positions[0]) or 1.0
            return left + math.log2(x / positions[0]) / span * (PANEL_WIDTH - 20)

        def y_of(rate: float, bottom: int = bottom, top: int = top) -> float:
            return bottom - rate / highest * (bottom - top)

        lines.append(f'<text x="{left}" y="{top - 6}">{escape(panel)}</text>')
        lines.append(
            f'<path d="M{left} {top}V{bottom}H{left + PANEL_WIDTH - 20}" fill="none" stroke="#999999"/>'
        )
        lines.append(
            f'<text x="{left - 4}" y="{top + 4}" text-anchor="end" font-size="10">{highest:.0f}</text>'
        )
        for x in positions:
            lines.append(
                f'<text x="{x_of(x):.0f}" y="{bottom + 13}" text-anchor="middle" font-size="9">{_short(x)}</text>'
            )
        for owner, colour in COLOURS.items():
            mine = sorted((s.x, s.rate) for s in found if s.panel == panel and s.owner == owner)
            points = " ".join(f"{x_of(x):.1f},{y_of(rate):.1f}" for x, rate in mine)
            lines.append(f'<polyline points="{points}" fill="none" stroke="{colour}" stroke-width="1.5"/>')
            lines += [
                f'<circle cx="{x_of(x):.1f}" cy="{y_of(rate):.1f}" r="2.5" fill="{colour}"/>'
                for x, rate in mine
            ]
    return "\n".join([*lines, "</svg>", ""])


def ratios(found: Sequence[Sample]) -> dict[tuple[str, int], float]:
    """(panel, x) -> time of the best peer over ours, where both were measured."""
    times: dict[tuple[str, int], dict[str, float]] = {}
    for sample in found:
        times.setdefault((sample.panel, sample.x), {})[sample.owner] = sample.median_us
    peers = ("fa3", "cudnn")
    return {
        cell: min(of[p] for p in peers if p in of) / of["cki"]
        for cell, of in times.items()
        if "cki" in of and any(p in of for p in peers)
    }


def heat_map(found: Sequence[Sample], caption: str) -> str:
    """The ratios as a table of coloured cells, as SVG text."""
    cells = ratios(found)
    panels = list(dict.fromkeys(panel for panel, _ in cells))
    positions = sorted({x for _, x in cells})
    left = 120
    lines = _head(
        max(640, left + CELL_WIDTH * len(positions) + 20), CELL_HEIGHT * (len(panels) + 1) + 70, caption
    )
    for column, x in enumerate(positions):
        centre = left + CELL_WIDTH * (column + 0.5)
        lines.append(f'<text x="{centre:.0f}" y="52" text-anchor="middle">{_short(x)}</text>')
    for line, panel in enumerate(panels):
        y = 60 + CELL_HEIGHT * line
        lines.append(f'<text x="{left - 8}" y="{y + 17}" text-anchor="end">{escape(panel)}</text>')
        for column, x in enumerate(positions):
            if (panel, x) in cells:
                ratio, place = cells[panel, x], left + CELL_WIDTH * column
                lines.append(
                    f'<rect x="{place}" y="{y}" width="{CELL_WIDTH - 2}" height="{CELL_HEIGHT - 2}" '
                    f'fill="{_shade(ratio)}" stroke="#cccccc"/>'
                )
                centre = place + CELL_WIDTH / 2
                lines.append(f'<text x="{centre:.0f}" y="{y + 17}" text-anchor="middle">{ratio:.2f}</text>')
    mean = math.exp(sum(map(math.log, cells.values())) / len(cells))
    lines.append(
        f'<text x="20" y="{66 + CELL_HEIGHT * len(panels) + 16}">geometric mean {mean:.3f}, least '
        f"{min(cells.values()):.3f}</text>"
    )
    return "\n".join([*lines, "</svg>", ""])


def _shade(ratio: float) -> str:
    depth = min(1.0, abs(math.log(ratio)) / math.log(1.3))
    faded = round(255 - 150 * depth)
    return f"#{faded:02x}ff{faded:02x}" if ratio >= 1 else f"#ff{faded:02x}{faded:02x}"


def _short(number: int) -> str:
    return f"{number // 1024}k" if number % 1024 == 0 else str(number)


def _head(width: int, height: int, caption: str) -> list[str]:
    return [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" font-family="sans-serif" '
        'font-size="12">',
        f'<rect width="{width}" height="{height}" fill="white"/>',
        f'<text x="20" y="24" font-size="14">{escape(caption)}</text>',
    ]


def draw_all(folder: Path) -> list[Path]:
    """Draws the sweeps that the folder has results of; returns what was written."""
    written = []
    for sweep in SWEEPS:
        source = folder / f"{sweep.source}.csv"
        if not source.exists():
            continue
        with source.open(newline="", encoding="utf-8") as file:
            rows = list(csv.DictReader(file))
        found = samples(rows, sweep)
        if not ratios(found):
            continue
        where = f"({rows[0]['gpu']}, commit {rows[0]['commit']})"
        texts = {
            "curves": curves(
                sweep, found, f"{sweep.source}: {sweep.rate_label} against {sweep.x_label} {where}"
            ),
            "ratios": heat_map(
                found, f"{sweep.source}: time of the best peer over ours, by {sweep.x_label} {where}"
            ),
        }
        for kind, text in texts.items():
            target = folder / f"{sweep.source}_{kind}.svg"
            target.write_text(text, encoding="utf-8")
            written.append(target)
    return written


if __name__ == "__main__":
    place = Path(sys.argv[1]) if len(sys.argv) > 1 else Path(__file__).resolve().parent / "results"
    for path in draw_all(place):
        print(f"drew {path}")
