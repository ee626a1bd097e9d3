"""The table of tasks on a terminal: what is on its rows, whatever its width."""

import io
import json
import os

import pyte
import pytest

from unisono.cluster_resolver._spec import Task
from unisono.launcher._plan import RunPaths
from unisono.launcher._run_files import Tail
from unisono.launcher.terminal import _console, _live_console
from unisono.launcher.terminal._lines import fit_row
from unisono.launcher.terminal._live_console import (
    LiveConsole,
    LiveTable,
    Observation,
    ReportingConsole,
    live_console,
)

W0, W1 = Task("worker", 0), Task("worker", 1)
RUNNING = {W0: "runs", W1: "runs"}
BAR = "\r\x1b[1m{0}/60\x1b[0m \x1b[32m" + "━" * 20 + "\x1b[0m 1s 2ms/step" + " - val_accuracy: 0.1234" * 6
NOW = 2_000_000_000.0


class Terminal(io.StringIO):
    """A terminal of a size: feeds an emulator."""

    def __init__(self, columns, rows=20):
        super().__init__()
        self.size = os.terminal_size((columns, rows))
        self.screen = pyte.HistoryScreen(columns, rows, history=1000)
        # The kernel returns the carriage at each line's end.
        self.screen.set_mode(pyte.modes.LNM)
        self.stream = pyte.Stream(self.screen)

    def write(self, text):
        self.stream.feed(text)
        return len(text)

    def isatty(self):
        return True

    @property
    def rows(self):
        """All rows, those that have scrolled away first."""
        above = ["".join(line[i].data for i in range(self.size.columns)) for line in self.screen.history.top]
        return [row.rstrip() for row in (*above, *self.screen.display) if row.strip()]


@pytest.fixture(params=[80, 100])
def terminal(request, monkeypatch):
    made = Terminal(request.param)
    for module in (_console, _live_console):
        monkeypatch.setattr(module, "terminal_size", lambda output: made.size)
    return made


def put(paths, task, at, step, count, generation=0, data=0.25, exchange=0.5, **work):
    path = paths.events(task)
    path.parent.mkdir(exist_ok=True)
    event = {"event": "steps", "from": NOW + at - 1, "until": NOW + at, "step": step, "count": count}
    event |= {"data": data, "exchange": exchange, "generation": generation, **work}
    with path.open("a") as file:
        file.write(json.dumps(event) + "\n")
    path.with_suffix(".step").write_text(f"{step}\n")


def test_the_table_and_the_bar_are_below_the_output_and_nothing_wraps(terminal, tmp_path):
    paths = RunPaths(tmp_path)
    log = tmp_path / "worker-0.log"
    log.write_text("Epoch 1/2\n")
    console = LiveConsole(terminal, terminal, LiveTable(paths))
    console.follow(W0, Tail(log, 0))
    for step in range(1, 60):
        with log.open("a") as file:
            file.write(BAR.format(step))
        put(paths, W0, step, 10 * step, 10)
        put(paths, W1, step, 10 * step, 10, data=None, exchange=None)
        console.show(Observation(0, RUNNING))
        console.flush()
    rows = terminal.rows
    assert rows[0] == "[worker:0] Epoch 1/2"
    assert rows[1].split() == [
        "task",
        "state",
        "step",
        "steps/s",
        "data",
        "%",
        "exchange",
        "%",
        "heartbeat",
        "gen.",
    ]
    assert rows[2].split()[:6] == ["worker:0", "runs", "590", "10", "25", "50"]
    assert rows[3].split()[:6] == ["worker:1", "runs", "590", "10", "-", "-"]
    assert rows[4].startswith("[worker:0] 59/60 1s 2ms/step - val_accuracy")
    assert len(rows) == 5
    with log.open("a") as file:
        file.write(BAR.format(60) + "\nEpoch 2/2\n")
    console.flush()
    console.finish()
    console.end([("unisono: worker:1 failed: no",) * 2])
    rows = terminal.rows
    assert rows[1].startswith("[worker:0] 60/60 1s 2ms/step")
    assert rows[2:4] == ["[worker:0] Epoch 2/2", "unisono: worker:1 failed: no"]
    assert "".join(rows[4:]).endswith(f"590 steps, 0 restarts; logs: {tmp_path}")


#: Of ten steps, on devices that are used to a half.
WORK = {"rows": 160, "tokens": 163_840, "flops": 4.95e14, "peak": 989e12, "memory": 31_400_000_000}


def test_the_work_of_steps_has_columns_where_there_is_room(terminal, tmp_path):
    paths = RunPaths(tmp_path)
    console = LiveConsole(terminal, terminal, LiveTable(paths))
    for step in range(1, 6):
        put(paths, W0, step, 100_000 + 10 * step, 10, **WORK)
        put(paths, W1, step, 100_000 + 10 * step, 10, rows=160)
        console.show(Observation(0, RUNNING))
    head, *tasks = terminal.rows
    assert len(tasks) == 2
    assert all(len(row) < terminal.size.columns for row in terminal.rows)
    wide = terminal.size.columns == 100
    heads = "task state step steps/s tokens/s {}MFU % GB data % {}heartbeat"
    assert head.split() == heads.format(*(("FLOP/s ", "exchange % ") if wide else ("", ""))).split()
    cells = tasks[0].split()
    assert cells[:5] == ["worker:0", "runs", "100050", "10", "164k"]
    assert cells[5:8] == (["495T", "50", "31.4"] if wide else ["50", "31.4", "25"])
    assert tasks[1].split()[4:6] == ["-", "-"]
    console.end([])


def test_what_a_file_says_of_work_is_checked(terminal, tmp_path):
    paths = RunPaths(tmp_path)
    console = LiveConsole(terminal, terminal, LiveTable(paths))
    for step in range(1, 6):
        put(paths, W0, step, step, 1, rows="many", tokens=-1, flops=None, peak=[], memory={})
        console.show(Observation(0, RUNNING))
    assert "rows/s" not in terminal.rows[0]
    assert terminal.rows[1].split()[:4] == ["worker:0", "runs", "5", "1"]
    console.end([])


def test_a_restart_says_what_it_cost(terminal, tmp_path):
    paths = RunPaths(tmp_path)
    console = LiveConsole(terminal, terminal, LiveTable(paths))
    put(paths, W0, 10, 100, 100)
    console.show(Observation(0, RUNNING))
    # Behind the last line that was written there were more steps.
    paths.events(W1).with_suffix(".step").write_text("130\n")
    console.show(Observation(0, {W0: "runs", W1: "failed"}, failed_at=NOW + 11.0))
    console.show(Observation(1, RUNNING))
    assert terminal.rows[-2].split()[:2] == ["worker:0", "starts"]
    with paths.events(W0).open("a") as file:
        file.write('{"event": "ste\n')  # the disk was full for a moment: the launch goes on
    put(paths, W1, 13.5, 91, 1, generation=1)
    put(paths, W0, 13.6, 91, 1, generation=1)
    console.show(Observation(1, RUNNING))
    console.show(Observation(1, RUNNING))
    resumed = [row for row in terminal.rows if row.startswith("unisono:")]
    assert resumed == ["unisono: resumed at step 90, lost 40 steps, 2.6 s after the failure"]
    console.end([])
    assert "1 restart;" in terminal.rows[-2] + terminal.rows[-1]
    assert "worker:1" not in terminal.rows[-1]


def test_a_failure_is_shown_once(terminal, tmp_path):
    log = tmp_path / "worker-0.log"
    log.write_text("Traceback (most recent call last):\nValueError: wrong\n")
    console = LiveConsole(terminal, terminal, LiveTable(RunPaths(tmp_path)))
    console.follow(W0, Tail(log, 0))
    console.say("unisono: worker:0 failed: ValueError: wrong (log: …); stopping the others")
    console.finish()
    trace = "[worker:0] Traceback (most recent call last):\n[worker:0] ValueError: wrong"
    failed = "unisono: worker:0 failed: ValueError: wrong"
    console.end([(f"{failed}, in", failed), (trace, "[worker:0] ValueError: wrong")])
    assert sum("ValueError: wrong" in row for row in terminal.rows) == 2
    assert sum("Traceback" in row for row in terminal.rows) == 1


def test_more_tasks_than_rows_are_counted(terminal, tmp_path):
    tasks = {Task("worker", i): "runs" for i in range(50)}
    console = LiveConsole(terminal, terminal, LiveTable(RunPaths(tmp_path)))
    console.show(Observation(0, tasks))
    assert len(terminal.rows) == 10
    assert terminal.rows[-1] == "… and 42 more"
    console.end([])


def test_no_table_where_there_is_no_terminal(tmp_path, monkeypatch):
    assert live_console(io.StringIO(), io.StringIO(), LiveTable(RunPaths(tmp_path))) is None
    monkeypatch.setenv("TERM", "dumb")
    assert live_console(io.StringIO(), Terminal(80), LiveTable(RunPaths(tmp_path))) is None


def write(paths, task, event, at, **facts):
    path = paths.events(task)
    path.parent.mkdir(exist_ok=True)
    with path.open("a") as file:
        line = {"event": event, "from": NOW + at, "until": NOW + at, "generation": 0, **facts}
        file.write(json.dumps(line) + "\n")


LOGS = {"accuracy": 0.97831, "loss": 0.0556, "val_accuracy": 0.9567, "val_loss": 0.1015}


def test_epoch_time_left_losses_and_rows_have_room_on_80_columns(terminal, tmp_path):
    paths = RunPaths(tmp_path)
    console = LiveConsole(terminal, terminal, LiveTable(paths))
    write(paths, W0, "fit", 0, epochs=4, batches=30, epoch=0, step=0)
    for step in range(1, 6):
        put(paths, W0, step, 10 * step, 10, exchange=None, rows=640)
        put(paths, W1, step, 10 * step, 10, exchange=None, rows=640)
    write(paths, W0, "epoch", 4, epoch=1, step=30, logs=LOGS)
    write(paths, W1, "epoch", 4, epoch=1, step=30, logs={"loss": 7.0})
    write(paths, W0, "logs", 5, step=40, logs={"loss": 0.05, "accuracy": 0.98})
    console.show(Observation(0, RUNNING))
    head, _, _, summary = terminal.rows
    # The exchange is not measured.
    assert head.split() == ["task", "state", "step", "steps/s", "rows/s", "data", "%", "heartbeat", "gen."]
    assert terminal.rows[1].split()[:5] == ["worker:0", "runs", "50", "10", "640"]
    numbers = "loss 0.05, val_loss 0.1015, accuracy 0.98, val_accuracy 0.9567"
    whole = f"epoch 2 of 4, 7 s left, {numbers}"
    assert summary == (whole if terminal.size.columns == 100 else whole.rpartition(",")[0])
    console.end([])


def test_a_pipe_is_told_of_restarts_and_of_the_end_and_of_a_failure_once(tmp_path):
    paths, messages = RunPaths(tmp_path), io.StringIO()
    console = ReportingConsole(messages, io.StringIO(), LiveTable(paths))
    put(paths, W0, 10, 100, 100)
    failed = "unisono: worker:0 failed: ValueError: wrong"
    console.say(f"{failed} (log: …); stopping the others")
    console.show(Observation(0, {W0: "failed"}, failed_at=NOW + 11.0))
    put(paths, W0, 13.5, 91, 1, generation=1)
    console.show(Observation(1, {W0: "runs"}))
    console.end([(f"{failed}, in generation 1", failed), ("[worker:0] Traceback", "[worker:0] ValueError")])
    *lines, closing, last = messages.getvalue().splitlines()
    assert lines == [
        f"{failed} (log: …); stopping the others",
        "unisono: resumed at step 90, lost 10 steps, 2.5 s after the failure",
    ]
    # The cause stands at the end.
    assert last == "[worker:0] Traceback"
    assert closing.endswith(f"91 steps, 1 restart; logs: {tmp_path}")


@pytest.mark.parametrize("columns", [79, 99])
def test_the_bar_of_an_epoch_is_not_cut(columns):
    bar = "[worker:0] 450/450 " + "━" * 20 + " 2s 4ms/step - accuracy: 0.9783 - loss: 0.0556"
    row = fit_row(bar + " - val_accuracy: 0.9567 - val_loss: 0.1015", columns)
    assert len(row) <= columns
    assert row.startswith("[worker:0] accuracy")
    assert row.endswith(("val_loss: 0.1015", "val_loss 0.1015"))
