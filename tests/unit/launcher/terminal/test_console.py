"""What the terminal shows of a launch."""

import io
import time

from unisono.cluster_resolver._spec import Task
from unisono.launcher._run_files import Tail
from unisono.launcher.terminal._console import Console
from unisono.launcher.terminal._printable import plain

W0 = Task("worker", 0)


def test_messages_have_their_own_line(tmp_path):
    path = tmp_path / "log"
    path.write_text("step 1")
    both = io.StringIO()
    screen = Console(both, both)
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
    screens = [Console(None, terminal), Console(None, file)]
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
    screen = Console(None, file)
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
    screen = Console(None, io.TextIOWrapper(raw, "ascii"))
    screen.follow(W0, Tail(path, 0))
    screen.finish()
    assert raw.getvalue() == b"[worker:0] 1/2 ?? ?\n"


def test_a_closed_standard_output_is_no_error(tmp_path):
    path = tmp_path / "log"
    path.write_text("a\n")
    screen = Console(None, None)
    screen.follow(W0, Tail(path, 0))
    screen.finish()


class Closed(io.StringIO):
    def write(self, text):
        raise BrokenPipeError


def test_a_reader_that_has_gone_ends_the_show_and_nothing_else(tmp_path):
    path = tmp_path / "log"
    path.write_text("a\n")
    messages = io.StringIO()
    screen = Console(messages, Closed())
    screen.follow(W0, Tail(path, 0))
    screen.flush()
    screen.flush()
    screen.say("unisono: still there")
    assert messages.getvalue() == "unisono: still there\n"
    output = io.StringIO()
    screen = Console(Closed(), output)
    screen.follow(W0, Tail(path, 0))
    screen.say("unisono: to a reader that has gone")
    screen.say("unisono: to nowhere")
    screen.finish()
    assert output.getvalue() == "[worker:0] a\n"
