"""The table, the heat map and the progress bar."""

from __future__ import annotations

import io

import numpy as np
import pytest

from cki.demo import report
from cki.errors import InvalidArgumentError

SIMILARITY = np.array([[1.0, 0.25], [0.25, 1.0]])


def test_table_holds_values_and_texts():
    table = report.similarity_table(["first", "second " * 40], SIMILARITY, columns=60)
    lines = table.splitlines()
    assert lines[0].split() == ["1", "2"]
    assert lines[1].split() == ["1", "1.000", "0.250", "first"]
    assert lines[2].endswith("…")
    assert max(map(report.display_width, lines)) <= 60


def test_shorten_counts_wide_signs():
    assert report.shorten("a\n  b", 10) == "a b"
    assert report.display_width("日本") == 4
    assert report.shorten("日本語の文章", 6) == "日本…"


@pytest.mark.parametrize(("value", "expected"), [(-0.5, 0), (0.0, 0), (1.0, -1), (2.0, -1)])
def test_colour_ends(value, expected):
    assert report.colour(value) == report.COLOURS[expected]


def test_colours_darken_with_similarity():
    brightness = [sum(report.colour(value)) for value in np.linspace(0, 1, 50)]
    assert all(a > b for a, b in zip(brightness, brightness[1:]))


def test_heat_map_paints_each_value(tmp_path):
    image = pytest.importorskip("PIL.Image")
    path = tmp_path / "new" / "map.png"
    report.check_png(path)
    report.write_heat_map(path, ["first", "second"], SIMILARITY, "title")
    with image.open(path) as picture:
        assert picture.format == "PNG"
        left, top = report.MARGIN + report.LABEL_WIDTH, report.MARGIN + 70
        corner = lambda row, column: (left + column * report.CELL + 3, top + row * report.CELL + 3)  # noqa: E731
        assert picture.getpixel(corner(0, 0)) == report.colour(1.0)
        assert picture.getpixel(corner(0, 1)) == report.colour(0.25)


def test_a_folder_is_no_png(tmp_path):
    with pytest.raises(InvalidArgumentError, match="cannot be written"):
        report.check_png(tmp_path)


class _Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_bar_on_a_terminal_grows_and_is_wiped():
    stream = _Terminal()
    with report.Progress(4, stream) as progress:
        for number in (1, 2, 3):
            progress.begin(f"layer {number}")
    text = stream.getvalue()
    assert "[############............] 3/4 layer 3" in text  # two are done
    assert text.endswith("\r\x1b[K")


def test_no_bar_in_a_log_file_for_short_work():
    stream = io.StringIO()
    with report.Progress(4, stream) as progress:
        progress.begin("layer 1")
    assert stream.getvalue() == ""


def test_a_line_every_few_seconds_in_a_log_file(monkeypatch):
    stream = io.StringIO()
    monkeypatch.setattr(report.Progress, "SECONDS_BETWEEN_LINES", 0.0)
    with report.Progress(4, stream) as progress:
        progress.begin("layer 1")
        progress.doing("compiling")
    assert stream.getvalue().splitlines() == [
        "[........................] 1/4 layer 1",
        "[........................] 1/4 compiling",
    ]


def test_no_bar_while_the_number_of_steps_is_unknown(monkeypatch):
    stream = io.StringIO()
    monkeypatch.setattr(report.Progress, "SECONDS_BETWEEN_LINES", 0.0)
    with report.Progress(None, stream) as progress:
        progress.begin("loading weights")
        progress.doing("built kernel")
        progress.total = 3
        progress.begin("layer_norm")
    assert stream.getvalue().splitlines() == [
        "loading weights", "built kernel", "[########................] 2/3 layer_norm",
    ]  # fmt: skip
