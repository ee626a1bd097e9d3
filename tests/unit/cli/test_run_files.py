"""The files of a launch, and what the terminal shows of them."""

import io
import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from unisono.cli._console import Screen
from unisono.cli._lines import plain
from unisono.cli._orphan_reaper import groups_left, marked, sweep
from unisono.cli._run_files import (
    BestEffort,
    History,
    Tail,
    last_lines,
    read_capacity,
    read_error,
    write_aside,
)
from unisono.cluster_resolver._spec import Task

W0 = Task("worker", 0)


def test_a_file_is_replaced_as_a_whole(tmp_path):
    path = tmp_path / "fence"
    for text in ("0\n", "1\n"):
        write_aside(path, text)
        assert path.read_text() == text
    assert list(tmp_path.iterdir()) == [path]


def test_history_is_a_line_per_event(tmp_path):
    history = History(tmp_path / "h", BestEffort(pytest.fail, tmp_path))
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


@pytest.mark.parametrize(
    ("text", "capacity"),
    [("3\n", 3), ("", None), ("many", None), ("-1", None), ("²", None), ("9" * 5000, None)],
)
def test_capacity(tmp_path, text, capacity):
    (tmp_path / "c").write_text(text)
    assert read_capacity(tmp_path / "c") == capacity
    assert read_capacity(tmp_path / "none") is None
    (tmp_path / "c").write_bytes(b"\xff\xfe3")
    assert read_capacity(tmp_path / "c") is None


@pytest.mark.parametrize("text", [None, "", "{", "[]", "\xff", '{"at": 1.5}', '{"at": "x", "code": 1}'])
def test_what_is_no_error_record_is_none(tmp_path, text):
    if text is not None:
        (tmp_path / "e").write_text(text, encoding="latin-1")
    assert read_error(tmp_path / "e") is None


def test_the_first_failure_of_the_disk_is_one_warning(tmp_path):
    said = []
    files = BestEffort(said.append, tmp_path)
    history = History(tmp_path / "removed" / "h", files)
    history.write("launched")
    history.write("ended")
    full = History(Path("/dev/full"), files) if os.path.exists("/dev/full") else history
    full.write("quit")
    (line,) = said
    assert "No such file or directory" in line
    assert str(tmp_path) in line


def test_the_last_lines_of_this_generation(tmp_path):
    path = tmp_path / "log"
    path.write_text("old\n" + "".join(f"{i}\n" for i in range(9)))
    assert last_lines(path, 4, 3) == "6\n7\n8"
    assert last_lines(path, 20) == "8"
    assert last_lines(tmp_path / "removed", 0) == ""


def test_a_character_may_come_in_two_parts(tmp_path):
    path = tmp_path / "log"
    path.write_bytes("aé".encode()[:-1])
    tail = Tail(path, 0)
    assert tail.read() == "a"
    path.write_bytes("aé!".encode())
    assert tail.read() == "é!"
    tail.close()


def test_much_output_is_read_in_parts_also_of_a_removed_log(tmp_path):
    path = tmp_path / "log"
    path.write_bytes(b"x" * 3_000_000)
    tail = Tail(path, 0)
    parts = [tail.read()]
    path.unlink()
    while part := tail.read():
        parts.append(part)
    tail.close()
    assert sum(map(len, parts)) == 3_000_000
    assert max(map(len, parts)) <= 1 << 20


def test_an_emptied_log_is_read_from_its_beginning(tmp_path):
    path = tmp_path / "log"
    path.write_text("old and long\n")
    tail = Tail(path, 0)
    tail.read()
    path.write_text("new\n")
    assert tail.read() == "new\n"
    tail.close()


def test_messages_have_their_own_line(tmp_path):
    path = tmp_path / "log"
    path.write_text("step 1")
    both = io.StringIO()
    screen = Screen(both, both)
    screen.follow(W0, Tail(path, 0))
    screen.say("unisono: hello")
    screen.finish()
    assert both.getvalue() == "[worker:0] step 1\nunisono: hello\n"


class Terminal(io.StringIO):
    """A terminal of 80 columns: a `StringIO` has no file number."""

    def isatty(self):
        return True


def shown(text, width=80):
    """The rows of a terminal after it received a text."""
    rows, row, column = [[]], 0, 0
    for character in plain(text):
        if character == "\n":
            row, column = row + 1, 0
        elif character == "\r":
            column = 0
        else:
            if column == width:
                row, column = row + 1, 0
            rows.extend([] for _ in range(row + 1 - len(rows)))
            rows[row][column : column + 1] = character
            column += 1
    return ["".join(cells).rstrip() for cells in rows]


def keras_bar(steps, width):
    """What Keras prints for each step of an epoch."""
    for step in range(1, steps + 1):
        bar = f"\x1b[1m{step}/{steps}\x1b[0m " + "-" * width
        yield ("\b" * len(bar) if step > 1 else "") + "\r" + bar + ("\n" if step == steps else "")


def test_a_rewritten_line_stays_in_one_row_with_one_prefix(tmp_path, monkeypatch):
    path = tmp_path / "log"
    path.write_text("")
    terminal, file = Terminal(), io.StringIO()
    screens = [Screen(None, terminal), Screen(None, file)]
    for screen in screens:
        screen.follow(W0, Tail(path, 0))
    for text in ("Epoch 1\n", *keras_bar(9, 100), "end\n"):
        # In two pieces, as a reading may cut it.
        for piece in (text[:7], text[7:]):
            with path.open("a") as log:
                log.write(piece)
            for screen in screens:
                screen.flush()
    for screen in screens:
        screen.finish()
    bar = "9/9 " + "-" * 100
    assert file.getvalue() == f"[worker:0] Epoch 1\n[worker:0] {bar}\n[worker:0] end\n"
    whole = "[worker:0] " + bar
    assert shown(terminal.getvalue()) == ["[worker:0] Epoch 1", whole[:80], whole[80:], "[worker:0] end"]
    assert "3/9" in terminal.getvalue()
    assert "\x1b[1m" in terminal.getvalue()


def test_a_line_that_is_not_complete_is_shown_in_time_where_lines_stay(tmp_path, monkeypatch):
    clock = [100.0]
    monkeypatch.setattr(time, "monotonic", lambda: clock[0])
    path = tmp_path / "log"
    path.write_text("\r1/9 loss 3")
    file = io.StringIO()
    screen = Screen(None, file)
    screen.follow(W0, Tail(path, 0))
    screen.flush()
    assert file.getvalue() == ""
    clock[0] += 31
    screen.flush()
    assert file.getvalue() == "[worker:0] 1/9 loss 3\n"
    screen.finish()


def test_what_a_stream_cannot_encode_is_a_question_mark(tmp_path):
    path = tmp_path / "log"
    path.write_text("1/2 ━━ é\n")
    raw = io.BytesIO()
    screen = Screen(None, io.TextIOWrapper(raw, "ascii"))
    screen.follow(W0, Tail(path, 0))
    screen.finish()
    assert raw.getvalue() == b"[worker:0] 1/2 ?? ?\n"


def test_a_closed_standard_output_is_no_error(tmp_path):
    path = tmp_path / "log"
    path.write_text("a\n")
    screen = Screen(None, None)
    screen.follow(W0, Tail(path, 0))
    screen.finish()


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


@pytest.mark.skipif(not os.path.exists("/proc"), reason="/proc tells of processes")
def test_marked_processes_are_found_and_killed(tmp_path):
    mark = f"unisono-test-{os.getpid()}"
    command = [sys.executable, "-S", "-c", "import time; print('ready', flush=True); time.sleep(600)"]
    environ = {**os.environ, "MARK": mark}
    children = [
        subprocess.Popen(command, env=environ, start_new_session=True, stdout=subprocess.PIPE)
        for _ in range(2)
    ]
    try:
        for child in children:
            child.stdout.readline()
        spared, killed = children
        assert marked(mark) == {spared.pid, killed.pid}
        sweep(mark, {spared.pid})
        assert killed.wait(timeout=60) == -9
        assert spared.poll() is None
    finally:
        for child in children:
            child.kill()
            child.wait()
            child.stdout.close()
