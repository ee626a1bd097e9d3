"""The files of a launch, and what the terminal shows of them."""

import io
import json

import pytest

from unisono.cli._files import History, Tail, last_lines, prefixed, read_capacity, read_error, write_aside
from unisono.cli._guard import groups_left
from unisono.cli._screen import Screen
from unisono.cluster._spec import Task

W0 = Task("worker", 0)


def test_a_file_is_replaced_as_a_whole(tmp_path):
    path = tmp_path / "fence"
    for text in ("0\n", "1\n"):
        write_aside(path, text)
        assert path.read_text() == text
    assert list(tmp_path.iterdir()) == [path]


def test_history_is_a_line_per_event(tmp_path):
    history = History(tmp_path / "h")
    history.write("launched", pid=5)
    history.generation = 2
    history.write("ended", W0, 7, 137, "why")
    first, second = map(json.loads, (tmp_path / "h").read_text().splitlines())
    assert first["task"] is None
    assert second.pop("time") >= first["time"]
    assert second == {
        "event": "ended",
        "generation": 2,
        "task": "worker:0",
        "pid": 7,
        "exit_code": 137,
        "detail": "why",
    }


@pytest.mark.parametrize(("text", "capacity"), [("3\n", 3), ("", None), ("many", None), ("-1", None)])
def test_capacity(tmp_path, text, capacity):
    (tmp_path / "c").write_text(text)
    assert read_capacity(tmp_path / "c") == capacity
    assert read_capacity(tmp_path / "none") is None


def test_no_error_is_none(tmp_path):
    assert read_error(tmp_path / "none") is None


def test_the_last_lines_of_this_generation(tmp_path):
    path = tmp_path / "log"
    path.write_text("old\n" + "".join(f"{i}\n" for i in range(9)))
    assert last_lines(path, 4, 3) == "6\n7\n8"
    assert last_lines(path, 20) == "8"


def test_a_character_may_come_in_two_parts(tmp_path):
    path = tmp_path / "log"
    path.write_bytes("aé".encode()[:-1])
    tail = Tail(path, 0)
    assert tail.read() == "a"
    path.write_bytes("aé!".encode())
    assert tail.read() == "é!"


@pytest.mark.parametrize(
    ("pieces", "text"),
    [
        (["a\n", "b\n"], "> a\n> b\n"),
        (["a", "b\n"], "> ab\n"),
        (["1/2\r", "2/2\n"], "> 1/2\r> 2/2\n"),
        (["", "a"], "> a"),
        (["a\x0cb\n"], "> a\x0cb\n"),
    ],
)
def test_prefixes(pieces, text):
    shown, at_start = "", True
    for piece in pieces:
        added, at_start = prefixed(piece, "> ", at_start)
        shown += added
    assert shown == text


def test_messages_have_their_own_line(tmp_path):
    path = tmp_path / "log"
    path.write_text("step 1")
    both = io.StringIO()
    screen = Screen(both, both)
    screen.follow(W0, Tail(path, 0))
    screen.say("unisono: hello")
    assert both.getvalue() == "[worker:0] step 1\nunisono: hello\n"


class Closed(io.StringIO):
    def write(self, text):
        raise BrokenPipeError


def test_a_reader_that_has_gone_ends_the_show_and_nothing_else(tmp_path):
    path = tmp_path / "log"
    path.write_text("a\n")
    screen = Screen(None, Closed())
    screen.follow(W0, Tail(path, 0))
    screen.flush()
    screen.flush()
    screen.say("unisono: still there")


def test_the_guard_knows_who_is_left():
    assert groups_left(["+5", "+6", "-5", "+7"]) == {6, 7}
    assert groups_left([]) == set()
