"""Draws each CSV of bench/results as an SVG bar chart beside it.  Needs no package.

    python bench/plot.py [FOLDER]

One group of bars a problem (op, shape, dtype), one bar an implementation.  The length is a perplexity or TFLOP/s where
every row has it, else GB/s where every row has it, else microseconds.  GPU and commit stand in the title.
"""

from __future__ import annotations

import csv
import sys
from collections.abc import Sequence
from pathlib import Path
from xml.sax.saxutils import escape

METRICS = (
    ("perplexity", "perplexity, lower is better"),
    ("tflop_per_s", "TFLOP/s, longer is better"),
    ("gb_per_s", "GB/s, longer is better"),
    ("median_us", "microseconds, shorter is better"),
)
COLOURS = ("#08306b", "#e6820e", "#3182bd", "#6a9a2d", "#8c4bab", "#7f7f7f")
BAR, GAP, LABELS, CHART, MARGIN = 16, 14, 330, 480, 20

Row = dict[str, str]


def metric_of(rows: Sequence[Row]) -> tuple[str, str]:
    """Column and caption of the first metric that every row has."""
    return next(metric for metric in METRICS if all(row.get(metric[0]) for row in rows))


def chart(name: str, rows: Sequence[Row]) -> str:
    """The rows of one CSV file as SVG text."""
    column, caption = metric_of(rows)
    implementations = list(dict.fromkeys(row["implementation"] for row in rows))
    groups: dict[str, list[Row]] = {}
    for row in rows:
        groups.setdefault(f"{row['op']} {row['problem']} {row['dtype']}", []).append(row)
    longest = max(float(row[column]) for row in rows) or 1.0
    height = 2 * MARGIN + 64 + sum(BAR * len(bars) + GAP for bars in groups.values())
    width = LABELS + CHART + 110
    title = (
        f"{name}: {caption} ({rows[0].get('gpu') or 'no GPU'}, commit {rows[0].get('commit') or 'unknown'})"
    )
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" '
        f'font-family="sans-serif" font-size="12">',
        f'<rect width="{width}" height="{height}" fill="white"/>',
        f'<text x="{MARGIN}" y="{MARGIN + 8}" font-size="14">{escape(title)}</text>',
    ]
    x = MARGIN
    for index, implementation in enumerate(implementations):
        lines.append(f'<rect x="{x}" y="{MARGIN + 24}" width="12" height="12" fill="{_colour(index)}"/>')
        lines.append(f'<text x="{x + 17}" y="{MARGIN + 34}">{escape(implementation)}</text>')
        x += 40 + 7 * len(implementation)
    y = MARGIN + 58
    for label, bars in groups.items():
        middle = y + BAR * len(bars) / 2 + 4
        lines.append(f'<text x="{LABELS - 8}" y="{middle:.0f}" text-anchor="end">{escape(label)}</text>')
        for row in bars:
            length = max(1.0, float(row[column]) / longest * CHART)
            fill = _colour(implementations.index(row["implementation"]))
            lines.append(
                f'<rect x="{LABELS}" y="{y}" width="{length:.1f}" height="{BAR - 2}" fill="{fill}"/>'
            )
            lines.append(f'<text x="{LABELS + length + 5:.1f}" y="{y + 11}">{float(row[column]):g}</text>')
            y += BAR
        y += GAP
    return "\n".join([*lines, "</svg>", ""])


def _colour(index: int) -> str:
    return COLOURS[index % len(COLOURS)]


def draw_all(folder: Path) -> list[Path]:
    """Draws every result file of a folder; returns what was written."""
    written = []
    for source in sorted(folder.glob("*.csv")):
        with source.open(newline="", encoding="utf-8") as file:
            rows = list(csv.DictReader(file))
        if rows and {"op", "problem", "dtype", "implementation", "median_us"} <= rows[0].keys():
            target = source.with_suffix(".svg")
            target.write_text(chart(source.stem, rows), encoding="utf-8")
            written.append(target)
    return written


if __name__ == "__main__":
    place = Path(sys.argv[1]) if len(sys.argv) > 1 else Path(__file__).resolve().parent / "results"
    for path in draw_all(place):
        print(f"drew {path}")
