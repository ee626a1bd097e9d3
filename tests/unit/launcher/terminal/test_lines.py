"""Lines out of what a task prints, however it is cut."""

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from unisono.launcher.terminal._lines import Lines, render_line, truncate, width_of
from unisono.launcher.terminal._printable import plain

GLOO = "[Gloo] Rank 0 is connected to 1 peer ranks. Expected number of connected peer ranks is : 1"


def lines_of(*pieces):
    lines = Lines()
    return [line for piece in pieces for line in lines.feed(piece)] + lines.end()


@pytest.mark.parametrize(
    ("pieces", "lines"),
    [
        (["a\nb"], ["a", "b"]),
        (["a", "b\n"], ["ab"]),
        (["a\r", "\nb\r\n"], ["a", "b"]),
        (["1/2\r", "2/2\n"], ["2/2"]),
        (["\r1/2\b\b", "\b\r2/2\n"], ["2/2"]),
        (["  5%\b\b\b\b", " 10%\n"], [" 10%"]),
        (["a\x0cb\x85c\u2028d\n"], ["a\\x0cb\\x85c\\u2028d"]),
        ([GLOO + "\n", "Epoch 1\n"], ["Epoch 1"]),
        (["\n\n"], ["", ""]),
    ],
)
def test_lines(pieces, lines):
    assert lines_of(*pieces) == lines


@given(st.text("ab \r\b\n\x1b[1m", max_size=60), st.lists(st.integers(0, 60), max_size=4))
def test_cuts_between_pieces_change_nothing(text, cuts):
    bounds = [0, *sorted(cuts), len(text)]
    pieces = [text[a:b] for a, b in itertools.pairwise(bounds)]
    assert lines_of(*pieces) == lines_of(text)


def test_a_line_without_end_is_given_in_pieces():
    lines = Lines()
    pieces = [piece for _ in range(30) for piece in lines.feed("x" * 10_000)]
    assert max(map(len, pieces)) <= 1 << 16
    assert "".join([*pieces, *lines.end()]) == "x" * 300_000


@given(st.text("a中\u0301\t\x1b[1m", max_size=30), st.integers(0, 20))
def test_what_is_cut_fits(text, columns):
    kept = plain(truncate(text, columns))
    assert width_of(kept) <= columns or width_of(kept) == 0
    assert plain(text.replace("\t", " ")).startswith(kept)


def test_an_escape_that_is_cut_is_not_drawn():
    lines = Lines()
    lines.feed("bar\x1b[1")
    assert lines.pending == ["bar"]
    assert lines.feed("m!\n") == ["bar\x1b[1m!\x1b[0m"]


def test_backspaces_beyond_the_beginning():
    assert render_line("\b\bab\b\b\b\bc") == "cb"
