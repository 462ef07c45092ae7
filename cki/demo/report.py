"""What the demo shows: the similarity table, its heat map as a PNG, and a progress bar on stderr."""

from __future__ import annotations

import importlib.util
import os
import shutil
import sys
import time
import unicodedata
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, TextIO

from cki.demo.minilm import INSTALL, Array
from cki.errors import InvalidArgumentError, MissingPackageError

#: Colours of the heat map at similarity 0 (and below), 1/3, 2/3 and 1: one hue, readable in grey too.
COLOURS = ((247, 251, 255), (158, 202, 225), (49, 130, 189), (8, 48, 107))
CELL, MARGIN, LABEL_WIDTH = 84, 24, 400


def display_width(text: str) -> int:
    """Columns that a terminal gives the text: two for wide East Asian signs, none for combining ones."""
    return sum(
        0 if unicodedata.combining(sign) else 2 if unicodedata.east_asian_width(sign) in "WF" else 1
        for sign in text
    )


def shorten(text: str, columns: int) -> str:
    """The text on one line, cut with an ellipsis where it is wider than `columns`."""
    line = " ".join(text.split())
    if display_width(line) <= columns:
        return line
    while display_width(line) > columns - 1:
        line = line[:-1]
    return line.rstrip() + "…"


def similarity_table(sentences: Sequence[str], similarity: Array, columns: int | None = None) -> str:
    """The cosine similarities, one row a sentence, with its text at the end of the row."""
    if columns is None:
        columns = shutil.get_terminal_size((110, 24)).columns
    count = len(sentences)
    text_columns = max(20, columns - 6 - 7 * count)
    lines = ["    " + "".join(f"{number:>7}" for number in range(1, count + 1))]
    for row, sentence in enumerate(sentences):
        values = "".join(f"{similarity[row, column]:7.3f}" for column in range(count))
        lines.append(f"{row + 1:>4}{values}  {shorten(sentence, text_columns)}")
    return "\n".join(lines)


def colour(similarity: float) -> tuple[int, int, int]:
    """The cell colour of a similarity, interpolated in COLOURS."""
    place = min(max(similarity, 0.0), 1.0) * (len(COLOURS) - 1)
    below = min(int(place), len(COLOURS) - 2)
    share = place - below
    low, high = COLOURS[below], COLOURS[below + 1]
    red, green, blue = (round(a + (b - a) * share) for a, b in zip(low, high))
    return red, green, blue


def _font(size: int) -> Any:
    from PIL import ImageFont

    try:
        return ImageFont.truetype("DejaVuSans.ttf", size)  # covers more scripts than Pillow's own
    except OSError:
        return ImageFont.load_default(size)


def check_png(path: Path) -> None:
    """Raises before any work is done when the heat map could not be written: no Pillow, or no such folder."""
    if importlib.util.find_spec("PIL") is None:
        raise MissingPackageError(f"writing the heat map needs the package Pillow; do: {INSTALL}")
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.is_dir() or not os.access(path.parent, os.W_OK):
        raise InvalidArgumentError(f"--png {path} cannot be written", hint="a file in a folder of yours")


def write_heat_map(path: Path, sentences: Sequence[str], similarity: Array, title: str) -> None:
    """A PNG of the similarity matrix: sentences at the left, values in the cells."""
    from PIL import Image, ImageDraw

    count = len(sentences)
    top, left = MARGIN + 70, MARGIN + LABEL_WIDTH
    image = Image.new("RGB", (left + count * CELL + MARGIN, top + count * CELL + MARGIN), "white")
    draw = ImageDraw.Draw(image)
    small, large = _font(15), _font(20)
    draw.text((MARGIN, MARGIN), title, fill="black", font=large)
    for row, sentence in enumerate(sentences):
        middle = top + row * CELL + CELL // 2
        label = f"{row + 1}  {shorten(sentence, 200)}"
        if draw.textlength(label, font=small) > LABEL_WIDTH - 12:
            while draw.textlength(label + "…", font=small) > LABEL_WIDTH - 12:
                label = label[:-1]
            label = label.rstrip() + "…"
        draw.text((MARGIN, middle), label, fill="black", font=small, anchor="lm")
        draw.text(
            (left + row * CELL + CELL // 2, top - 14), str(row + 1), fill="black", font=small, anchor="mm"
        )
        for column in range(count):
            x, y, value = left + column * CELL, top + row * CELL, float(similarity[row, column])
            draw.rectangle((x, y, x + CELL - 2, y + CELL - 2), fill=colour(value))
            ink = "white" if value > 0.5 else "black"
            draw.text((x + CELL // 2, y + CELL // 2), f"{value:.2f}", fill=ink, font=small, anchor="mm")
    image.save(path, format="PNG")


class Progress:
    """A bar on stderr while something takes long: redrawn on a terminal, a line every few seconds elsewhere.

    total: the number of steps; while it is None, how many there will be is not known, and only what runs is shown.
    with Progress(total=8) as progress: progress.begin("layer 1"); ...; progress.begin("layer 2"); ...
    """

    SECONDS_BETWEEN_LINES = 5.0

    def __init__(self, total: int | None, stream: TextIO | None = None) -> None:
        self.total = total
        self.begun = 0
        self.what = ""
        self.stream = stream if stream is not None else sys.stderr
        self.terminal = self.stream.isatty()
        self.start = time.monotonic()
        self.last_line = self.start

    def __enter__(self) -> Progress:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self.terminal:
            self.stream.write("\r\x1b[K")
            self.stream.flush()

    def begin(self, what: str) -> None:
        """The next step begins."""
        self.begun += 1
        self.doing(what)

    def doing(self, what: str) -> None:
        """Says what runs now."""
        self.what = what
        self._show()

    def _show(self) -> None:
        now = time.monotonic()
        done = max(self.begun - 1, 0)
        line = self.what
        if self.total is not None:
            filled = round(24 * done / max(self.total, 1))
            line = f"[{'#' * filled}{'.' * (24 - filled)}] {self.begun}/{self.total} {self.what}"
        if self.terminal:
            self.stream.write(f"\r\x1b[K{shorten(line, 100)} {now - self.start:.0f} s")
            self.stream.flush()
        elif now - self.last_line >= self.SECONDS_BETWEEN_LINES:
            self.last_line = now
            print(line, file=self.stream, flush=True)
