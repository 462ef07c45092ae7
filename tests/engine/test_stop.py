"""Stop texts in text that comes in pieces."""

from __future__ import annotations

import numpy as np
import pytest

from cki.engine.stop import StopTexts


def feed(stops, pieces):
    """(all text that was given out, the stop text found)."""
    found = StopTexts(stops)
    given = ""
    for piece in pieces:
        text, stop = found.push(piece)
        given += text
        if stop is not None:
            return given, stop
    return given + found.end(), None


@pytest.mark.parametrize(
    ("stops", "text", "expected", "stop"),
    [
        ([], "abc", "abc", None),
        (["bc"], "abcbc", "a", "bc"),
        (["aab"], "aaab", "a", "aab"),
        (["xyz", "y"], "wxyz", "w", "xyz"),
        (["ab", "abc"], "zabc", "z", "abc"),
        (["abcd"], "abcabc", "abcabc", None),
        (["\n\n"], "one\ntwo\n", "one\ntwo\n", None),
    ],
)
def test_in_one_piece(stops, text, expected, stop):
    assert feed(stops, [text]) == (expected, stop)


def test_pieces_give_what_the_whole_gives():
    rng = np.random.default_rng(0)
    for _ in range(300):
        text = "".join(rng.choice(list("ab"), 12))
        stop = "".join(rng.choice(list("ab"), int(rng.integers(1, 5))))
        cuts = np.sort(rng.integers(0, 13, 4))
        pieces = [text[a:b] for a, b in zip([0, *cuts], [*cuts, 12])]
        assert (
            feed([stop], pieces)
            == feed([stop], [text])
            == (text.split(stop)[0], stop if stop in text else None)
        )


def test_text_that_cannot_become_a_stop_is_not_held_back():
    stops = StopTexts(["END"])
    assert stops.push("abc") == ("abc", None)
    assert stops.push("E") == ("", None)
    assert stops.push("x") == ("Ex", None)
