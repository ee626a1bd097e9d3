"""No byte of a task makes the terminal do what it should not, or a line of the launcher's."""

import json
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.unit.launcher.terminal.test_live_console import Terminal

from unisono.cluster_resolver._spec import Task
from unisono.launcher._launch import report_parts
from unisono.launcher._options import LaunchOptions
from unisono.launcher._plan import RunPaths, make_plan
from unisono.launcher._restart_policy import Failure
from unisono.launcher._run_files import Tail, error_record
from unisono.launcher._supervisor import Outcome
from unisono.launcher.engines._shared_folder import failure_report
from unisono.launcher.terminal import _console, _live_console
from unisono.launcher.terminal._console import Console
from unisono.launcher.terminal._lines import Lines
from unisono.launcher.terminal._live_console import LiveConsole, LiveTable, Observation
from unisono.launcher.terminal._printable import as_message, one_line, with_moves

W0, W1 = Task("worker", 0), Task("worker", 1)
FORGED = "unisono: done; the state is saved"
HOSTILE = [
    "\x1b]52;c;cm0gLXJmIH4K\x07",  # the clipboard
    "\x1b]0;title\x1b\\",
    "\x1b]8;;http://example.org\x1b\\link\x1b]8;;\x1b\\",
    "\x1b[?1049h",  # the alternate screen
    "\x1b[2J\x1b[H" + FORGED,
    "\x1bc\x9b2J\x9d0;title\x9c\x90q\x1b\\\x1b_G\x1b\\",
    "\x1b[6n\x1b[21t\x05",  # the terminal answers these, as if it were typed
    "\x1b[8m\x1b[41m",  # hidden, also what follows
    "\x1b[99A\r" + FORGED + "\x1b[K",
    "\x1b[3F" + FORGED,
    "\x1b[1;1H" + FORGED + "\x1b[99B",
    "\b" * 99 + FORGED,
    "\x1b[99D" + FORGED,
    "\x1b[1G" + FORGED,
    "\x85" + FORGED + "\x0b\x0c\a\x7f\0",
    "\u202e" + FORGED[::-1] + "\u202c\u2066",  # shown from right to left
    "\u2028" + FORGED + "\u2029",
]


class Recorder(Terminal):
    """A terminal that keeps the bytes, too."""

    def __init__(self, columns, rows=20):
        super().__init__(columns, rows)
        self.bytes = ""

    def write(self, text):
        self.bytes += text
        return super().write(text)


@pytest.fixture
def terminal(monkeypatch):
    made = Recorder(80, 60)
    for module in (_console, _live_console):
        monkeypatch.setattr(module, "terminal_size", lambda output: made.size)
    return made


def check_tame(terminal):
    """Only colours reach it, and what the launcher itself erases."""
    left = re.sub(r"\x1b\[[0-9;:]*m|\r|\n|\x1b\[[0-9]+A(?=\x1b\[J)|\x1b\[J", "", terminal.bytes)
    assert not re.search(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]", left), ascii(left)
    assert [row for row in terminal.rows if row.startswith(FORGED)] == []
    assert not re.search("[\u2028-\u202e\u2066-\u2069]", terminal.bytes)
    # Nothing of the launcher's is overwritten, or hidden by the colours of a task.
    assert terminal.rows[0] == "unisono: 2 tasks run"
    assert re.search(r"(?:^|\n|\x1b\[0m|\x1b\[J)unisono: the end", terminal.bytes)


@pytest.mark.parametrize("is_live", [False, True])
@pytest.mark.parametrize("end", ["\n", "", "\nnext\n"])
def test_bytes_of_a_log(terminal, tmp_path, is_live, end):
    log = tmp_path / "log"
    live = LiveConsole(terminal, terminal, LiveTable(RunPaths(tmp_path)))
    screen = live if is_live else Console(terminal, terminal)
    screen.say("unisono: 2 tasks run")
    screen.follow(W0, Tail(log, 0))
    if is_live:
        screen.show(Observation(0, {W0: "runs", W1: "runs"}))
    for text in HOSTILE:
        # In two pieces, as a reading may cut it.
        for piece in (text[:3], text[3:] + end):
            with log.open("a", newline="") as file:
                file.write(piece)
            screen.flush()
    screen.say("unisono: the end")
    screen.finish()
    check_tame(terminal)
    assert not end or "\\x1b]52;c;cm0gLXJmIH4K\\x07" in "".join(terminal.rows)


def outcome(root, report, detail="failed: ValueError"):
    plan = make_plan(LaunchOptions(workers=2), 0, 2, [1, 2], RunPaths(root))
    return Outcome(1, plan, Failure(W1, 1.0, 1, detail), "", report)


@pytest.mark.parametrize("text", [*HOSTILE, "\n" + FORGED, "\r\n" + FORGED])
def test_texts_of_exceptions(terminal, tmp_path, text):
    record = {
        "at": 1.0,
        "code": 1,
        "summary": "failed: " + text,
        "traceback": f"Traceback\nValueError: {text}",
    }
    read = error_record(json.dumps(record).encode())
    console = LiveConsole(terminal, terminal, LiveTable(RunPaths(tmp_path)))
    console.say("unisono: 2 tasks run")
    console.end(report_parts(outcome(tmp_path, read["traceback"], read["summary"])))
    (tmp_path / "errors").mkdir()
    (tmp_path / "errors" / "g0-worker-1.json").write_text(json.dumps(record))
    console.say(failure_report(RunPaths(tmp_path), 0, []))
    console.say("unisono: the end")
    check_tame(terminal)
    assert terminal.rows.count("[worker:1] Traceback") == 2


def test_a_task_cannot_hide_how_the_launch_has_ended(terminal, tmp_path):
    log = tmp_path / "worker-0.log"
    log.write_text(
        "unisono: worker:1 failed: ValueError, and more\nworker:1 failed: ValueError\nValueError: wrong\n"
    )
    console = LiveConsole(terminal, terminal, LiveTable(RunPaths(tmp_path)))
    console.follow(W0, Tail(log, 0))
    console.finish()
    console.end(report_parts(outcome(tmp_path, "Traceback\nValueError: wrong")))
    assert (
        sum(row.startswith("unisono: worker:1 failed: ValueError, in generation 0") for row in terminal.rows)
        == 1
    )
    assert "[worker:1] ValueError: wrong" in terminal.rows


def test_a_pipe_gets_neither_colours_nor_moves(tmp_path):
    log = tmp_path / "log"
    log.write_text("\x1b[31mred\x1b[0m \x1b]0;title\x07\n", newline="")
    with (tmp_path / "out").open("w+") as out:
        screen = Console(out, out)
        screen.follow(W0, Tail(log, 0))
        screen.finish()
        out.seek(0)
        assert out.read() == "[worker:0] red \\x1b]0;title\\x07\n"


@given(st.text("a\x1b[]0;1mAKDGFh?25\r\b\n\t\x9b\x07\x85", max_size=80))
def test_any_text(text):
    for tame, allowed in ((with_moves, r"\x1b\[A|[\r\b]"), (as_message, "(?!)"), (one_line, "(?!)")):
        left = re.sub(rf"\x1b\[[0-9;:]*m|{allowed}", "", tame(text))
        assert not re.search(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]", left)
    assert "\n" not in one_line(text)
    lines = Lines()
    for line in [*lines.feed(text), *lines.pending, *lines.end()]:
        assert not re.search(r"[\x00-\x08\x0a-\x1f\x7f-\x9f]", re.sub(r"\x1b\[[0-9;:]*m", "", line))


def test_colours_stay_also_over_several_lines():
    lines = Lines()
    assert lines.feed("\x1b[31mred\nstill\x1b[0m\nplain\n") == [
        "\x1b[31mred\x1b[0m",
        "\x1b[31mstill\x1b[0m",
        "plain",
    ]


def tqdm_bars(file):
    from tqdm import tqdm

    look = {"file": file, "ncols": 40, "mininterval": 0, "bar_format": "{desc} {n}/{total}"}
    for _ in tqdm(range(3), "all", **look):
        for _ in tqdm(range(2), "each", leave=False, position=1, **look):
            yield
    print("trained", file=file, flush=True)


def rich_bars(file):
    from rich.console import Console as RichConsole
    from rich.progress import MofNCompleteColumn, Progress, TextColumn

    console = RichConsole(file=file, force_terminal=True, width=60, color_system="standard")
    columns = TextColumn("{task.description}"), MofNCompleteColumn()
    with Progress(*columns, console=console, auto_refresh=False) as progress:
        outer, inner = (progress.add_task(name, total=total) for name, total in (("all", 3), ("each", 2)))
        for _ in range(3):
            progress.reset(inner)
            for _ in range(2):
                progress.refresh()
                yield
                progress.advance(inner)
            progress.advance(outer)
    print("trained", file=file, flush=True)


@pytest.mark.parametrize("is_live", [False, True])
@pytest.mark.parametrize(("bars", "left"), [(tqdm_bars, []), (rich_bars, ["[worker:0] each 2/2"])])
def test_bars_below_each_other_are_written_anew(terminal, tmp_path, is_live, bars, left):
    """As tqdm and rich draw them: the cursor goes down and up, within the rows of the task."""
    log = tmp_path / "log"
    screen = (
        LiveConsole(terminal, terminal, LiveTable(RunPaths(tmp_path))) if is_live else Console(None, terminal)
    )
    screen.follow(W0, Tail(log, 0))
    seen = []
    with log.open("w") as file:
        for _ in bars(file):
            file.flush()
            screen.flush()
            seen.append([re.sub(" +", " ", row) for row in terminal.rows if row.startswith("[")])
    screen.flush()
    screen.finish()
    assert ["[worker:0] all 1/3", "[worker:0] each 1/2"] in seen
    # Before the first move upwards a row counts as complete.
    assert all(len(rows) <= 3 for rows in seen)
    rows = [re.sub(" +", " ", row) for row in terminal.rows]
    assert rows[-2 - len(left) :] == ["[worker:0] all 3/3", *left, "[worker:0] trained"]
