"""`unisono timeline` of a launch with a SIGKILL, which ran on a terminal: what both show."""

import fcntl
import itertools
import json
import os
import pty
import re
import select
import struct
import termios
import time

import pyte
import pytest

from tests import forked
from tests.cluster.launch_support import LIMIT, WHO
from tests.unit.watch.test_page import data_in
from unisono._errors import InvalidArgumentError
from unisono.cli import _timeline, _timeline_page

COLUMNS, ROWS = 100, 40
#: Trains, is killed once behind a backup, and goes on.
SCRIPT = """\
import glob, time, keras, numpy as np, unisono
class Fault(keras.callbacks.Callback):
    def on_train_batch_begin(self, batch, logs=None):
        if generation == 0 and batch == 3:
            # The chief writes backups beside the steps, and passes one over while it is busy.
            deadline = time.monotonic() + 60
            while not glob.glob(sys.argv[1] + "/*/MANIFEST.json"):
                assert time.monotonic() < deadline
                time.sleep(0.01)
            time.sleep(0.5)
        if generation == 0 and me == "worker:1" and batch == 5:
            os.kill(os.getpid(), signal.SIGKILL)
strategy = unisono.MultiWorkerMirroredStrategy()
with strategy.scope():
    model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(3), keras.layers.Dense(1)])
    model.compile("sgd", "mse", metrics=["mae", "mse", "mape"])
x = np.ones((64, 4), "float32")
backup = unisono.callbacks.BackupAndRestore(sys.argv[1], save_freq=2)
callbacks = [unisono.callbacks.StepTimer(), backup, Fault()]
model.fit(x, x[:, :1], batch_size=8, epochs=2, validation_data=(x, x[:, :1]), callbacks=callbacks)
"""


def on_terminal(command, folder):
    """Run a command on a terminal; return its exit code, the terminal, and all rows that were shown."""
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", ROWS, COLUMNS, 0, 0))
    environ = forked.environment(TERM="xterm-256color")
    process = forked.Program(command, folder, os.ttyname(theirs), env=environ)
    screen = pyte.HistoryScreen(COLUMNS, ROWS, history=10_000)
    stream, shown, deadline = pyte.ByteStream(screen), set(), time.monotonic() + LIMIT
    try:
        # Our copy of the other end stays open: the program opens its own when it starts.
        while time.monotonic() < deadline:
            has_ended = process.poll() is not None
            if select.select([ours], [], [], 0.1)[0]:
                stream.feed(os.read(ours, 1 << 16))
                shown.update(row.rstrip() for row in screen.display)
            elif has_ended:
                break
        return process.wait(LIMIT), screen, shown
    finally:
        process.kill()
        os.close(theirs)
        os.close(ours)


@pytest.fixture(scope="module")
def launch(tmp_path_factory):
    root = tmp_path_factory.mktemp("launch")
    (root / "train.py").write_text(WHO + SCRIPT)
    command = ["-m", "unisono", "launch", "-n", "2", "--max-restarts", "1", "--spares", "0"]
    command += ["--log-dir", str(root / "logs"), "train.py", str(root / "backups")]
    code, screen, shown = on_terminal(command, root)
    above = ["".join(line[i].data for i in range(COLUMNS)) for line in screen.history.top]
    rows = [row.rstrip() for row in (*above, *screen.display) if row.strip()]
    assert code == 0, "\n".join(rows)
    return root / "logs", rows, shown


def test_the_terminal_had_a_table_and_says_what_the_restart_cost(launch):
    _, rows, shown = launch
    assert any(row.split()[:2] == ["worker:1", "runs"] for row in shown if row)
    assert any(row.startswith("task ") and row.endswith("gen.") for row in shown)
    # The table is gone, and the last line counts.
    assert not [row for row in rows if row.startswith("worker:")]
    closing = "".join(rows[-2:]) if len(rows[-1]) < 60 else rows[-1]
    assert "2 tasks, " in closing
    assert "16 steps, 1 restart; logs: " in closing
    assert sum("killed by SIGKILL" in row for row in rows) == 1
    resumed = [re.match(r"unisono: resumed at step (\d), lost (\d) steps, \d", row) for row in rows]
    (found,) = filter(None, resumed)
    # The newest backup that was complete; and one worker may have begun the sixth batch.
    assert int(found[1]) in (2, 4)
    assert int(found[1]) + int(found[2]) in (5, 6)
    bars = [row for row in rows if "8/8" in row]
    assert len(bars) == 2
    assert not [row for row in rows if row.startswith(("- ", "val_"))]


def test_the_page_and_the_trace_show_the_failure(launch):
    folder, *_ = launch
    _timeline_page.main(folder)
    page = (folder / "timeline.html").read_text()
    assert "://" not in page.replace("http://www.w3.org/2000/svg", "")
    # What is drawn of it, `tests/unit/watch/test_page_in_browser.py` looks at.
    job = data_in(page)["job"]
    bars = [(kind, bar) for row in job["timeline"].values() for kind, own in row.items() for bar in own]
    kinds = [kind for kind, _ in bars]
    assert set(kinds) >= {"process", "start", "steps", "compile", "save", "restore", "detection", "recovery"}
    assert kinds.count("process") == 4
    (failure,) = [fault for fault in job["faults"] if fault["kind"] == "failure"]
    assert (failure["task"], failure["text"]) == ("worker:1", "was killed by SIGKILL (exit code 137)")
    assert re.fullmatch(r"noticed after [\d.]+ s, next step after [\d.]+ s", failure["cost"])
    last = [bar for kind, bar in bars if kind == "steps" and "to step 16" in bar[3]]
    assert any(None not in bar[4:6] for bar in last)
    assert any("rows/s" in bar[3] and " FLOP/s" in bar[3] for bar in last)
    events = json.loads((folder / "timeline.json").read_text())["traceEvents"]
    names = {e["args"]["name"]: e["pid"] for e in events if e["ph"] == "M"}
    assert set(names) == {"launcher", "worker:0", "worker:1"}
    (fault,) = [e for e in events if e["ph"] == "i"]
    assert fault["name"] == "worker:1 was killed by SIGKILL (exit code 137)"
    assert {e["pid"] for e in events if e["ph"] == "X" and e["name"] == "steps"} == {1, 2}
    assert all(e["dur"] >= 0 <= e["ts"] for e in events if e["ph"] == "X")


def test_the_page_says_what_ran_when_and_shows_loss_speed_and_memory(launch):
    folder, *_ = launch
    page = _timeline_page.page_of(folder)
    assert re.search("<title>(.*?)</title>", page)[1] == "train.py"
    job = data_in(page)["job"]
    assert job["command"].startswith("unisono launch -n 2 --max-restarts 1")
    assert job["started"] == _timeline.read(folder).began
    assert job["curves"].keys() >= {"loss", "val_loss", "mae", "rows_per_s", "host_bytes"}
    assert all(job["curves"].values())
    assert dict(job["config"])["global batch size"] == "8"
    assert "step" in data_in(page)["logs"]["worker:0"]


def test_fault_detection_and_next_step_follow_each_other(launch):
    folder, *_ = launch
    found = _timeline.read(folder)
    (recovery,) = found.outages
    assert recovery.task == "worker:1"
    assert 0 < recovery.fault <= recovery.noticed < recovery.first_step < found.seconds
    steps = [s for s in found.spans if s.name == "steps" and s.row == "worker:0"]
    assert {s.generation for s in steps} == {0, 1}
    # Lines of a second, and the last one at the end of the process.
    assert all(a.ended <= b.began + 1e-6 for a, b in itertools.pairwise(steps))
    # Sampled by `StepTimer`: the two workers exchange gradients.
    assert 0 < steps[-1].shares[1] <= 1
    assert 0 <= steps[-1].shares[0] <= 1


def test_a_folder_of_no_launch_is_an_error(tmp_path):
    with pytest.raises(InvalidArgumentError, match="--log-dir logs"):
        _timeline.read(tmp_path)


def test_a_task_that_lost_its_peer_is_not_the_cause(tmp_path):
    """Its error may reach the launcher before the end of the process that was killed."""
    lost = "failed: unisono.ClusterError: worker 0 of 2 lost worker 1"
    events = [
        ("launched", None, None, None, ""),
        ("started", "worker:0", 7, None, "cold"),
        ("started", "worker:1", 8, None, "cold"),
        ("failed", "worker:0", 7, 1, lost),
        ("ending", None, None, None, "failed"),
        ("ended", "worker:1", 8, 137, ""),
        ("failed", "worker:1", 8, 137, "was killed by SIGKILL (exit code 137)"),
    ]
    names = ("event", "task", "pid", "exit_code", "detail", "time", "generation")
    lines = [json.dumps(dict(zip(names, (*e, 100.0 + i, 0), strict=True))) for i, e in enumerate(events)]
    (tmp_path / "history.jsonl").write_text("\n".join([*lines, ""]))
    (outage,) = _timeline.read(tmp_path).outages
    assert (outage.task, outage.fault, outage.noticed) == ("worker:1", 3.0, 4.0)
